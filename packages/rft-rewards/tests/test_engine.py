import asyncio
import json
import math
import os
import pickle
import threading

import numpy as np
import pytest

from rft_rewards import (
    InvalidScoreError,
    MissingReferenceError,
    RecipeError,
    RewardComputationEngine,
    RewardFunctionError,
    RewardRecipe,
    RewardResult,
    RewardSample,
    Score,
    UnknownLabelError,
    exact_answer,
    has_format,
)


class Constant:
    def __init__(self, name, value):
        self.name, self.value, self.calls = name, value, []

    def __call__(self, samples):
        self.calls.append([sample.response for sample in samples])
        return [self.value] * len(samples)


class AsyncConstant(Constant):
    async def __call__(self, samples):
        await asyncio.sleep(0)
        return super().__call__(samples)


class Model(Constant):
    """A reward model that notes when it is resident."""

    resident, peak = 0, 0

    def load(self):
        Model.resident += 1
        Model.peak = max(Model.peak, Model.resident)

    def release(self):
        Model.resident -= 1


def _engine(*functions, weights=None, **options):
    return RewardComputationEngine(RewardRecipe(functions=functions, weights=weights, **options))


def test_weighted_totals():
    judge = AsyncConstant("judge", 0.5)
    engine = _engine(Constant("acc", 1.0), Constant("fmt", 1.0), judge, weights=(0.7, 0.1, 0.2))
    (result,) = engine.compute([RewardSample("r")])
    assert result.total == pytest.approx(0.9, abs=1e-12)
    assert result.scores == {"acc": 1.0, "fmt": 1.0, "judge": 0.5}
    assert result.weighted == pytest.approx({"acc": 0.7, "fmt": 0.1, "judge": 0.1})
    engine = _engine(Constant("acc", 0.0), Constant("fmt", 1.0), Constant("judge", 1.0), weights=(0.7, 0.1, 0.2))
    assert engine.compute([RewardSample("r")])[0].total == pytest.approx(0.3, abs=1e-12)


def test_rule_weights_of_answer_and_format():
    engine = _engine(exact_answer("boxed"), has_format(), weights=(0.9, 0.1))
    samples = [
        RewardSample("\\boxed{4}", reference="4"),
        RewardSample("<think>no</think> \\boxed{5}", reference="4"),
        RewardSample("<think>yes</think> \\boxed{4}", reference="#### 4"),
    ]
    assert [result.total for result in engine.compute(samples)] == pytest.approx([0.9, 0.1, 1.0])


def test_logged_scores_are_raw_and_the_total_is_weighted():
    (result,) = _engine(Constant("accuracy", 1.0), Constant("format", 0.5), weights=(1, 0.2)).compute(
        [RewardSample("")]
    )
    assert result.total == pytest.approx(1.1, abs=1e-12)
    assert result.scores == {"accuracy": 1.0, "format": 0.5}


def test_one_function_goes_the_same_way_as_many():
    (result,) = _engine(Constant("only", 0.25)).compute([RewardSample("r")])
    assert result == RewardResult(0.25, {"only": 0.25}, {"only": 0.25})


def test_labels_select_recipes_and_only_needed_models_run():
    accuracy, judge, unused = Constant("accuracy", 1.0), Model("judge", 0.5), Model("unused", 0.5)
    engine = RewardComputationEngine(
        [
            RewardRecipe(label="math", functions=[accuracy]),
            RewardRecipe(label="chat", functions=[accuracy, judge], weights=[0.5, 1.0]),
            RewardRecipe(label="other", functions=[unused]),
        ]
    )
    labels = ["chat", "math", "math", "chat"]
    results = engine.compute([RewardSample(str(index), label=label) for index, label in enumerate(labels)])
    assert [result.total for result in results] == [1.0, 1.0, 1.0, 1.0]
    assert [sorted(result.scores) for result in results] == [["accuracy", "judge"], ["accuracy"]] * 1 + [
        ["accuracy"],
        ["accuracy", "judge"],
    ]
    assert accuracy.calls == [["0", "1", "2", "3"]]
    assert judge.calls == [["0", "3"]]
    assert unused.calls == []
    assert engine.labels == ("chat", "math", "other")


def test_unknown_label_names_itself_and_the_known_ones_before_anything_runs():
    function = Constant("f", 1.0)
    engine = RewardComputationEngine([RewardRecipe(label="math", functions=[function])])
    with pytest.raises(UnknownLabelError, match=r"sample 1 has label 'poetry'.*'math'"):
        engine.compute([RewardSample("", label="math"), RewardSample("", label="poetry")])
    assert function.calls == []


def test_batches_keep_their_sizes_and_order():
    engine = _engine(Constant("f", 1.0), lambda samples: [float(sample.response) for sample in samples])
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8], []]
    totals = [[r.total for r in engine.compute([RewardSample(str(n)) for n in batch])] for batch in batches]
    assert totals == [[n + 1.0 for n in batch] for batch in batches]


