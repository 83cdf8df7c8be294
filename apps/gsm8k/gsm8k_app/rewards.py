"""What is paid: the GSM8K rule, and for data sets with the label `math` the answer in a box."""

from gsm8k_app.calculations import right_calculations
from rft_rewards import RewardComputationEngine, RewardFunction, RewardRecipe, exact_answer

LABEL = "gsm8k"
"""The number behind `####` must be the gold number."""
MATH_LABEL = "math"
"""The content of the last `\\boxed{}` must equal the gold answer as mathematics."""
LABELS = (LABEL, MATH_LABEL)


def gsm8k_rewards(partial_credit: float = 0.0) -> RewardComputationEngine:
    """`accuracy` is what training pays; `accuracy_any_form` is the last number of a GSM8K answer, only watched.

    The distance between the two is the share of right answers that the form `#### N` alone decides.

    Args:
        partial_credit: weight of `right_calculations` beside the accuracy; 0 leaves it out.
    """
    functions: list[RewardFunction] = [exact_answer("strict"), exact_answer("flexible", name="accuracy_any_form")]
    weights = [1.0, 0.0]
    if partial_credit:
        functions.append(right_calculations)
        weights.append(partial_credit)
    return RewardComputationEngine(
        [
            RewardRecipe(label=LABEL, functions=functions, weights=weights),
            RewardRecipe(label=MATH_LABEL, functions=[exact_answer("boxed")]),
        ]
    )
