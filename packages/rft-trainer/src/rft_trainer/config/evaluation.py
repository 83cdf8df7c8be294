"""What is evaluated, with which sampling, and what is estimated from it."""

from dataclasses import dataclass

from rft_trainer.config.ranges import below


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """What is evaluated, with which sampling, and what is estimated from it."""

    eval_dataset: str | None = None
    """Held-out problems, same forms as dataset; none: no evaluation."""
    eval_sets: tuple[str, ...] = ()
    """Held-out sets by name, each SOURCE,name=N with further fields as in blend."""
    eval_split: str = "test"
    """Split that is evaluated when a held-out set is a hub id."""
    eval_limit: int | None = None
    """Evaluate the first so many problems of each set; none: all."""
    eval_steps: int = 0
    """Evaluate every so many steps besides before and after; 0: only those two."""
    eval_samples: int = 1
    """Responses to each held-out problem."""
    eval_temperature: float = 0.0
    """Sampling temperature of evaluations; 0: greedy."""
    eval_top_p: float = 1.0
    """Nucleus of evaluations; 1 is off."""
    eval_top_k: int = 0
    """Largest number of candidate tokens of evaluations; 0 is off."""
    eval_greedy: bool = False
    """Besides sampled responses, one greedy response to each problem, under names with greedy in them."""
    eval_max_len: int | None = None
    """Longest response of evaluations in tokens; none: generate_max_len."""
    eval_pass_at: tuple[int, ...] = ()
    """Estimate pass@k for these k, at most eval_samples each."""
    eval_majority: bool = False
    """Also score the most frequent answer of each problem's responses (needs eval_extractors or eval_symbolic)."""
    eval_extractors: bool = False
    """Score by the strict, flexible and boxed extraction of an answer, side by side, besides the rewards."""
    eval_symbolic: bool = False
    """Score by math-verify's own reading of the whole response too (rft-rewards extra math)."""

    def _evaluation_problems(self) -> list[str]:
        problems = below(self, 1, "eval_limit", "eval_samples", "eval_max_len") + below(
            self, 0, "eval_steps", "eval_temperature", "eval_top_k"
        )
        if not 0 < self.eval_top_p <= 1:
            problems.append(f"eval_top_p is {self.eval_top_p}: give a number in (0, 1]")
        if self.eval_samples > 1 and self.eval_temperature == 0:
            problems.append(
                f"eval_samples is {self.eval_samples} and eval_temperature is 0: greedy responses are all alike; "
                "give --eval_temperature above 0, or --eval_samples 1"
            )
        if self.eval_greedy and self.eval_temperature == 0:
            problems.append(
                "eval_greedy and eval_temperature 0: all responses are greedy already; leave eval_greedy out"
            )
        problems += [
            f"eval_pass_at has {k}: give numbers from 1 to eval_samples ({self.eval_samples})"
            for k in self.eval_pass_at
            if not 1 <= k <= self.eval_samples
        ]
        if self.eval_majority and not (self.eval_extractors or self.eval_symbolic):
            problems.append("eval_majority needs the extracted answers: give --eval_extractors too")
        if self.eval_dataset is not None and self.eval_sets:
            problems.append(f"eval_dataset is {self.eval_dataset!r} and eval_sets has more: name all sets in eval_sets")
        return problems
