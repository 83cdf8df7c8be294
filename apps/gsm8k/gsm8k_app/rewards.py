"""What is paid: the GSM8K rule, and for data sets with the label `math` the answer in a box."""

from rft_rewards import RewardComputationEngine, RewardRecipe, exact_answer

LABEL = "gsm8k"
"""The number behind `####` must be the gold number."""
MATH_LABEL = "math"
"""The content of the last `\\boxed{}` must equal the gold answer as mathematics."""
LABELS = (LABEL, MATH_LABEL)


def gsm8k_rewards() -> RewardComputationEngine:
    """`accuracy` is what training pays; `accuracy_any_form` is the last number of a GSM8K answer, only watched.

    The distance between the two is the share of right answers that the form `#### N` alone decides.
    """
    return RewardComputationEngine(
        [
            RewardRecipe(
                label=LABEL,
                functions=[exact_answer("strict"), exact_answer("flexible", name="accuracy_any_form")],
                weights=[1.0, 0.0],
            ),
            RewardRecipe(label=MATH_LABEL, functions=[exact_answer("boxed")]),
        ]
    )
