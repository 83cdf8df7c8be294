"""One wave: prefill each prompt once, then decode its samples together until the last has ended."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from rft_engines.hf.cache import WaveCache
from rft_engines.hf.rows import Row, StepBudget
from rft_engines.hf.sampler import choose_tokens
from rft_engines.hf.stops import StopRules
from rft_engines.hf.vision import picture_inputs
from rft_engines.hf.waves import Wave, common_prefix, equal_runs, plan_prefill
from rft_engines.sampling import SamplingParams

# A shorter common prefix is not worth a forward of its own.
_SHORTEST_PREFIX = 16


@dataclass(frozen=True)
class _Prefix:
    """What all prompts of a wave begin with, prefilled once.

    Attributes:
        length: tokens, 0 when each prompt is prefilled whole.
        cache: keys and values [1, kv_heads, length, head_dim] of each layer.
    """

    length: int
    cache: DynamicCache

    def expanded(self, rows: int) -> DynamicCache:
        """A cache of their own for `rows` prompts."""
        cache = DynamicCache()
        if self.length:
            for number, layer in enumerate(self.cache.layers):
                assert isinstance(layer, CacheLayerMixin)
                assert isinstance(layer.keys, Tensor)
                assert isinstance(layer.values, Tensor)
                cache.update(layer.keys.expand(rows, -1, -1, -1), layer.values.expand(rows, -1, -1, -1), number)
        return cache


class Decoder:
    """Forward passes over a causal model with the caches of this package."""

    def __init__(self, model: nn.Module, *, prefill_tokens: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self._prefill_tokens = prefill_tokens
        self.largest_cache = 0
        """Bytes of the largest wave's buffers so far."""
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        config: Any = model.config
        kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
        window = getattr(config.get_text_config(), "sliding_window", None)
        # Padding between prefix and prompt would count in a window of columns.
        self._shares_prefixes = "position_ids" in self._accepted and kinds <= {"full_attention"} and not window

    def _forward(
        self, input_ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any, **vision: Tensor
    ) -> Tensor:
        optional = {"position_ids": positions, "logits_to_keep": 1}
        given = {name: value for name, value in optional.items() if name in self._accepted}
        output = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
            **given,
            **vision,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _shared_prefix(self, heads: Sequence[Row]) -> _Prefix:
        """The prefix that all prompts share, prefilled, where that saves work."""
        cache = DynamicCache()
        if len(heads) > 1 and self._shares_prefixes and all(row.pictures is None for row in heads):
            length = common_prefix([row.prompt for row in heads])
            if length >= _SHORTEST_PREFIX:
                input_ids = torch.tensor([heads[0].prompt[:length]], device=self.device)
                self._forward(input_ids, None, torch.arange(length, device=self.device)[None], cache)
                return _Prefix(length, cache)
        return _Prefix(0, cache)

    def _prefill(self, heads: Sequence[Row], prefix: _Prefix) -> tuple[Tensor, DynamicCache, list[int]]:
        """Logits [heads, V] after each prompt, the cache, and position offsets.

        What follows the prefix is padded on the left: a row of the cache holds prefix, padding, rest.
        """
        rests = [row.prompt[prefix.length :] for row in heads]
        width = max(len(rest) for rest in rests)
        # The padding id is arbitrary: it is masked, and the position of the first real token is that of no padding.
        padded = [(0,) * (width - len(rest)) + rest for rest in rests]
        input_ids = torch.tensor(padded, device=self.device)
        starts = torch.tensor([width - len(rest) for rest in rests], device=self.device)
        columns = torch.arange(width, device=self.device)
        positions = prefix.length + (columns[None] - starts[:, None]).clamp_(min=0)
        real = F.pad(columns[None] >= starts[:, None], (prefix.length, 0), value=True)
        mask = None if all(len(rest) == width for rest in rests) else real
        cache = prefix.expanded(len(heads))
        if all(row.pictures is None for row in heads):
            return self._forward(input_ids, mask, positions, cache), cache, [0] * len(heads)
        vision, positions, offsets = picture_inputs(self.model, input_ids, real, [row.pictures for row in heads])
        return self._forward(input_ids, mask, positions, cache, **vision), cache, offsets.tolist()

    def start(self, rows: Sequence[Row], *, samples: int, wave: Wave) -> tuple[Tensor, WaveCache]:
        """Prefill the prompts of rows, `samples` for each prompt, longest first, and fill a wave's cache.

        A prefix common to all of them is prefilled once.

        Returns the logits [rows, V] of the first new token and the cache.
        """
        heads = rows[::samples]
        prompts = [row.prompt for row in heads]
        cache: WaveCache | None = None
        logits: list[Tensor] = []
        prefix = self._shared_prefix(heads)
        rests = [len(prompt) - prefix.length for prompt in prompts]
        for chunk in plan_prefill(rests, max_tokens=self._prefill_tokens):
            chunk_logits, prefilled, offsets = self._prefill([heads[place] for place in chunk], prefix)
            logits.append(chunk_logits)
            if cache is None:
                cache = WaveCache(
                    layers=len(prefilled.layers),
                    rows=len(prompts) * samples,
                    width=wave.width,
                    prompt_width=wave.prompt_width,
                )
            for run in equal_runs([len(prompts[place]) for place in chunk]):
                first = chunk.start + run.start
                own = slice(first * samples, (chunk.start + run.stop) * samples)
                cache.fill(own, prefilled, slice(run.start, run.stop), len(prompts[first]), prefix.length)
            for number, place in enumerate(chunk):
                for row in rows[place * samples : (place + 1) * samples]:
                    row.position_offset = offsets[number]
        assert cache is not None
        self.largest_cache = max(self.largest_cache, cache.nbytes)
        return torch.cat(logits).repeat_interleave(samples, dim=0), cache

    def step(self, rows: Sequence[Row], cache: WaveCache) -> Tensor:
        """Logits [rows, V] after the newest token of each active row."""
        newest = torch.tensor([[row.tokens[-1]] for row in rows], device=self.device)
        lengths = [len(row.prompt) + len(row.tokens) - 1 for row in rows]
        counts = torch.tensor(lengths, device=self.device)[:, None]
        offsets = torch.tensor([row.position_offset for row in rows], device=self.device)[:, None]
        # Columns of the longest active row are the live part; shorter rows start later in it.
        live = max(lengths)
        cache.begin = cache.end - live
        mask = None
        if min(lengths) < live:
            mask = torch.arange(live + 1, device=self.device)[None] >= live - counts
        logits = self._forward(newest, mask, counts + offsets, cache)
        cache.end += 1
        return logits


