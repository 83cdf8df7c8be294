"""Dynamic sampling: groups that teach nothing are replaced by new ones until the batch is full (DAPO)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rft_dist import Max, Mean, Sum
from rft_trainer.algorithms import informative_groups
from rft_trainer.experience.experience import Experience
from rft_trainer.strategy.protocols import DataParallel

SAMPLED_TOKENS = "rollout/sampled_tokens"
"""Response tokens of all rounds, kept or not."""

Rollout = Callable[[Sequence[int], int], list[Experience]]
"""(items, round) -> this rank's scored experiences, n for each item, groups side by side."""


@dataclass(frozen=True, kw_only=True)
class GroupFilter:
    """Which groups are kept and how many a step wants.

    group_size: responses per prompt. wanted: groups of a step over all ranks. rounds: most rounds of sampling.
    lowest_mean, highest_mean: bounds on the mean raw score of a group; None for none.
    """

    group_size: int
    wanted: int
    rounds: int
    lowest_mean: float | None = None
    highest_mean: float | None = None


class DynamicSampling:
    """Samples until `wanted` groups with a spread are there (arXiv 2503.14476, section 3.2), at most `rounds` times.

    Every rank takes part in every round and sees the same counts, so all stop together. Prompts of groups beyond
    `wanted` come first in the next step: none is lost. Groups that teach nothing are used up.

    Args:
        draw: this rank's items of the next global batch.
        say: tells a person, on the first rank, that a step got fewer groups than wanted.
    """

    def __init__(
        self, config: GroupFilter, *, data: DataParallel, draw: Callable[[], list[int]], say: Callable[[str], None]
    ) -> None:
        self._config = config
        self._data = data
        self._draw = draw
        self._say = say
        self._waiting: list[int] = []

    def collect(self, step: int, rollout: Rollout) -> tuple[list[Experience], dict[str, Any]]:
        """This rank's share of the step and metrics that still want their reduction. Collective over the world."""
        config, rank = self._config, self._data.rank
        mine: list[list[Experience]] = []
        # (rank, place among that rank's groups) by item, in the order of the data: the same for any number of ranks.
        found: dict[int, tuple[int, int]] = {}
        offsets = [0] * self._data.size
        sampled, rounds, score, tokens = 0, 0, 0.0, 0
        while len(found) < config.wanted and rounds < config.rounds:
            waited = {item: place for place, item in enumerate(self._waiting if rounds == 0 else ())}
            experiences = rollout(self._items(rounds), rounds)
            rounds += 1
            sampled += len(experiences) // config.group_size
            score += sum(e.score for e in experiences)
            tokens += sum(len(e.response_ids) for e in experiences)
            groups = self._informative(experiences)
            mine += groups
            places: list[tuple[int, tuple[int, int]]] = []
            for other, items in enumerate(self._data.gather([group[0].group for group in groups])):
                places += [(item, (other, place)) for place, item in enumerate(items, start=offsets[other])]
                offsets[other] += len(items)
            # Every rank had a share of those that waited in front of its share of the new ones.
            for item, where in sorted(places, key=lambda entry: waited.get(entry[0], len(waited))):
                # A prompt that comes round again within a step is trained on once.
                found.setdefault(item, where)
        chosen = list(found.items())
        self._waiting += [item for item, _ in chosen[config.wanted :]]
        chosen = chosen[: config.wanted]
        if len(chosen) < config.wanted and config.rounds > 1:
            self._say(
                f"step {step}: {len(chosen)} of {config.wanted} groups with different scores after {rounds} rounds of "
                "sampling; training on those. Raise dynamic_sampling_rounds, or change the difficulty of the prompts"
            )
        metrics = {
            "rollout/sampling_rounds": Max(float(rounds)),
            "rollout/kept_groups": Mean(len(mine), sampled),
            "rollout/sampled_score": Mean(score, sampled * config.group_size),
            SAMPLED_TOKENS: Sum(float(tokens)),
        }
        return [e for _, (owner, place) in chosen if owner == rank for e in mine[place]], metrics

    def state_dict(self) -> dict[str, Any]:
        """Items that come first in the next step; equal on every rank."""
        return {"waiting": list(self._waiting)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._waiting = list(state["waiting"])

    def _items(self, number: int) -> list[int]:
        """This rank's prompts of a round: those that wait first, in contiguous shares as the sampler cuts them."""
        if number or not self._waiting:
            return self._draw()
        waiting, self._waiting = self._waiting, []
        rank, size = self._data.rank, self._data.size
        share = waiting[rank * len(waiting) // size : (rank + 1) * len(waiting) // size]
        return share if len(waiting) >= self._config.wanted else share + self._draw()

    def _informative(self, experiences: Sequence[Experience]) -> list[list[Experience]]:
        config, size = self._config, self._config.group_size
        scores = torch.tensor([e.score for e in experiences])
        keep = informative_groups(scores, size, lowest_mean=config.lowest_mean, highest_mean=config.highest_mean)
        return [list(experiences[i * size : (i + 1) * size]) for i, is_kept in enumerate(keep.tolist()) if is_kept]
