"""Partial credit for a gold answer's calculations, by hand."""

import pytest
from gsm8k_app.calculations import right_calculations
from gsm8k_app.rewards import gsm8k_rewards

from rft_rewards import RewardSample

GOLD = "He sold 48/2 = <<48/2=24>>24 clips.\nThat is 48+24 = <<48+24=72>>72.\nIt cost $<<72*0.5=36>>36.00.\n#### 36"


def share(response, gold=GOLD):
    (score,) = right_calculations([RewardSample(response, reference=gold)])
    return score.value


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("48/2 = 24 and 48+24=72, 72 x $0.50 = $36.00\n#### 36", 3),
        ("48 \u00f7 2 = 24\n#### 24", 1),
        ("half of it is 24, then 72, then 36\n#### 36", 0),  # claimed, not calculated
        ("48/2 = 25, 48+24 = 73", 0),  # wrong
        ("20+4 = 24", 1),  # another way to it
        ("24 = 24, = 72, 36", 0),  # no operation
        ("48/2 = 24, 48/2 = 24, 48 / 2 = 24", 1),
        ("2 * (10 + 2) = 24; 50% * 72 = 36", 2),
        ("__import__('os') + 1 = 24, 9**9**9**9 = 72, 1/0 = 36, 08+64 = 72", 0),
        ("1,000 + 2 = 1,002", 0),
        ("He had 48 clips / 2 = 24 clips. In 3 weeks, 48 clips + 24 clips = 72, and $72/month x 0.5 months = $36", 3),
        ("After 5 days 20 + 4 = 24 and 100 \u2212 28 = 72", 2),
        ("Out of 10. 20 + 4 = 24", 1),
        ("", 0),
    ],
)
def test_a_calculation_counts_where_its_arithmetic_is_right_and_the_gold_answer_has_its_result(response, right):
    assert share(response) == pytest.approx(right / 3)


def test_results_are_rounded_to_cents_and_counted_as_often_as_the_gold_answer_has_them():
    assert share("10 / 3 = 3.33", "<<10/3=3.33>>3.33\n#### 3.33") == 1.0
    twice = "<<2+2=4>>4 <<1+3=4>>4\n#### 4"
    assert share("2+2 = 4", twice) == 0.5
    assert share("2+2 = 4, 1+3 = 4", twice) == 1.0


def test_a_gold_answer_without_calculations_gives_no_credit():
    assert share("1+1 = 2", "2") == 0.0


def test_credit_is_paid_beside_the_accuracy():
    sample = RewardSample("48/2 = 24\n#### 36", reference=GOLD, label="gsm8k")
    (result,) = gsm8k_rewards(partial_credit=0.6).compute([sample])
    assert result.total == pytest.approx(1.0 + 0.6 / 3)
    assert dict(result.scores)["right_calculations"] == pytest.approx(1 / 3)
    assert "right_calculations" not in gsm8k_rewards().compute([sample])[0].scores
