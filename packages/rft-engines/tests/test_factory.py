"""create_engine: one way to build any engine, and what it refuses."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from rft_engines import (
    EngineConfig,
    EngineStartError,
    EngineState,
    EngineStateError,
    GenerationRequest,
    HFEngine,
    MissingExtraError,
    RolloutEngine,
    SamplingParams,
    UnsupportedCombinationError,
    create_engine,
)


def test_a_module_or_a_folder_becomes_an_engine(model, tmp_path, prompts):
    model.save_pretrained(tmp_path)
    requests = [GenerationRequest(prompt) for prompt in prompts]
    sampling = SamplingParams(temperature=0, max_new_tokens=5)
    loaded = create_engine("hf", model_path=str(tmp_path), max_rows=4)
    assert isinstance(loaded, HFEngine)
    assert isinstance(loaded, RolloutEngine)
    given = create_engine(EngineConfig(), model=model)
    assert [sample.token_ids for sample in loaded.generate(requests, sampling)] == [
        sample.token_ids for sample in given.generate(requests, sampling)
    ]


def test_an_engine_without_weights_waits_for_an_update(model):
    engine = create_engine("hf", model=model, load_weights=False)
    assert engine.state is EngineState.WEIGHTS_UNDEFINED
    assert not engine.weights_defined
    with pytest.raises(EngineStateError, match="without loading"):
        engine.generate([GenerationRequest((5,))], SamplingParams())
    engine.begin_weight_update()
    engine.finish_weight_update(1)
    assert engine.state is EngineState.READY
    assert engine.weights_defined
    engine.sleep(2)
    assert not engine.weights_defined


def test_wrong_arguments_are_named(model, tmp_path):
    with pytest.raises(ValueError, match=r"unknown fields \['tensor_parallel'\]"):
        create_engine("hf", model=model, tensor_parallel=2)
    with pytest.raises(ValueError, match="put them into the config"):
        create_engine(EngineConfig(), model=model, seed=1)
    with pytest.raises(ValueError, match="exactly one"):
        create_engine("hf")
    with pytest.raises(ValueError, match="engine_tp_size=1"):
        create_engine("hf", model=model, tp_size=2)
    with pytest.raises(TypeError, match="no_such_option"):
        create_engine("hf", model=model, options={"no_such_option": 1})
    with pytest.raises(EngineStartError, match=r"config\.json"):
        create_engine("hf", model_path=str(tmp_path))
    with pytest.raises(ValueError, match="512 positions"):
        create_engine("hf", model=model, max_model_len=513)
    with pytest.raises(ValueError, match="lora_rank=-1"):
        create_engine("hf", model=model, lora_rank=-1)
    with pytest.raises(UnsupportedCombinationError, match="'sglang' and lora_rank=4"):
        create_engine("sglang", model_path="m", lora_rank=4)
    with pytest.raises(UnsupportedCombinationError, match="'hf' and a Linear"):
        create_engine("hf", model=torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedCombinationError, match="'vllm' and a module"):
        create_engine("vllm", model_path="m", model=model)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_missing_extra_says_what_to_install(kind):
    if importlib.util.find_spec(kind) is not None:
        pytest.skip(f"{kind} is installed here")
    with pytest.raises(MissingExtraError, match=rf"pip install 'rft-engines\[{kind}\]'"):
        create_engine(kind, model_path="m")


def test_importing_the_package_loads_no_engine():
    code = (
        "import sys, rft_engines; heavy = {'transformers', 'vllm', 'sglang', 'deepspeed'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
