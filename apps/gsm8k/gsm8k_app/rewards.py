"""The GSM8K rule: the number behind `####` must be the gold number."""

from rft_rewards import RewardComputationEngine, RewardRecipe, exact_answer

LABEL = "gsm8k"


def gsm8k_rewards() -> RewardComputationEngine:
    """`accuracy` (strict form) is what training pays; `accuracy_any_form` takes the last number and is only watched.

    The distance between the two is the share of right answers that the form `#### N` alone decides.
    """
    return RewardComputationEngine(
        RewardRecipe(
            label=LABEL,
            functions=[exact_answer("strict"), exact_answer("flexible", name="accuracy_any_form")],
            weights=[1.0, 0.0],
        )
    )
