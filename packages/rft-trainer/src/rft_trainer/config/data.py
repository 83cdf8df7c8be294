"""Model, data sets and prompts."""

from dataclasses import dataclass

from rft_trainer.config.ranges import below


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Model, data sets and prompts."""

    pretrain: str | None = None
    """Folder or hub id of the initial checkpoint."""
    dataset: str | None = None
    """JSONL or parquet file, or the id of a data set that `datasets` loads."""
    eval_dataset: str | None = None
    """Held-out problems, same forms; none: no evaluation."""
    dataset_split: str = "train"
    """Split that is trained on when `dataset` is a hub id."""
    eval_split: str = "test"
    """Split that is evaluated when `eval_dataset` is a hub id."""
    input_key: str = "question"
    """Field that holds the problem."""
    reference_key: str = "answer"
    """Field that holds the gold answer."""
    label_key: str | None = None
    """Field that chooses the reward recipe; none: the app's default."""
    system_prompt: str | None = None
    """System message in front of each problem."""
    input_template: str | None = None
    """Format string around the problem, with one `{}`."""
    prompt_max_len: int = 512
    """Longest prompt in tokens; longer prompts are an error."""
    eval_limit: int | None = None
    """Evaluate the first so many held-out problems; none: all."""

    def _data_problems(self) -> list[str]:
        problems = below(self, 1, "prompt_max_len", "eval_limit")
        if self.input_template is not None and self.input_template.count("{}") != 1:
            problems.append(f"input_template is {self.input_template!r}: put exactly one {{}} where the problem goes")
        return problems
