"""What sleep means for each engine, as data."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from types import MappingProxyType

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
CUDA_GRAPHS = "cuda_graphs"


class SleepLevel(IntEnum):
    """How deep an engine sleeps."""

    KEEP_WEIGHTS = 1
    """The weights survive the sleep. For adapter-only updates and for generating again without an update."""
    DROP_WEIGHTS = 2
    """The weights are given up. For sleeps that a full weight update follows."""


class Fate(StrEnum):
    """What a sleep does to one kind of memory."""

    RELEASED = "released"
    """The device memory is free during sleep; wake_up brings it back fit for use."""
    KEPT = "kept"
    """Stays in device memory."""
    UNDEFINED = "undefined"
    """The device memory is free during sleep; after wake_up the content is undefined until loaded."""


@dataclass(frozen=True, kw_only=True)
class LevelEffect:
    """Fate of each kind of memory at one sleep level."""

    weights: Fate
    kv_cache: Fate
    cuda_graphs: Fate


@dataclass(frozen=True, kw_only=True)
class SleepContract:
    """One engine's row of the sleep table.

    Attributes:
        engine: "hf", "vllm", "sglang", ...
        versions: engine versions the row holds for, a requirement specifier ("" for any).
        default_level: level of `sleep()` without arguments.
        effects: level -> effect.
        staged_wake: whether weights and KV cache can be woken one after the other.
        note: what a reader of the table must know beside it.
    """

    engine: str
    versions: str
    default_level: SleepLevel
    effects: Mapping[SleepLevel, LevelEffect]
    staged_wake: bool = True
    note: str = ""

    def effect(self, level: int | None = None) -> LevelEffect:
        """Effect of `sleep(level)`; None is the default level.

        Raises:
            ValueError: no such level.
        """
        return self.effects[self.level(level)]

    def level(self, level: int | None = None) -> SleepLevel:
        """The level meant by `sleep(level)`.

        Raises:
            ValueError: no such level.
        """
        if level is None:
            return self.default_level
        if level not in list(self.effects):
            raise ValueError(
                f"sleep level {level!r} is unknown to engine {self.engine!r}: give one of "
                f"{[int(known) for known in self.effects]} (1 keeps the weights, 2 drops them)"
            )
        return SleepLevel(level)

    def level_for(self, *, full_update_follows: bool) -> SleepLevel:
        """Drop the weights when every one of them is sent before the next generation, keep them otherwise."""
        wanted = SleepLevel.DROP_WEIGHTS if full_update_follows else SleepLevel.KEEP_WEIGHTS
        return wanted if wanted in self.effects else self.default_level


def _effects(keep: tuple[Fate, Fate, Fate], drop: tuple[Fate, Fate, Fate]) -> Mapping[SleepLevel, LevelEffect]:
    rows = {SleepLevel.KEEP_WEIGHTS: keep, SleepLevel.DROP_WEIGHTS: drop}
    return MappingProxyType(
        {
            level: LevelEffect(weights=weights, kv_cache=kv_cache, cuda_graphs=graphs)
            for level, (weights, kv_cache, graphs) in rows.items()
        }
    )


_R, _K, _U = Fate.RELEASED, Fate.KEPT, Fate.UNDEFINED

SLEEP_CONTRACTS: tuple[SleepContract, ...] = (
    SleepContract(
        engine="hf",
        versions="",
        default_level=SleepLevel.KEEP_WEIGHTS,
        effects=_effects(keep=(_R, _R, _K), drop=(_U, _R, _K)),
        note="Level 1 moves the parameters to host memory on an accelerator and leaves them in place on the CPU. "
        "The KV cache exists during generate only. There are no CUDA graphs.",
    ),
    SleepContract(
        engine="vllm",
        versions=">=0.24,<0.33",
        default_level=SleepLevel.KEEP_WEIGHTS,
        effects=_effects(keep=(_R, _R, _K), drop=(_U, _R, _K)),
        note="Level 1 copies the weights to pinned host memory. On the CPU nothing is freed; the adapter keeps the "
        "same states, and dropped weights count as undefined there too.",
    ),
    SleepContract(
        engine="sglang",
        versions=">=0.5.14,<0.5.22",
        default_level=SleepLevel.KEEP_WEIGHTS,
        effects=_effects(keep=(_K, _R, _R), drop=(_U, _R, _R)),
        note="Level 1 leaves the weights in device memory. Graphs are released with tag cuda_graph.",
    ),
)


def sleep_contract(engine: str) -> SleepContract:
    """The sleep table's row for a built-in engine.

    Raises:
        ValueError: no such engine.
    """
    for contract in SLEEP_CONTRACTS:
        if contract.engine == engine:
            return contract
    raise ValueError(f"no sleep contract for engine {engine!r}: known are {[row.engine for row in SLEEP_CONTRACTS]}")
