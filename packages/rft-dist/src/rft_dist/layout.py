"""Which ranks form tensor-parallel and data-parallel groups: arithmetic only."""

from dataclasses import dataclass, field

from rft_dist.errors import ConfigurationError


@dataclass(frozen=True)
class ParallelLayout:
    """Splits a world into rollout groups: TP groups of consecutive ranks, DP groups across them.

    World 8 with TP 2 gives TP groups [0,1] [2,3] [4,5] [6,7] and DP groups [0,2,4,6] [1,3,5,7].

    Attributes:
        world_size: number of ranks.
        engine_tp_size: ranks that share one rollout engine; divides world_size.
        rank: this rank; needed by `tp_rank`, `dp_rank` and `engine_seed`.
        local_world_size: ranks on one node; when given, no TP group crosses a node's border.

    Raises:
        ConfigurationError: (a ValueError) sizes that do not divide, or a rank outside the world.
    """

    world_size: int
    engine_tp_size: int = 1
    rank: int | None = field(default=None, kw_only=True)
    local_world_size: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_count("world_size", self.world_size)
        _check_count("engine_tp_size", self.engine_tp_size)
        if self.world_size % self.engine_tp_size:
            raise ConfigurationError(
                f"engine_tp_size={self.engine_tp_size} does not divide world_size={self.world_size}: "
                f"choose one of {_divisors(self.world_size)}, or start another number of ranks"
            )
        if self.rank is not None and (type(self.rank) is not int or not 0 <= self.rank < self.world_size):
            raise ConfigurationError(f"rank={self.rank!r} is outside the world: give 0 to {self.world_size - 1}")
        if self.local_world_size is not None:
            self._check_nodes(self.local_world_size)

    def _check_nodes(self, local: int) -> None:
        _check_count("local_world_size", local)
        if self.world_size % local:
            raise ConfigurationError(
                f"local_world_size={local} does not divide world_size={self.world_size}: "
                "start the same number of ranks on every node"
            )
        if local < self.world_size and local % self.engine_tp_size:
            raise ConfigurationError(
                f"engine_tp_size={self.engine_tp_size} does not divide local_world_size={local}, so a TP group would "
                f"cross nodes: choose one of {_divisors(local)}"
            )

    @property
    def dp_size(self) -> int:
        """Number of TP groups, which is the number of rollout engines."""
        return self.world_size // self.engine_tp_size

    @property
    def tp_rank(self) -> int:
        """Position of this rank inside its TP group."""
        return self._own_rank("tp_rank") % self.engine_tp_size

    @property
    def dp_rank(self) -> int:
        """Number of this rank's TP group, which is this rank's position inside its DP group."""
        return self._own_rank("dp_rank") // self.engine_tp_size

    def tp_groups(self) -> list[list[int]]:
        """Ranks of each TP group: consecutive ones."""
        tp = self.engine_tp_size
        return [list(range(start, start + tp)) for start in range(0, self.world_size, tp)]

    def dp_groups(self) -> list[list[int]]:
        """Ranks of each DP group: those at the same position of every TP group."""
        return [list(range(start, self.world_size, self.engine_tp_size)) for start in range(self.engine_tp_size)]

    def engine_seed(self, base: int | None) -> int:
        """Seed of this rank's engine: the same inside a TP group, another in every other group.

        Ranks of one TP group must draw the same random numbers, or they sample different tokens; groups with the same
        seed would repeat each other's samples.

        Args:
            base: the run's seed; None counts as 0.

        Returns:
            base + number of the TP group.
        """
        return (0 if base is None else base) + self.dp_rank

    def _own_rank(self, wanted: str) -> int:
        if self.rank is None:
            raise ConfigurationError(f"{wanted} needs a rank: build ParallelLayout(..., rank=...)")
        return self.rank


def _check_count(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ConfigurationError(f"{name}={value!r} is no size: give a whole number from 1 up")


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
