"""The training loop, as a list of phases: roll out, score, update, sync, evaluate, save."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from rft_dist import Sum
from rft_engines import SamplingParams
from rft_trainer.algorithms import KLController, effective_sample_size
from rft_trainer.checkpoint import CheckpointStore, TrainerState
from rft_trainer.config import RFTConfig
from rft_trainer.errors import CheckpointError, RunInterrupted
from rft_trainer.experience.experience import Experience
from rft_trainer.experience.maker import FastExperienceMaker, Roles
from rft_trainer.experience.rollouts import Rollouts
from rft_trainer.report import MetricLogger
from rft_trainer.strategy.protocols import DataParallel, RolloutRuntime, TrainingBackend, TrainState
from rft_trainer.trainer.averaging import WeightAverage
from rft_trainer.trainer.evaluation import Evaluator
from rft_trainer.trainer.metrics import rollout_metrics
from rft_trainer.trainer.phases import RECORD, NoPhaseMemory, PhaseClock, PhaseMemory
from rft_trainer.trainer.rates import TOKENS, Rates
from rft_trainer.trainer.stop_signals import StopSignals
from rft_trainer.trainer.update import PolicyUpdate
from rft_trainer.trainer.wall_clock import WallClockGuard

CRITIC_FOLDER = "critic"
"""Where the critic's shards lie below the actor's."""
GAP = "train/gap/gap"
TRAINED = "rollout/trained_tokens"


class Progress(Protocol):
    """What the loop tells a person; silent on all ranks but the first."""

    def phase(self, name: str) -> AbstractContextManager[object]: ...

    def step_line(self, step: int, metrics: dict[str, float], *, total_steps: int | None = None) -> None: ...

    def line(self, text: str) -> None: ...


@dataclass(kw_only=True)
class PPOTrainer:
    """Rollout and update rounds over a policy. Models are wrapped by `backend`; all but `actor` may be None.

    kl: coefficient of the divergence, shared with `maker` and `update`; it follows the reduced divergence of each step.

    Everything a round does is a phase of `step`; each phase is collective over the world or local, as its component
    says, and runs in the same order on every rank.
    """

    config: RFTConfig
    actor: TrainState
    reference: nn.Module | None
    critic: TrainState | None
    teacher: nn.Module | None
    kl: KLController
    backend: TrainingBackend
    runtime: RolloutRuntime
    data: DataParallel
    rollouts: Rollouts
    maker: FastExperienceMaker
    update: PolicyUpdate
    average: WeightAverage | None
    evaluator: Evaluator | None
    checkpoints: CheckpointStore
    sampling: SamplingParams
    logger: MetricLogger
    progress: Progress
    keep_rollouts: Callable[[int, Sequence[Experience]], None]
    rates: Rates
    settings: dict[str, Any] = field(default_factory=dict)
    memory: PhaseMemory = field(default_factory=NoPhaseMemory)
    guard: WallClockGuard = field(default_factory=lambda: WallClockGuard(None))
    finished_steps: int = 0
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._clock = PhaseClock(
            self.data.device, self.progress.phase, enter=self.memory.enter, leave=self.memory.leave
        )

    def fit(self) -> dict[int, dict[str, float]]:
        """Train up to `max_steps` or `max_seconds`; the evaluations by step. Collective over the world.

        Raises:
            RunInterrupted: on all ranks, after the step in which one of them was told to stop by SIGINT or SIGTERM.
        """
        try:
            with StopSignals(self.progress.line) as stop:
                self._rounds(stop)
            self._settle_save(wait=True)
        except Exception as error:
            self._settle_after(error)
            raise
        finally:
            self.logger.close()
        self.progress.line(self.memory.table())
        return self.evaluations

    def _rounds(self, stop: StopSignals) -> None:
        config = self.config
        self._clock.restart()
        with self._clock("sync"):
            self.runtime.update_engine_weights(self.actor)
        # Before the first step; or after a signal, which has put the evaluation of its step off.
        if self._evaluates_after(self.finished_steps, last=self.finished_steps == config.max_steps):
            self.evaluate(self.finished_steps)
        while self.finished_steps < config.max_steps:
            self.step()
            step = self.finished_steps
            last = step == config.max_steps or bool(self.data.most(int(self.guard.is_over())))
            if last and step < config.max_steps:
                self.progress.line(f"max_seconds {config.max_seconds:g}: step {step} is the last that fits")
            stopping = bool(self.data.most(int(stop.requested))) and not last
            if not stopping and self._evaluates_after(step, last=last):
                self.evaluate(step)
            saves = last or bool(config.save_steps and step % config.save_steps == 0)
            if saves or (stopping and config.save_on_interrupt):
                self.save()
            if last:
                return
            if stopping:
                self._settle_save(wait=True)
                raise RunInterrupted(f"stopped by a signal after step {step}: go on with --resume auto")

    def _evaluates_after(self, step: int, *, last: bool) -> bool:
        """An evaluation belongs there and is not made; equal on every rank."""
        every = self.config.eval_steps
        due = step == 0 or last or bool(every and step % every == 0)
        return due and step not in self.evaluations

    def step(self) -> dict[str, float]:
        """One round: rollout, roles, update, sync; its metrics, equal on all ranks. Collective over the world."""
        step = self.finished_steps + 1
        self.memory.begin(step)
        self._clock.restart()
        lag = self.runtime.weight_lag
        self._settle_save()
        experiences, facts = self.rollouts.collect(step, self._clock)
        facts |= self.maker.learnable(experiences, self._roles(), self._clock)
        with self._clock("update"):
            warming = step <= self.config.critic_warmup_steps
            update = self.update(self.actor, experiences, critic=self.critic, critic_only=warming)
        with self._clock("sync"):
            report = self.runtime.update_engine_weights(self.actor)
        with self._clock(RECORD):
            self.keep_rollouts(step, experiences)
            self.finished_steps = step
            # Inside the phase: the reduction waits for the slowest rank.
            metrics = self.data.reduce_metrics({**self._counted(experiences), **facts, **update})
        if lag is not None:
            metrics["rollout/weight_lag"] = float(lag)
        metrics["sync/version"] = float(report.version)
        metrics["sync/gigabytes_per_second"] = report.gigabytes_per_second
        self._follow(metrics)
        self._report(step, metrics)
        if GAP in metrics and metrics[TRAINED]:
            self.config.gap_limit().check(metrics[GAP])
        return metrics

    def _counted(self, experiences: Sequence[Experience]) -> dict[str, Any]:
        """What this rank's rollouts add to the metrics of the step."""
        counts = {f"rollout/counts/{name}": count for name, count in self.maker.take_reward_counts().items()}
        return {
            **rollout_metrics(experiences, self.sampling.n),
            **counts,
            "rollout/responses": Sum(float(len(experiences))),
            TOKENS: Sum(float(sum(e.length for e in experiences))),
            TRAINED: Sum(float(sum(int(e.response_mask.sum()) for e in experiences))),
        }

    def _roles(self) -> Roles:
        critic = None if self.critic is None else self.critic.module
        return Roles(actor=self.actor.module, reference=self.reference, critic=critic, teacher=self.teacher)

    def _follow(self, metrics: dict[str, float]) -> None:
        """Numbers that are made of reduced ones, so that every rank has the same."""
        observed = metrics.get("rollout/kl" if self.config.kl_in_reward else "train/kl")
        # Without a trained token nothing was observed, and the mean is not a number.
        if observed is not None and metrics[TRAINED]:
            self.kl.update(observed, int(metrics["rollout/responses"]))
        if GAP in metrics:
            metrics["train/gap/effective_sample_size"] = effective_sample_size(
                metrics["train/gap/weight"], metrics["train/gap/weight_square"]
            )

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        seconds = self._clock.seconds()
        metrics.update({f"perf/seconds_{name}": value for name, value in seconds.items()})
        metrics.update(self.memory.metrics(step))
        metrics["perf/border_share"] = self._clock.border_seconds / seconds["step"]
        metrics.update(self.rates.of(metrics, seconds))
        self.logger.log(step, metrics)
        self.guard.note("step", seconds["step"])
        self.progress.step_line(step, metrics, total_steps=self.config.max_steps)

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate and log; empty without an evaluation set. Collective over the world."""
        if self.evaluator is None:
            return {}
        start = time.perf_counter()
        with self._average_in_engine(), self._clock("evaluate"):
            metrics = self.evaluator.evaluate(step)
        self.evaluations[step] = metrics
        taken = time.perf_counter() - start
        self.guard.note("evaluation", taken)
        self.logger.log(step, {**metrics, "perf/seconds_evaluate": taken})
        shown = "  ".join(
            f"{name.removeprefix('eval/')} {value:.3f}"
            for name, value in sorted(metrics.items())
            if "/counts/" not in name and not name.endswith(("_low", "_high"))
        )
        self.progress.line(f"evaluation after step {step}: {shown}")
        return metrics

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The moving average stands in the actor inside, for what is evaluated or exported; nothing without one."""
        with nullcontext() if self.average is None else self.average.applied():
            yield

    @contextmanager
    def _average_in_engine(self) -> Iterator[None]:
        """The engine has the moving average inside, and the actor's weights afterwards, both under its present version.

        The actor has its own weights throughout, so it may leave the device. Nothing without an average. Collective
        over the world.
        """
        if self.average is None:
            yield
            return
        with self._clock("sync"), self.averaged():
            self._resend()
        yield
        with self._clock("sync"):
            self._resend()

    def _resend(self) -> None:
        """What stands in the actor to the engine, under the engine's present version. Collective over the world."""
        self.runtime.resume(self.runtime.weights_version)
        self.runtime.update_engine_weights(self.actor)

    def save(self) -> None:
        """Write a checkpoint, or begin to where that is done in the background. Collective over the world.

        Raises:
            CheckpointError: it cannot be written and `on_save_error` is "stop".
        """
        state = TrainerState(
            step=self.finished_steps,
            weights_version=self.runtime.weights_version,
            world_size=self.data.size,
            strategy=self.backend.name,
            sampler=self.rollouts.state_dict(),
            update={"buffer": self.update.state_dict(), "kl": self.kl.state_dict(), "credit": self.maker.state_dict()},
            settings=self.settings,
            evaluations=self.evaluations,
        )
        self._settle_save(wait=True)
        with self._clock("checkpoint"), self._save_errors():
            self.checkpoints.begin(state, self._save_models)
        if not self.config.save_in_background:
            self._settle_save(wait=True)

    def _settle_save(self, *, wait: bool = False) -> None:
        """Complete a checkpoint that was begun, if its shards are written. Collective over the world."""
        # Not even the phase begins without one: it would bring models back beside an engine that is awake.
        if not self.checkpoints.is_writing:
            return
        with self._clock("checkpoint"), self._save_errors():
            folder = self.checkpoints.finish() if wait else self.checkpoints.poll()
            if folder is not None:
                self.progress.line(f"checkpoint {folder}")

    def _settle_after(self, error: Exception) -> None:
        """Complete a checkpoint in the background before `error` leaves, which says so. No communication.

        Other ranks may not have failed, and answer no collective.
        """
        try:
            folder = self.checkpoints.finish_alone()
        except CheckpointError as failure:
            note = f"a checkpoint that was being written is not complete: {failure}"
        else:
            note = "" if folder is None else f"checkpoint {folder}"
        if note:
            error.add_note(note)
            self.progress.line(note)

    @contextmanager
    def _save_errors(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            if self.config.on_save_error == "stop":
                raise
            self.progress.line(f"training goes on without a checkpoint: {error}")

    def _save_models(self, folder: Path) -> list[Future[Any]]:
        writes = [self._save_model(self.actor, folder)]
        if self.critic is not None:
            writes.append(self._save_model(self.critic, folder / CRITIC_FOLDER))
        if self.average is not None:
            self.average.save(folder, self.data.rank)
        self.rollouts.save_held(folder, self.data.rank)
        return [write for write in writes if write is not None]

    def _save_model(self, state: TrainState, folder: Path) -> Future[Any] | None:
        """Write one model; a rank that cannot stops all of them before the next model's collectives."""
        write: Future[Any] | None = None
        error: BaseException | None = None
        try:
            write = self.backend.save(state, folder, background=self.config.save_in_background)
        except Exception as failure:  # noqa: BLE001 - raised on all ranks below
            error = failure
        self.data.together(error)
        return write

    def resume(self, state: TrainerState) -> None:
        """Continue after the step that `state` was saved at; before the first step it holds weights alone."""
        self.finished_steps = state.step
        self.memory.begin(state.step)
        self.evaluations = dict(state.evaluations)
        self.runtime.resume(state.weights_version)
        if state.step == 0:
            return
        self.update.load_state_dict(state.update["buffer"])
        self.kl.load_state_dict(state.update["kl"])
        self.maker.load_state_dict(state.update["credit"])
        self.rollouts.load_state_dict(state.sampler)