def decode_wave(
    decoder: Decoder,
    wave: Wave,
    rows: Sequence[Row],
    *,
    sampling: SamplingParams,
    stops: StopRules,
    budget: StepBudget,
) -> None:
    """Decode the rows of a wave until each has ended or the budget is spent.

    `rows` holds n rows for each request in the order of `wave.places`.
    """
    active = list(rows)
    if budget.spent():
        return
    logits, cache = decoder.start(rows, samples=sampling.n, wave=wave)
    while True:
        uniforms = torch.tensor(
            [row.stream.at(len(row.tokens)) for row in active], dtype=torch.float64, device=decoder.device
        )
        tokens, log_probs = choose_tokens(logits, uniforms, sampling.at(len(active[0].tokens)))
        for row, token, log_prob in zip(active, tokens.tolist(), log_probs.tolist(), strict=True):
            row.take(token, log_prob, stops)
        active = _drop_finished(active, cache)
        if not active or budget.spent():
            return
        logits = decoder.step(active, cache)


def _drop_finished(rows: list[Row], cache: WaveCache) -> list[Row]:
    """The rows that go on, in the order in which the cache now holds them."""
    remaining = sum(row.finish_reason is None for row in rows)
    if remaining == len(rows):
        return rows
    holes = [place for place in range(remaining) if rows[place].finish_reason is not None]
    moved = [place for place in range(remaining, len(rows)) if rows[place].finish_reason is None]
    cache.compact(moved, holes, remaining)
    kept = rows[:remaining]
    for source, target in zip(moved, holes, strict=True):
        kept[target] = rows[source]
    return kept