def test_models_take_turns_and_leave_after_failures():
    Model.resident = Model.peak = 0
    models = [Model(f"m{index}", 1.0) for index in range(3)]
    _engine(*models).compute([RewardSample("r")] * 4)
    assert (Model.resident, Model.peak) == (0, 1)
    failing = Model("failing", math.nan)
    with pytest.raises(InvalidScoreError):
        _engine(failing).compute([RewardSample("r")])
    assert Model.resident == 0


def test_coroutines_run_together_and_beside_plain_functions():
    barrier = threading.Barrier(2, timeout=120)

    async def remote(samples):
        await asyncio.to_thread(barrier.wait)
        return [1.0] * len(samples)

    def local(samples):
        barrier.wait()  # only passes while the coroutine is under way
        return [2.0] * len(samples)

    async def first(samples):
        started.set()
        await asyncio.wait_for(answered.wait(), 120)
        return [4.0] * len(samples)

    async def second(samples):
        await asyncio.wait_for(started.wait(), 120)
        answered.set()
        return [8.0] * len(samples)

    assert _engine(local, remote).compute([RewardSample("r")])[0].total == 3.0
    started, answered = asyncio.Event(), asyncio.Event()
    assert _engine(first, second).compute([RewardSample("r")])[0].total == 12.0


def test_compute_works_inside_a_running_event_loop():
    async def caller():
        return _engine(AsyncConstant("a", 1.0)).compute([RewardSample("r")])[0].total

    assert asyncio.run(caller()) == 1.0


def test_a_function_that_raises_is_named_with_its_sample():
    def fragile(samples):
        return [1.0 / len(sample.response) for sample in samples]

    async def fragile_later(samples):
        raise OSError("gone")

    with pytest.raises(RewardFunctionError, match=r"'fragile' raised ZeroDivisionError on sample 2"):
        _engine(fragile).compute([RewardSample("a"), RewardSample("b"), RewardSample("")])
    with pytest.raises(RewardFunctionError, match=r"'fragile_later' raised OSError on samples 0, 1: gone"):
        _engine(fragile_later).compute([RewardSample("a"), RewardSample("b")])


def test_errors_of_the_package_pass_unchanged():
    with pytest.raises(MissingReferenceError, match=r"accuracy needs RewardSample\.reference"):
        _engine(exact_answer()).compute([RewardSample("#### 1")])


class Tensor:
    def __float__(self):
        return 0.25


