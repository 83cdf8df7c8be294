"""Moves memory between the device and host mirrors, in place: tensors, views and ties stay the objects they are."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rft_trainer.errors import ResidencyError
from rft_trainer.strategy.protocols import Movable, Move, TrainState

OPTIMIZER_SUFFIX = " optimiser"
"""The optimiser of the trained model `actor` is the owner `actor optimiser`."""
_CHUNK_BYTES = 1 << 28
"""Pinned memory is handed out in powers of two; equal chunks of one waste nothing."""


class HostMirror:
    """Host memory for the bytes of one owner, allocated once and used again at every move."""

    def __init__(self, *, pinned: bool, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._pinned = pinned
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes held on the host."""
        return sum(chunk.numel() for chunk in self._chunks)

    def reserve(self, nbytes: int) -> None:
        """Have room for `nbytes`; what is there already is kept."""
        while self.nbytes < nbytes:
            size = min(self._chunk_bytes, nbytes - self.nbytes)
            self._chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned))

    def pieces(self, start: int, nbytes: int) -> Iterator[tuple[int, Tensor]]:
        """(offset from `start`, memory) of the chunks that hold `nbytes` from `start` on."""
        offset, done = 0, 0
        for chunk in self._chunks:
            low, high = max(start, offset), min(start + nbytes, offset + chunk.numel())
            if low < high:
                yield done, chunk[low - offset : high - offset]
                done += high - low
            offset += chunk.numel()


@dataclass
class _Parked:
    storage: torch.UntypedStorage
    nbytes: int
    start: int


class MovableMemory:
    """The memory of one owner, on the device or on the host.

    `offload` copies each distinct block of memory to the mirror and frees it under the tensors, `reload` allocates it
    again and copies back. Copies run on a side stream; the device's current stream waits for them by an event, the
    host never does. On a CPU nothing is copied or freed, and the states are the same.

    A move that fails leaves an owner whose next `reload` continues where it stopped.

    Args:
        owner: name in messages and in the log of moves.
        tensors: what belongs to the owner at present; DTensors and gradients included.
        device: where the owner works; memory elsewhere is not touched, such as that of a CPUOffloadPolicy.
        copies: really move; by default on an accelerator only.
        mirror: host memory to use; by default a pinned one of its own.
        before_offload: frees what is derived from the memory, such as gathered copies.
    """

    def __init__(
        self,
        owner: str,
        tensors: Callable[[], Iterable[Tensor]],
        device: torch.device,
        *,
        copies: bool | None = None,
        mirror: HostMirror | None = None,
        before_offload: Callable[[], None] = lambda: None,
    ) -> None:
        self.owner = owner
        self._tensors = tensors
        self._before_offload = before_offload
        self._device = device
        self._copies = device.type != "cpu" if copies is None else copies
        self._mirror = mirror or HostMirror(pinned=device.type == "cuda")
        self._parked: list[_Parked] = []
        self._on_host = False
        self._timing: list[tuple[str, int, Any, Any]] = []
        self._stream = _stream(device) if device.type == "cuda" else None

    @property
    def on_host(self) -> bool:
        """Whether the owner was offloaded and not brought back in full."""
        return self._on_host

    def require(self, call: str) -> None:
        """Refuse `call` while the memory is on the host.

        Raises:
            ResidencyError: it is.
        """
        if self._on_host:
            raise ResidencyError(f"{call} refused: {self.owner} is on the host; reload it first")

    def offload(self) -> None:
        """To the host; a second call does nothing. No communication."""
        if self._on_host:
            return
        self._before_offload()
        if self._copies:
            blocks = self._blocks()
            self._mirror.reserve(sum(block.nbytes for block in blocks))
            # Every copy is queued before anything is freed: a failure up to here leaves the owner on the device.
            self._timed("offload", blocks, lambda block: self._copy(block, to_host=True))
            for block in blocks:
                block.storage.resize_(0)
            self._parked = blocks
        self._on_host = True

    def reload(self) -> None:
        """To the device; a second call does nothing. No communication.

        Raises:
            torch.OutOfMemoryError: what came back before it stays; call again when there is room.
        """
        if not self._on_host:
            return
        back: list[_Parked] = []
        try:
            for block in self._parked:
                block.storage.resize_(block.nbytes)
                back.append(block)
        finally:
            if self._copies:
                self._timed("reload", back, lambda block: self._copy(block, to_host=False))
            self._parked = self._parked[len(back) :]
        self._on_host = False

    def take_moves(self) -> list[Move]:
        """The moves since the last call. Waits for the copies that are still running."""
        taken = []
        for direction, nbytes, begin, end in self._timing:
            if self._stream is None:
                seconds = end - begin
            else:
                end.synchronize()
                seconds = begin.elapsed_time(end) / 1e3
            taken.append(Move(self.owner, direction, nbytes, seconds))
        self._timing = []
        return taken

    def nbytes(self) -> int:
        """Bytes of the owner on its device now."""
        return storage_bytes(self._tensors(), self._device)

    def _blocks(self) -> list[_Parked]:
        blocks: list[_Parked] = []
        start = 0
        for storage in distinct_storages(self._tensors(), self._device):
            # A file that is mapped into memory has no memory of its own to give back.
            if storage.nbytes() and storage.resizable():
                blocks.append(_Parked(storage, storage.nbytes(), start))
                start += storage.nbytes()
        return blocks

    def _copy(self, block: _Parked, *, to_host: bool) -> None:
        memory = torch.empty(0, dtype=torch.uint8, device=block.storage.device).set_(block.storage)
        for offset, piece in self._mirror.pieces(block.start, block.nbytes):
            there = memory[offset : offset + piece.numel()]
            target, source = (piece, there) if to_host else (there, piece)
            target.copy_(source, non_blocking=True)

    def _timed(self, direction: str, blocks: list[_Parked], copy: Callable[[_Parked], None]) -> None:
        """Queue the copies behind the current stream's work, and its further work behind them."""
        begin, end = self._marks()
        with torch.no_grad(), torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                begin.record(self._stream)
            for block in blocks:
                copy(block)
            if self._stream is not None:
                end.record(self._stream)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(end)
        else:
            end = time.perf_counter()
        self._timing.append((direction, sum(block.nbytes for block in blocks), begin, end))

    def _marks(self) -> tuple[Any, Any]:
        if self._stream is None:
            return time.perf_counter(), 0.0
        make: Any = torch.cuda.Event
        return make(enable_timing=True), make(enable_timing=True)


