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
    blend: tuple[str, ...] = ()
    """Several training sets instead of dataset, each SOURCE[,name=N,weight=W,label=L,split=S,input_key=K,
    reference_key=K,limit=N]; a batch draws from them by weight."""
    dataset_split: str = "train"
    """Split that is trained on when `dataset` is a hub id."""
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
    drop_last: bool = False
    """Leave out the last batch of an epoch when it is not full, instead of taking a smaller step."""
    prompt_max_len: int = 512
    """Longest prompt in tokens; longer prompts are an error."""

    def _data_problems(self) -> list[str]:
        problems = below(self, 1, "prompt_max_len")
        if self.dataset is not None and self.blend:
            problems.append(f"dataset is {self.dataset!r} and blend has more: name all sets in blend")
        if self.drop_last and self.blend:
            problems.append("drop_last and blend: blended sets have no last batch; leave out drop_last")
        if self.input_template is not None and self.input_template.count("{}") != 1:
            problems.append(f"input_template is {self.input_template!r}: put exactly one {{}} where the problem goes")
        return problems