@pytest.mark.parametrize(
    ("raw", "score"),
    [
        ({"score": 0.0, "reward": 1.0}, 0.0),
        (3, 3.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (Tensor(), 0.25),
        (Score(0.0), 0.0),
        (-0.0, 0.0),
    ],
)
def test_accepted_scores(raw, score):
    (result,) = _engine(Constant("f", raw)).compute([RewardSample("r")])
    assert result.scores == {"f": score}
    assert type(result.scores["f"]) is float


def test_torch_scalars_are_accepted():
    torch = pytest.importorskip("torch")
    assert _engine(Constant("f", torch.tensor(0.5))).compute([RewardSample("r")])[0].total == 0.5
    batch = _engine(lambda samples: torch.tensor([1.0, 2.0])).compute([RewardSample("a"), RewardSample("b")])
    assert [result.total for result in batch] == [1.0, 2.0]


@pytest.mark.parametrize("raw", [None, math.nan, math.inf, "0.5", {"reward": 1.0}, object(), Score(math.nan), [1, 2]])
def test_refused_scores_name_function_and_sample(raw):
    def function(samples):
        return [1.0, raw]

    with pytest.raises(InvalidScoreError, match=r"'function'.* sample 1"):
        _engine(function).compute([RewardSample("a"), RewardSample("b")])


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_wrong_number_of_scores_is_named(count):
    def short(samples):
        return [1.0] * count

    with pytest.raises(InvalidScoreError, match=rf"'short' returned {count} scores for 3 samples.*0, 1, 2"):
        _engine(short).compute([RewardSample("r")] * 3)


def test_missing_scores_follow_the_recipe_and_are_counted():
    def sometimes(samples):
        return [None if sample.response == "b" else 0.0 for sample in samples]

    engine = _engine(sometimes, weights=[2.0], missing={"sometimes": -0.5})
    first, second = engine.compute([RewardSample("a"), RewardSample("b")])
    assert (first.total, first.missing) == (0.0, ())
    assert (second.total, second.missing, second.scores) == (-1.0, ("sometimes",), {"sometimes": -0.5})
    assert engine.take_counters() == {"samples": 2, "sometimes/missing": 1}
    assert engine.take_counters() == {"samples": 0, "sometimes/missing": 0}


def test_one_score_per_sample_when_answers_are_unreadable():
    texts = ["#### 1", "I do not know", "#### 137", "", "#### 1"]
    engine = _engine(exact_answer())
    results = engine.compute([RewardSample(text, reference="1") for text in texts])
    assert [result.total for result in results] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert [result.diagnostics["accuracy"]["answer"] for result in results] == ["1", None, "137", None, "1"]
    assert engine.take_counters()["accuracy/missing_answer"] == 2


def test_several_markers_are_counted():
    engine = _engine(exact_answer())
    (result,) = engine.compute([RewardSample("#### 1 #### 2 #### 42", reference="42")])
    assert result.total == 1.0
    counters = engine.take_counters()
    assert (counters["accuracy/multi_answer"], counters["accuracy/timeouts"]) == (1, 0)


def test_three_policies_side_by_side():
    texts = ["perhaps 36, perhaps 51", "36", "12 x 3 = 36, so \\boxed{36}", "#### 36", "nothing"]
    functions = [exact_answer(policy, name=policy) for policy in ("strict", "flexible", "boxed")]
    engine = _engine(*functions, weights=[1.0, 0.0, 0.0])
    results = engine.compute([RewardSample(text, reference="36") for text in texts])
    table = {name: [result.scores[name] for result in results] for name in ("strict", "flexible", "boxed")}
    assert table == {
        "strict": [0.0, 0.0, 0.0, 1.0, 0.0],
        "flexible": [0.0, 1.0, 1.0, 1.0, 0.0],
        "boxed": [0.0, 0.0, 1.0, 0.0, 0.0],
    }
    assert [result.total for result in results] == table["strict"]
    counters = engine.take_counters()
    assert [counters[f"{name}/missing_answer"] for name in table] == [4, 1, 4]


def test_units_in_a_box_decide():
    engine = _engine(exact_answer("boxed"))
    texts = ["\\boxed{12 \\text{ cm}}", "\\boxed{12 \\text{ m}}", "\\boxed{12}"]
    assert [r.total for r in engine.compute([RewardSample(t, reference="12 cm") for t in texts])] == [1.0, 0.0, 1.0]


def test_process_rewards_lie_at_their_tokens():
    def process(samples):
        return [Score(steps=((1, 0.2), (3, 0.8))) if sample.response == "steps" else 0.5 for sample in samples]

    steps, plain = _engine(process).compute([RewardSample("steps"), RewardSample("plain")])
    assert steps.total == 1.0
    assert steps.step_rewards == ((1, 0.2), (3, 0.8))
    assert steps.token_rewards(5) == [0.0, 0.2, 0.0, 0.8, 0.0]
    assert plain.step_rewards is None
    assert plain.token_rewards(4) == [0.0, 0.0, 0.0, 0.5]
    with pytest.raises(ValueError, match="at least 4"):
        steps.token_rewards(3)
    with pytest.raises(ValueError, match="length is 0"):
        plain.token_rewards(0)


def test_process_and_outcome_rewards_add_up():
    def process(samples):
        return [Score(steps=((0, 1.0), (2, 3.0)))] * len(samples)

    (result,) = _engine(process, Constant("outcome", 10.0), weights=[0.5, 0.1]).compute([RewardSample("r")])
    assert result.total == 3.0
    assert result.token_rewards(4) == [0.5, 0.0, 1.5, 1.0]


def test_custom_functions_by_path(monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    engine = _engine("sample_functions:lengths", "sample_functions:Holder.twos")
    assert engine.compute([RewardSample("four")])[0].scores == {"lengths": 4.0, "twos": 2.0}


@pytest.mark.parametrize("path", ["nowhere", "absent_module:f", "json:absent", "math:pi", ":f", "m:"])
def test_wrong_paths_are_named(path):
    with pytest.raises(RecipeError, match=path.replace(".", r"\.")):
        RewardRecipe(functions=[path])


def test_recipes_are_checked_when_built():
    function = Constant("f", 1.0)
    with pytest.raises(RecipeError, match="2 functions and 1 weights"):
        RewardRecipe(functions=[function, Constant("g", 1.0)], weights=[1.0])
    with pytest.raises(RecipeError, match="no functions"):
        RewardRecipe(functions=[])
    with pytest.raises(RecipeError, match="equal name"):
        RewardRecipe(functions=[function, Constant("f", 2.0)])
    with pytest.raises(RecipeError, match="finite"):
        RewardRecipe(functions=[function], weights=[math.nan])
    with pytest.raises(RecipeError, match=r"missing names \['g'\]"):
        RewardRecipe(functions=[function], missing={"g": 0.0})
    with pytest.raises(RecipeError, match="not callable"):
        RewardRecipe(functions=[3])
    with pytest.raises(RecipeError, match="two recipes for label 'default'"):
        RewardComputationEngine([RewardRecipe(functions=[function]), RewardRecipe(functions=[function])])
    with pytest.raises(RecipeError, match="no recipes"):
        RewardComputationEngine([])


def test_samples_are_pickled_and_frozen():
    sample = RewardSample("r", (1, 2), "p", "1", "math", {"k": 1}, (b"x",), True)
    assert pickle.loads(pickle.dumps(sample)) == sample
    assert json.dumps(dict(RewardSample("r").metadata)) == "{}"
    with pytest.raises(AttributeError):
        sample.response = "other"
