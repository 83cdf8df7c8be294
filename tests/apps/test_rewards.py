"""What the app pays, by the label of a data set."""

import pytest
from gsm8k_app.rewards import LABELS, gsm8k_rewards

from rft_rewards import RewardSample


@pytest.mark.parametrize(
    ("label", "response", "reference", "reward", "scores"),
    [
        ("gsm8k", "3 + 4 = 7\n#### 7", "7", 1.0, {"accuracy": 1.0, "accuracy_any_form": 1.0}),
        ("gsm8k", "The answer is 7.", "7", 0.0, {"accuracy": 0.0, "accuracy_any_form": 1.0}),
        ("gsm8k", r"So it is \boxed{7}", "8", 0.0, {"accuracy": 0.0, "accuracy_any_form": 0.0}),
        ("math", r"So it is \boxed{\frac{3}{6}}", r"\frac{1}{2}", 1.0, {"accuracy": 1.0}),
        ("math", "#### 0.5", r"\frac{1}{2}", 0.0, {"accuracy": 0.0}),
    ],
)
def test_each_label_has_its_own_rule(label, response, reference, reward, scores):
    rewards = gsm8k_rewards()
    assert rewards.labels == tuple(sorted(LABELS))
    sample = RewardSample(response=response, prompt="?", reference=reference, label=label)
    (result,) = rewards.compute([sample])
    assert result.total == reward
    assert dict(result.scores) == scores
