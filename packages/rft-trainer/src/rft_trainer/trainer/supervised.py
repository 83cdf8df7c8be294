"""Supervised steps: the policy imitates gold answers through its own log-probabilities."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rft_dist import Sum
from rft_trainer.algorithms import aggregate
from rft_trainer.data import Demonstration, Sampler
from rft_trainer.experience.experience import Experience, ExperienceBatch
from rft_trainer.report import MetricLogger
from rft_trainer.strategy.protocols import DataParallel, TrainState
from rft_trainer.trainer.collector import MetricCollector
from rft_trainer.trainer.steps import MiniBatchStep

AGGREGATION = "token-mean"
"""The mean over all answer tokens of a step, which is what transformers' own loss of a batch with labels is."""
UNTIMED_STEPS, PACE_STEPS = 2, 8
"""Of a run with a budget of seconds: steps whose time says nothing, and steps behind them that are timed."""


@dataclass(frozen=True, kw_only=True)
class SupervisedRun:
    """What a warm start did.

    Attributes:
        steps: optimiser steps, planned and taken.
        skipped: of them, those whose gradient was not finite.
        answers: answers seen, repetitions included.
        trained_tokens: answer tokens, end tokens included.
        tokens: tokens of prompts and answers.
        seconds: of the steps, by the first rank's clock.
        first_loss, last_loss: of the first and the last step, nats a token.
    """

    steps: int
    skipped: int
    answers: int
    trained_tokens: int
    tokens: int
    seconds: float
    first_loss: float
    last_loss: float


class SupervisedTrainer:
    """Optimiser steps over demonstrations.

    Args:
        step: micro-batches, denominator and optimiser step; its aggregation is `AGGREGATION`.
        sampler: this rank's share of each batch.
        examples: what the sampler's indices mean.
        data: collectives.
        logger: metrics under `warm_start/` by step.
        say: told about the plan, in words for a person.
    """

    def __init__(
        self,
        *,
        step: MiniBatchStep,
        sampler: Sampler,
        examples: Sequence[Demonstration],
        data: DataParallel,
        logger: MetricLogger,
        say: Callable[[str], None],
    ) -> None:
        self._step = step
        self._sampler = sampler
        self._examples = examples
        self._data = data
        self._logger = logger
        self._say = say

    def run(
        self,
        state: TrainState,
        *,
        steps: int | None,
        seconds: float | None = None,
        on_plan: Callable[[int], None] = lambda steps: None,
    ) -> SupervisedRun:
        """Train. Collective over the world.

        Args:
            state: the actor; its scores must be of the plain distribution (temperature 1, no truncation).
            steps: how many; None: as many as `seconds` allow.
            seconds: the budget. After `UNTIMED_STEPS` + `PACE_STEPS` steps the first rank's pace gives the number of
                steps; from then on the number alone decides, so all ranks stop together and the run can be repeated
                by giving the number. A budget that ends before is over after the step in which it ends.
            on_plan: called once, on every rank, with the number of steps as soon as it is known.
        """
        state.module.train()
        started = time.perf_counter()
        timed_from = started
        planned = steps
        if planned is not None:
            on_plan(planned)
        rows: list[dict[str, float]] = []
        while planned is None or len(rows) < planned:
            rows.append(self._one(state))
            taken, now = len(rows), time.perf_counter()
            self._logger.log(taken, {**rows[-1], "warm_start/seconds": now - started})
            if taken == UNTIMED_STEPS:
                timed_from = now
            if planned is None:
                assert seconds is not None
                planned = self._plan(taken, seconds, now - started, now - timed_from)
                if planned is not None:
                    self._say(f"warm start: {planned} steps, planned after {taken} for {seconds:g} s")
                    on_plan(planned)
        return _summary(rows, time.perf_counter() - started)

    def _plan(self, taken: int, budget: float, elapsed: float, timed: float) -> int | None:
        """The number of steps by the first rank's clock; None while it is too early. Collective over the world."""
        mine = 0
        if self._data.rank == 0:
            mine = planned_steps(taken, budget_seconds=budget, elapsed_seconds=elapsed, timed_seconds=timed) or 0
        return self._data.most(mine) or None

    def _one(self, state: TrainState) -> dict[str, float]:
        """One optimiser step; its metrics, equal on all ranks. Collective over the world."""
        batch = [demonstrated(self._examples[index]) for index in self._sampler.next_batch()]
        collected = MetricCollector("warm_start/")

        def micro_loss(module: Any, micro_batch: ExperienceBatch, denominator: float) -> Tensor:
            loss = supervised_loss(module(micro_batch.layout).log_probs, micro_batch.loss_mask, denominator)
            collected.add_loss(loss)
            return loss

        collected.add_step(self._step(state, batch, micro_loss))
        facts = {
            "warm_start/answers": Sum(float(len(batch))),
            "warm_start/trained_tokens": Sum(float(sum(len(e.response_ids) for e in batch))),
            "warm_start/tokens": Sum(float(sum(e.length for e in batch))),
        }
        return self._data.reduce_metrics({**collected.metrics(), **facts})


def _summary(rows: Sequence[dict[str, float]], seconds: float) -> SupervisedRun:
    def total(name: str) -> int:
        return int(sum(row[f"warm_start/{name}"] for row in rows))

    return SupervisedRun(
        steps=len(rows),
        skipped=total("skipped_updates"),
        answers=total("answers"),
        trained_tokens=total("trained_tokens"),
        tokens=total("tokens"),
        seconds=seconds,
        first_loss=rows[0]["warm_start/loss"],
        last_loss=rows[-1]["warm_start/loss"],
    )


def supervised_loss(log_probs: Tensor, mask: Tensor, denominator: Tensor | float) -> Tensor:
    """This micro-batch's part of the mean negative log-likelihood of the answer tokens, a scalar.

    Args:
        log_probs: [B, T] of the answers' tokens.
        mask: [B, T] where a token of an answer stands.
        denominator: tokens of all micro-batches and ranks of the step.
    """
    return aggregate(-log_probs, mask, AGGREGATION, denominator)


def planned_steps(taken: int, *, budget_seconds: float, elapsed_seconds: float, timed_seconds: float) -> int | None:
    """How many steps a budget of seconds is for, `taken` ones included; None while it is too early to say.

    Args:
        taken: finished steps.
        budget_seconds: of the whole training.
        elapsed_seconds: since its beginning.
        timed_seconds: since the step `UNTIMED_STEPS` ended.
    """
    if elapsed_seconds >= budget_seconds:
        return taken
    if taken < UNTIMED_STEPS + PACE_STEPS:
        return None
    pace = timed_seconds / (taken - UNTIMED_STEPS)
    return taken + math.floor((budget_seconds - elapsed_seconds) / pace)


def demonstrated(example: Demonstration) -> Experience:
    """A demonstration in the form that micro-batches are made of; no engine has sampled it."""
    return Experience(
        group=-1,
        prompt_ids=torch.tensor(example.prompt_ids, dtype=torch.long),
        response_ids=torch.tensor(example.response_ids, dtype=torch.long),
        response_mask=torch.ones(len(example.response_ids), dtype=torch.bool),
        engine_log_probs=torch.zeros(len(example.response_ids)),
        weights_version=0,
        truncated=False,
        prompt_id=example.id,
    )
