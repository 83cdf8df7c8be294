"""What a source of weights must offer. Anything that does can be broadcast."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor

from rft_sync.parameters import ParamMeta


@runtime_checkable
class ParameterSource(Protocol):
    """Weights of a training model under checkpoint names.

    A source may also have `release()` (called after every update: give buffers back), `kind` (`full` or `adapter`) and
    `statistics()` (see `SourceStatistics`); `BroadcastManager` uses them where they exist.
    """

    def metadata(self) -> Sequence[ParamMeta]:
        """Every tensor that will be sent, in order, with global shapes, alike on every rank. No communication."""
        ...

    def gather(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Whole tensors for `names`, valid inside the context only. Collective over the ranks that hold the shards.

        Every rank enters with the same names in the same order. The tensors must not be written to.
        """
        ...
