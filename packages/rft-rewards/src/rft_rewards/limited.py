"""A custom reward function under a time limit that really ends it."""

from collections.abc import Sequence

from rft_rewards.errors import RecipeError, RewardFunctionError
from rft_rewards.recipe import load_function
from rft_rewards.sample import RewardSample
from rft_rewards.score import Score
from rft_rewards.scoring import checked_scores
from rft_rewards.workers import Outcome, WorkerPool


class TimeLimited:
    """Reward function made by `time_limited`."""

    def __init__(
        self, path: str, *, timeout_seconds: float, workers: int, timeout_score: float, name: str | None
    ) -> None:
        if ":" not in path:
            raise RecipeError(f"reward function {path!r} has the wrong form: write 'package.module:name'")
        load_function(path)  # a wrong path is found here, not in the first step
        self.name = name or path.partition(":")[2].rpartition(".")[2]
        self.timeout_score = timeout_score
        self._pool = WorkerPool(path, workers=workers, timeout_seconds=timeout_seconds)

    def __call__(self, samples: Sequence[RewardSample]) -> list[Score]:
        outcomes = self._pool.map([[sample] for sample in samples])
        return [self._score(position, outcome) for position, outcome in enumerate(outcomes)]

    def close(self) -> None:
        """End the worker processes; they start again when they are needed."""
        self._pool.close()

    def _score(self, position: int, outcome: Outcome) -> Score:
        if outcome.state == "timed out":
            return Score(self.timeout_score, diagnostics={"timed_out": True}, counts={"timeouts": 1})
        if outcome.state == "failed":
            raise RewardFunctionError(
                f"reward function {self.name!r} raised on sample {position} of its batch: {outcome.value}"
            )
        score = checked_scores(self.name, outcome.value, [position])[0]
        return Score(score.value, score.steps, score.diagnostics, {"timeouts": 0, **score.counts})


def time_limited(
    path: str,
    *,
    timeout_seconds: float = 2.0,
    workers: int = 2,
    timeout_score: float = 0.0,
    name: str | None = None,
) -> TimeLimited:
    """The reward function at `package.module:name`, run in worker processes, sample by sample, under a time limit.

    A sample over the limit scores `timeout_score`, is flagged in its diagnostics and counted as `timeouts`. It works
    from any thread, which limits made from signals do not. The function is called with one sample at a time, and
    sample and score are pickled.

    Raises:
        RecipeError: there is no callable at `path`.
        ValueError: `workers` or `timeout_seconds` is out of range.
        RewardFunctionError: when called, where the function raises.
    """
    return TimeLimited(path, timeout_seconds=timeout_seconds, workers=workers, timeout_score=timeout_score, name=name)