def _stream(device: torch.device) -> torch.cuda.Stream:
    make: Any = torch.cuda.Stream
    return cast(torch.cuda.Stream, make(device))


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is. No communication."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def distinct_storages(tensors: Iterable[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """The blocks of memory on `device` that `tensors` lie in, each once; of a DTensor its local shard."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        local = local_shard(tensor)
        if local.device.type == device.type:
            storage = local.untyped_storage()
            found.setdefault(storage._cdata, storage)
    return list(found.values())


def storage_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of the distinct blocks of memory on `device` that `tensors` lie in."""
    return sum(storage.nbytes() for storage in distinct_storages(tensors, device))


def module_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, their gradients, and buffers, whatever wraps them."""
    for parameter in module.parameters():
        yield parameter.data
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """The tensors of an optimiser's state; none before its first step."""
    for entry in optimizer.state.values():
        yield from (value for value in entry.values() if isinstance(value, Tensor))


class Stationary:
    """Memory that its own policy places and nobody else moves, such as that under CPUOffloadPolicy."""

    on_host = False

    def __init__(self, owner: str, tensors: Callable[[], Iterable[Tensor]], device: torch.device) -> None:
        self.owner = owner
        self._tensors = tensors
        self._device = device

    def offload(self) -> None:
        """Nothing."""

    def reload(self) -> None:
        """Nothing."""

    def require(self, call: str) -> None:
        """Nothing: it is always where its policy wants it."""

    def take_moves(self) -> list[Move]:
        """None."""
        return []

    def nbytes(self) -> int:
        """Bytes of the owner on its device now."""
        return storage_bytes(self._tensors(), self._device)


class RoleMemory:
    """The memory of the models of one backend, by model."""

    def __init__(self) -> None:
        self._frozen: WeakKeyDictionary[nn.Module, Movable] = WeakKeyDictionary()

    def add_frozen(self, module: nn.Module, memory: Movable) -> None:
        """Know a model that is only scored, and refuse its forward passes while it is away."""
        self._frozen[module] = memory
        guard(module, memory)

    def of(self, model: TrainState | nn.Module) -> Movable:
        """The memory of a trained state's model, or of a frozen model.

        Raises:
            ResidencyError: a module that this backend did not prepare.
        """
        if isinstance(model, TrainState):
            return model.memory.model
        if model not in self._frozen:
            raise ResidencyError(
                f"{type(model).__name__} is unknown to this strategy: give what prepare or prepare_frozen returned"
            )
        return self._frozen[model]


def guard(module: nn.Module, memory: Movable) -> None:
    """Refuse forward passes of `module` while its memory is on the host."""
    # In front of the hook by which FSDP2 gathers: it would read memory that is not there.
    module.register_forward_pre_hook(lambda *_: memory.require("a forward pass"), prepend=True)


def reload_state(state: TrainState) -> None:
    """Model and optimiser back to the device, for a call that reads or writes all of it. No communication."""
    state.memory.model.reload()
    state.memory.optimizer.reload()
