import inspect
import pickle

import pytest

from rft_rewards import RemoteRewardError, RewardError, errors

FAMILY = [item for _, item in inspect.getmembers(errors, inspect.isclass) if item is not RewardError]


@pytest.mark.parametrize("kind", [item for item in FAMILY if issubclass(item, Exception)])
def test_each_error_is_of_the_family_and_of_a_standard_kind(kind):
    assert issubclass(kind, RewardError)
    standard = [
        base
        for base in kind.__mro__
        if base.__module__ == "builtins" and base not in (Exception, BaseException, object)
    ]
    assert standard
    error = pickle.loads(pickle.dumps(kind("what and why")))
    assert type(error) is kind
    assert str(error) == "what and why"


def test_remote_errors_carry_scores_through_pickling():
    error = pickle.loads(pickle.dumps(RemoteRewardError("some failed", [1.0, None])))
    assert (str(error), error.scores) == ("some failed", (1.0, None))
