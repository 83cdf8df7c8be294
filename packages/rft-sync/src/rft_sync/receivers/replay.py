"""Copies between addresses that stay: a CUDA graph of them, or one multi-tensor copy."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

_BRANCHES = 4  # parallel branches of the graph: one memory copy after the other leaves gaps between the small ones


class Replay:
    """Copies sources into targets, again and again. None of them may move; the owner sees to that.

    The first run copies one by one. On a card the second run captures these copies in a CUDA graph, so that each
    further run costs one launch; where they cannot be captured, and on the CPU, a run is one multi-tensor copy. A pair
    that is the same memory (a trainer that trains in the engine's own weights) needs no copy and is left out.

    Args:
        pairs: (source, target); they may differ in dtype and strides.
        zeroed: Set to zero before the copies (padding).
        branches: Parallel branches of the graph.

    Attributes:
        refusal: Why there is no graph; empty while there is one or none was tried.
    """

    def __init__(
        self, pairs: Sequence[tuple[Tensor, Tensor]], zeroed: Sequence[Tensor] = (), *, branches: int = _BRANCHES
    ) -> None:
        moved = [(source, target) for source, target in pairs if not same_place(source, target)]
        self._sources = [source for source, _ in moved]
        self._targets = [target for _, target in moved]
        self._zeroed = list(zeroed)
        self._branches = branches
        self._graph: torch.cuda.CUDAGraph | None = None
        self._on_card = bool(moved) and all(tensor.is_cuda for pair in moved for tensor in pair)
        self._ran = False
        self.refusal = "" if self._on_card else "nothing is copied" if not moved else "not all tensors are on a card"

    @property
    def captured(self) -> bool:
        """Whether runs replay a CUDA graph."""
        return self._graph is not None

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """(source, target) of every copy."""
        return list(zip(self._sources, self._targets, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes that one run writes."""
        return sum(target.nbytes for target in [*self._targets, *self._zeroed])

    @torch.no_grad()
    def run(self) -> None:
        """Copy. On a card it is queued on the current stream."""
        if self._ran and self._graph is None and not self.refusal:
            self._capture()
        if self._graph is not None:
            self._graph.replay()
            return
        for tensor in self._zeroed:
            tensor.zero_()
        if self._on_card and not self._ran:  # the kernels of single copies must be loaded before a capture
            for target, source in zip(self._targets, self._sources, strict=True):
                target.copy_(source)
        elif self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        self._ran = True

    def _capture(self) -> None:
        """Record the copies, one each, on parallel branches."""
        device = self._targets[0].device
        main = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        main.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(main):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._record(main, [torch.cuda.Stream(device) for _ in range(self._branches)])  # type: ignore[no-untyped-call]
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self.refusal = f"the copies cannot be captured: {error}"
            return
        torch.cuda.current_stream(device).wait_stream(main)
        self._graph = graph

    def _record(self, main: torch.cuda.Stream, branches: Sequence[torch.cuda.Stream]) -> None:
        for tensor in self._zeroed:
            tensor.zero_()
        for branch in branches:
            branch.wait_stream(main)
        loads = [0] * len(branches)
        for index in sorted(range(len(self._targets)), key=lambda index: -self._targets[index].nbytes):
            place = loads.index(min(loads))  # the largest first, each onto the branch with least to do
            loads[place] += self._targets[index].nbytes
            with torch.cuda.stream(branches[place]):
                self._targets[index].copy_(self._sources[index])
        for branch in branches:
            main.wait_stream(branch)


class LiveCopies:
    """The replay that fits the trainer's tensors as they are now; another one is built when any of them has moved."""

    def __init__(self) -> None:
        self._key: object = None
        self._token: object = None
        self._replay: Replay | None = None

    @property
    def replay(self) -> Replay | None:
        """The last one used."""
        return self._replay

    def forget(self) -> None:
        """Let all tensors go."""
        self._key = self._token = self._replay = None

    def repeats(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether `tensors` say by their token (see `LiveTensors`) that they are those of the last run, unmoved."""
        token = getattr(tensors, "token", None)
        return self._replay is not None and token is not None and token is self._token

    def run(
        self,
        tensors: Mapping[str, Tensor],
        pairs: Callable[[], Sequence[tuple[Tensor, Tensor]]],
        zeroed: Sequence[Tensor] = (),
    ) -> None:
        """Copy.

        Args:
            tensors: The sources by name.
            pairs: Makes the (source, target) pairs; called when a source has moved. The owner calls `forget` when a
                target may have.
            zeroed: Targets that are set to zero.
        """
        if not self.repeats(tensors):
            key = tuple((name, tensor.data_ptr(), tensor.dtype, tensor.shape) for name, tensor in tensors.items())
            if self._replay is None or self._key != key:
                self.forget()  # what the old one holds goes before the new one is made
                self._key, self._replay = key, Replay(pairs(), zeroed)
            self._token = getattr(tensors, "token", None)
        assert self._replay is not None
        self._replay.run()


def same_place(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same bytes, read in the same way."""
    same = a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.device == b.device
    return same and a.shape == b.shape and a.stride() == b.stride()
