"""A Hugging Face folder from sharded weights: bucket by bucket, at most one file's worth on the host of rank 0."""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial as partial_call
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from rft_dist import run_on_first_rank
from rft_sync import AdapterSource, ParameterSource, ParamMeta, plan_buckets, source_for
from rft_trainer.errors import CheckpointError

if TYPE_CHECKING:
    from rft_trainer.strategy.protocols import TrainState

INDEX = "model.safetensors.index.json"


def export_model(
    state: "TrainState",
    folder: Path,
    tokenizer: Any,
    *,
    group: dist.ProcessGroup | None,
    max_file_bytes: int = 2 * 2**30,
) -> None:
    """Write `state`'s weights under checkpoint names, tied weights once, with config and tokenizer.

    The folder appears by one rename. Collective over the world; `group` is a gloo group of all ranks.

    Raises:
        CheckpointError: on every rank, when rank 0 cannot write.
    """
    state.release_gathered()
    source = source_for(state.checkpoint_module)
    metadata = [meta for meta in source.metadata() if meta.alias_of is None]
    partial = folder.with_name(f".{folder.name}.partial")
    files: dict[str, str] = {}
    _on_main(lambda: _prepare(partial), folder, group)
    for number, names, tensors in _files(source, metadata, max_file_bytes):
        name = f"model-{number:05d}.safetensors"
        _on_main(partial_call(_save, partial / name, tensors), folder, group)
        files.update(dict.fromkeys(names, name))
    network = state.checkpoint_module
    _on_main(lambda: _finish(partial, folder, network, tokenizer, files, metadata), folder, group)


def export_adapter(state: "TrainState", folder: Path, *, group: dist.ProcessGroup | None) -> None:
    """Write the adapter of a LoRA actor as PEFT reads it. The folder appears by one rename. Collective over the world.

    Raises:
        UnsupportedCombination: the model has no adapter that can be exported.
        CheckpointError: on every rank, when rank 0 cannot write.
    """
    state.release_gathered()
    source = AdapterSource(state.checkpoint_module)
    names = [meta.name for meta in source.metadata()]
    with source.gather(names) as gathered:
        tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in gathered.items()}
    partial = folder.with_name(f".{folder.name}.partial")

    def write() -> None:
        _prepare(partial)
        _save(partial / "adapter_model.safetensors", tensors)
        (partial / "adapter_config.json").write_text(source.adapter_config())
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)

    _on_main(write, folder, group)


def _files(
    source: ParameterSource, metadata: list[ParamMeta], max_file_bytes: int
) -> Iterator[tuple[int, list[str], dict[str, Tensor]]]:
    """(number, names, host tensors) of one file after another; tensors are empty off rank 0. Collective."""
    keep = dist.get_rank() == 0
    for bucket in plan_buckets(metadata, max_file_bytes):
        names = list(bucket.names)
        with source.gather(names) as gathered:
            # A copy: the gathered memory is reused once the context ends.
            tensors = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in gathered.items()} if keep else {}
        yield bucket.index + 1, names, tensors


def _on_main(action: Callable[[], None], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Run on rank 0; what cannot be written is a CheckpointError on every rank. Collective over `group`."""

    def guarded() -> None:
        try:
            action()
        except OSError as failure:
            raise CheckpointError(f"model folder {folder} could not be written: {failure}") from failure

    run_on_first_rank(guarded, group)


def _prepare(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _save(file: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})


def _finish(
    partial: Path, folder: Path, network: Any, tokenizer: Any, files: dict[str, str], metadata: list[ParamMeta]
) -> None:
    if len(set(files.values())) == 1:
        (partial / next(iter(files.values()))).rename(partial / "model.safetensors")
    else:
        total = sum(meta.nbytes for meta in metadata)
        (partial / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=1))
    network.config.save_pretrained(partial)
    if getattr(network, "generation_config", None) is not None:
        network.generation_config.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
