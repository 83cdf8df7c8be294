"""The accuracy reward: 1 where the answer found in the response matches the gold answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from rft_rewards.errors import MissingReferenceError
from rft_rewards.extraction import (
    ExtractionPolicy,
    check_policy,
    count_markers,
    extract_boxed,
    extract_gsm8k,
    gsm8k_reference,
)
from rft_rewards.grading import Grader, Verdict, shared_grader
from rft_rewards.sample import RewardSample
from rft_rewards.score import Score


@dataclass(frozen=True, kw_only=True)
class ExactAnswer:
    """Reward function made by `exact_answer`."""

    policy: ExtractionPolicy = "strict"
    grader: Grader | None = None
    name: str = "accuracy"

    def __post_init__(self) -> None:
        check_policy(self.policy)

    def __call__(self, samples: Sequence[RewardSample]) -> list[Score]:
        answers = [self._answer(sample.response) for sample in samples]
        golds = [self._gold(sample) for sample in samples]
        verdicts = (self.grader or shared_grader()).grade(list(zip(answers, golds, strict=True)))
        return [
            self._score(sample, answer, verdict)
            for sample, answer, verdict in zip(samples, answers, verdicts, strict=True)
        ]

    def _answer(self, response: str) -> str | None:
        # The whole box, because a unit or percent sign in it decides against a gold answer that has one too.
        return extract_boxed(response) if self.policy == "boxed" else extract_gsm8k(response, self.policy)

    def _gold(self, sample: RewardSample) -> str:
        reference = sample.reference
        if reference is None or not reference.strip():
            raise MissingReferenceError(
                f"{self.name} needs RewardSample.reference, which is {reference!r}: give every sample's gold answer"
            )
        return reference if "####" not in reference else gsm8k_reference(reference)

    def _score(self, sample: RewardSample, answer: str | None, verdict: Verdict) -> Score:
        counts = {
            "missing_answer": answer is None,
            "multi_answer": count_markers(sample.response, self.policy) > 1,
            "timeouts": verdict.timed_out,
            "grader_failures": verdict.failed,
            "symbolic": verdict.symbolic,
            "symbolic_unavailable": verdict.unavailable,
        }
        diagnostics = {"answer": answer, **{event: True for event, happened in counts.items() if happened}}
        return Score(
            float(verdict.equal),
            diagnostics=diagnostics,
            counts={event: int(happened) for event, happened in counts.items()},
        )


def exact_answer(
    policy: ExtractionPolicy = "strict", *, grader: Grader | None = None, name: str = "accuracy"
) -> ExactAnswer:
    """Accuracy: 1.0 where the answer found by `policy` matches the reference, else 0.0.

    The reference is a bare gold answer, or a GSM8K gold text with `####`. Each score carries the extracted answer as
    a diagnostic, and counts of responses without an answer, with several marked answers (the last one counts), and
    of pairs over the grader's time limit (these score 0).

    Args:
        policy: where the answer is looked for, see `ExtractionPolicy`.
        grader: compares the answers; None takes one that all such functions share.
        name: name of the score.

    Raises:
        ValueError: the policy is unknown.
        MissingReferenceError: when called with a sample that has no reference.
    """
    return ExactAnswer(policy=policy, grader=grader, name=name)
