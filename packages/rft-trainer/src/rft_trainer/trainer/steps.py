"""One optimiser step over a mini-batch, whatever its loss is."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rft_trainer.algorithms import loss_denominator
from rft_trainer.experience.experience import Collator, Experience, ExperienceBatch, placeholder
from rft_trainer.experience.micro_batches import MicroBatchPlanner
from rft_trainer.models.padding import right_pad
from rft_trainer.strategy.protocols import DataParallel, StepReport, TrainingBackend, TrainState

MicroLoss = Callable[[Any, ExperienceBatch, float], Tensor]
"""(model, micro-batch, denominator) -> this micro-batch's part of the global loss."""


class MiniBatchStep:
    """Micro-batches of a mini-batch, one denominator for all of them, one optimiser step.

    The loss is one sum over all ranks and micro-batches divided by one global count, so the gradient does not depend on
    how the mini-batch is split.

    aggregation, fixed_length: how token losses become one number; see `loss_denominator`.
    """

    def __init__(
        self,
        *,
        backend: TrainingBackend,
        data: DataParallel,
        planner: MicroBatchPlanner,
        collator: Collator,
        aggregation: str,
        fixed_length: int | None = None,
    ) -> None:
        self._backend = backend
        self._data = data
        self._planner = planner
        self._collate = collator
        self._aggregation = aggregation
        self._fixed_length = fixed_length

    def __call__(self, state: TrainState, mini_batch: list[Experience], micro_loss: MicroLoss) -> StepReport:
        """Collective over the world; a rank whose share is empty joins with rows of zero weight."""
        batches = self._planner.plan(mini_batch)
        masks = [right_pad([mini_batch[i].response_mask for i in indices], 0)[0] for indices in batches if indices]
        local = sum((loss_denominator(m, self._aggregation, self._fixed_length) for m in masks), torch.zeros(()))
        # Before the first backward: every micro-batch on every rank divides by the same number.
        denominator = float(self._data.sum(local))
        for number, indices in enumerate(batches):
            rows = [mini_batch[i] for i in indices] or [placeholder(mini_batch)]
            loss = micro_loss(state.module, self._collate(rows), denominator)
            if not indices:
                # Whatever the loss adds for its rows, an empty share weighs nothing.
                loss = loss * 0.0
            self._backend.backward(state, loss, last=number == len(batches) - 1)
        return self._backend.optimizer_step(state)
