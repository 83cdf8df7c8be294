"""The scored responses of a step: which prompts are drawn, in how many rounds, and what is left for later."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rft_dist import Max, Sum
from rft_engines import SamplingParams
from rft_trainer.data import EncodedPrompt, Sampler
from rft_trainer.experience.dynamic import DynamicSampling
from rft_trainer.experience.experience import Experience
from rft_trainer.experience.maker import FastExperienceMaker, PhaseTimer
from rft_trainer.experience.partial import PartialRollouts


class Rollouts:
    """Draws prompts, generates and scores; plainly, or by one of the two schemes.

    Args:
        dynamic: sample until enough groups teach something.
        partial: let responses grow over several steps.
    """

    def __init__(
        self,
        *,
        maker: FastExperienceMaker,
        sampler: Sampler,
        prompts: Sequence[EncodedPrompt],
        sampling: SamplingParams,
        dynamic: DynamicSampling | None = None,
        partial: PartialRollouts | None = None,
    ) -> None:
        self._maker = maker
        self._sampler = sampler
        self._prompts = prompts
        self._sampling = sampling
        self._dynamic = dynamic
        self._partial = partial

    def collect(self, step: int, timer: PhaseTimer) -> tuple[list[Experience], dict[str, Any]]:
        """This rank's scored experiences, groups side by side, and metrics that still want their reduction.

        Collective over the rollout TP group; with dynamic sampling over the world.
        """
        if self._dynamic is not None:
            return self._dynamic.collect(step, lambda items, number: self._round(items, step, number, timer))
        items = self._sampler.next_batch()
        if self._partial is None:
            return self._round(items, step, 0, timer), {}
        with timer("generate"):
            experiences = self._maker.partial_rollout(self._partial, items, self._prompts, self._sampling, step=step)
        with timer("rewards"):
            self._maker.reward(experiences)
        versions = [e.token_versions for e in experiences if e.token_versions is not None and len(e.token_versions)]
        spread = max((int(tokens.max() - tokens.min()) for tokens in versions), default=0)
        held = sum(len(group["samples"]) for group in self._partial.state_dict())
        return experiences, {"rollout/version_spread": Max(float(spread)), "rollout/held": Sum(float(held))}

    def _round(self, items: Sequence[int], step: int, number: int, timer: PhaseTimer) -> list[Experience]:
        prompts = [self._prompts[item] for item in items]
        with timer("generate"):
            experiences = self._maker.rollout(items, prompts, self._sampling, step=step, number=number)
        with timer("rewards"):
            self._maker.reward(experiences)
        return experiences

    def state_dict(self) -> dict[str, Any]:
        """What decides the next prompts; equal on every rank."""
        dynamic = None if self._dynamic is None else self._dynamic.state_dict()
        return {"sampler": dict(self._sampler.state_dict()), "dynamic": dynamic}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._sampler.load_state_dict(state["sampler"])
        if self._dynamic is not None and state["dynamic"] is not None:
            self._dynamic.load_state_dict(state["dynamic"])

    def save_held(self, folder: Path, rank: int) -> None:
        """Write the responses that this rank holds for later steps."""
        if self._partial is not None:
            (folder / _held(rank)).write_text(json.dumps(self._partial.state_dict()))

    def load_held(self, folder: Path, rank: int) -> None:
        """Read what `save_held` wrote; a checkpoint of a run without partial rollouts holds nothing."""
        if self._partial is not None and (folder / _held(rank)).is_file():
            self._partial.load_state_dict(json.loads((folder / _held(rank)).read_text()))


def _held(rank: int) -> str:
    return f"held_{rank:05d}.json"
