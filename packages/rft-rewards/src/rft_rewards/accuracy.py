"""The accuracy reward: 1 where the answer found in the response matches the gold answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from rft_rewards.errors import MissingReferenceError
from rft_rewards.extraction import ExtractionPolicy, check_policy, count_markers, extract_gsm8k
from rft_rewards.matching import answers_match
from rft_rewards.sample import RewardSample
from rft_rewards.score import Score


@dataclass(frozen=True, kw_only=True)
class ExactAnswer:
    """Reward function made by `exact_answer`."""

    policy: ExtractionPolicy = "strict"
    name: str = "accuracy"

    def __post_init__(self) -> None:
        check_policy(self.policy)

    def __call__(self, samples: Sequence[RewardSample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: RewardSample) -> Score:
        if sample.reference is None:
            raise MissingReferenceError(
                f"{self.name} needs RewardSample.reference, which is None: give the gold answer"
            )
        gold = extract_gsm8k(sample.reference, "strict") if "####" in sample.reference else sample.reference
        answer = extract_gsm8k(sample.response, self.policy)
        right = gold is not None and answers_match(answer, gold)
        counts = {
            "missing_answer": int(answer is None),
            "multi_answer": int(count_markers(sample.response, self.policy) > 1),
            "timeouts": 0,
        }
        return Score(float(right), diagnostics={"answer": answer}, counts=counts)


def exact_answer(policy: ExtractionPolicy = "strict", *, name: str = "accuracy") -> ExactAnswer:
    """1.0 where the answer found by `policy` matches the reference, else 0.0."""
    return ExactAnswer(policy=policy, name=name)
