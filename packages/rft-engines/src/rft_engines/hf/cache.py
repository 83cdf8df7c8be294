"""Key-value buffers of one wave, allocated once and decoded in place."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class WaveLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's buffer [rows, kv_heads, width, head_dim]; the wave says which part of it is live."""

    is_sliding = False

    def __init__(self, wave: "WaveCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wave = wave

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the whole wave, in the shape of the first states that arrive."""
        rows, width = self.wave.rows, self.wave.width
        self.keys = key_states.new_empty(rows, key_states.shape[1], width, key_states.shape[3])
        self.values = value_states.new_empty(rows, value_states.shape[1], width, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write this step's states [active, kv_heads, 1, head_dim]; returns views of all live ones."""
        wave = self.wave
        assert self.keys is not None
        assert self.values is not None
        end = wave.end + key_states.shape[2]
        self.keys[: wave.active, :, wave.end : end] = key_states
        self.values[: wave.active, :, wave.end : end] = value_states
        return self.keys[: wave.active, :, wave.begin : end], self.values[: wave.active, :, wave.begin : end]

    def fill(self, rows: slice, end: int, keys: Tensor, values: Tensor) -> None:
        """Copy prefilled states [prompts, kv_heads, length, head_dim] so that they end before column `end`.

        `rows` holds the same number of rows for each prompt, one prompt after the other. The columns before them are
        masked, yet cleared: a NaN left in fresh memory would pass through a weight of 0.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        first = end - keys.shape[2]
        for buffer, states in ((self.keys, keys), (self.values, values)):
            assert buffer is not None
            buffer[rows, :, :first] = 0
            buffer[rows, :, first:end].view(states.shape[0], -1, *states.shape[1:]).copy_(states[:, None])

    def move_rows(self, sources: Tensor, targets: Tensor, columns: slice) -> None:
        """Copy whole rows, live columns only."""
        assert self.keys is not None
        assert self.values is not None
        self.keys[targets, :, columns] = self.keys[sources, :, columns]
        self.values[targets, :, columns] = self.values[sources, :, columns]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Live columns including this step's, offset 0: a mask is made for the live part alone."""
        return self.wave.end - self.wave.begin + query_length, 0

    def get_seq_length(self) -> int:
        """Live columns before this step."""
        return self.wave.end - self.wave.begin

    def get_max_length(self) -> int:
        """Columns allocated."""
        return self.wave.width

    def get_max_cache_shape(self) -> int:
        """Columns allocated, as older releases of transformers ask for them; 5.6 cannot do without."""
        return self.wave.width


class WaveCache(Cache):
    """Buffers for `rows` sequences of at most `width` columns, prompts aligned on the right at a common column.

    Finished rows leave by `compact`: the last active rows move into the holes, so that the active rows are always the
    first `active` ones and a step never touches a finished row. `begin` grows when the longest prompts have left.
    """

    def __init__(self, *, layers: int, rows: int, width: int, prompt_width: int) -> None:
        self.rows = rows
        self.width = width
        self.active = rows
        self.begin = 0
        self.end = prompt_width
        self._own: list[WaveLayer] = [WaveLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self._own))

    def fill(self, rows: slice, prefilled: Cache, prompts: slice, length: int, shared: int) -> None:
        """Copy prompts of one length out of a prefill's cache into the wave's `rows`, as many rows for each of them.

        Of a prompt's `length` columns the first `shared` come first in the prefill's row, the others last; what lies
        between them is padding, whose states may be anything.
        """
        for layer, source in zip(self._own, prefilled.layers, strict=True):
            assert isinstance(source, CacheLayerMixin)
            assert isinstance(source.keys, Tensor)
            assert isinstance(source.values, Tensor)
            own = slice(source.keys.shape[2] - (length - shared), None)
            keys, values = source.keys[prompts], source.values[prompts]
            layer.fill(rows, self.end, keys[:, :, own], values[:, :, own])
            if shared:
                layer.fill(rows, self.end - (length - shared), keys[:, :, :shared], values[:, :, :shared])

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        buffers = [buffer for layer in self._own for buffer in (layer.keys, layer.values) if buffer is not None]
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def compact(self, sources: Sequence[int], targets: Sequence[int], active: int) -> None:
        """Move rows `sources` into `targets`; `active` rows remain."""
        if sources:
            columns = slice(self.begin, self.end)
            assert self._own[0].keys is not None
            device = self._own[0].keys.device
            source_rows = torch.tensor(sources, device=device)
            target_rows = torch.tensor(targets, device=device)
            for layer in self._own:
                layer.move_rows(source_rows, target_rows, columns)
        self.active = active
