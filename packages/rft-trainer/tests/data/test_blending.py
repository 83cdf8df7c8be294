"""Blends: shares by weight, each prompt once an epoch, the same order for every number of ranks and after a resume."""

import json
from collections import Counter

import pytest

from rft_trainer.data import BlendSampler, DataSource, parse_sources
from rft_trainer.errors import ConfigurationError


def batches(sampler, count):
    return [sampler.next_batch() for _ in range(count)]


def test_draws_follow_the_weights_and_each_set_its_epochs():
    sampler = BlendSampler([10, 4], [3, 1], batch_size=8, seed=2)
    drawn = [index for batch in batches(sampler, 10) for index in batch]
    assert len(drawn) == 80
    assert sum(index < 10 for index in drawn) == 60
    first = [index for index in drawn if index < 10]
    assert sorted(first[:10]) == sorted(first[10:20]) == list(range(10))
    assert first[:10] != first[10:20]
    assert set(Counter(index for index in drawn if index >= 10)) == {10, 11, 12, 13}
    for start in range(0, 80, 8):  # in every batch, not only in the long run
        assert sum(index < 10 for index in drawn[start : start + 8]) == 6


def test_the_order_is_that_of_one_rank_and_of_an_unbroken_run():
    whole = batches(BlendSampler([5, 7, 3], [1, 1, 0.5], batch_size=4, seed=1), 9)
    ranks = [BlendSampler([5, 7, 3], [1, 1, 0.5], batch_size=4, seed=1, rank=r, num_ranks=2) for r in range(2)]
    assert [a + b for a, b in zip(batches(ranks[0], 9), batches(ranks[1], 9), strict=True)] == whole
    stopped = BlendSampler([5, 7, 3], [1, 1, 0.5], batch_size=4, seed=1)
    batches(stopped, 5)
    resumed = BlendSampler([5, 7, 3], [1, 1, 0.5], batch_size=4, seed=1)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert batches(resumed, 4) == whole[5:]
    with pytest.raises(ConfigurationError, match=r"sizes was \[5, 7, 3\] and is \[5, 7, 4\]; shares"):
        BlendSampler([5, 7, 4], [1, 1, 1], batch_size=4, seed=1).load_state_dict(stopped.state_dict())


def test_bad_blends_are_named():
    with pytest.raises(ConfigurationError, match="none may be empty"):
        BlendSampler([5, 0], [1, 1], batch_size=4)
    with pytest.raises(ConfigurationError, match="cannot be shared by 3"):
        BlendSampler([5], [1], batch_size=4, num_ranks=3)


def test_a_data_set_in_one_setting():
    source = DataSource.parse("sets/math500.jsonl,weight=0.5,label=math,input_key=problem,limit=20")
    assert (source.title, source.weight, source.label, source.limit) == ("math500", 0.5, "math", 20)
    assert source.input_key == "problem"
    assert DataSource.parse("openai/gsm8k,name=grade").title == "grade"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.jsonl,wieght=1", "did you mean weight="),
        ("a.jsonl,weight=x", "could not convert"),
        ("a.jsonl,weight=0", "weight must be above 0"),
        ("a.jsonl,limit=0", "limit 1 or more"),
        (",weight=1", "begin with the file"),
        ("a.jsonl,label=", "no field=value"),
    ],
)
def test_bad_data_sets_are_named(text, message):
    with pytest.raises(ConfigurationError, match=message):
        DataSource.parse(text)


def test_two_sets_of_one_name():
    with pytest.raises(ConfigurationError, match="several data sets are called test"):
        parse_sources(("a/test.jsonl", "b/test.jsonl"))
