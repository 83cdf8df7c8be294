"""Generation with weights whose version is known: engine life cycle, weight sync and the lag between them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rft_dist import RolloutGroups
from rft_engines import (
    EngineState,
    Fate,
    Generation,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
    gather_and_generate,
)
from rft_sync import AdapterBroadcastManager, BroadcastConfig, BroadcastManager, SyncReport
from rft_trainer.errors import StaleWeightsError
from rft_trainer.strategy.protocols import TrainState


class EngineRuntime:
    """RolloutRuntime over one engine.

    The trainer reports each finished optimiser step with `note_update`; an engine whose weights are more than
    `max_lag` such steps old refuses to generate. With `share_weights` the actor trains in the engine's memory after the
    first update (`rft_sync.BroadcastConfig`). With `adapter_only` the engine keeps the weights below a LoRA actor's
    adapter, and an update sends the adapter (`rft_sync.AdapterBroadcastManager`).
    """

    def __init__(
        self,
        engine: RolloutEngine,
        groups: RolloutGroups,
        *,
        enable_sleep: bool = False,
        max_lag: int = 0,
        share_weights: bool = False,
        adapter_only: bool = False,
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._enable_sleep = enable_sleep
        self._max_lag = max_lag
        self._config = BroadcastConfig(on_asleep="wake", share_weights=share_weights)
        self._connect = (AdapterBroadcastManager if adapter_only else BroadcastManager).connect
        self._manager: BroadcastManager | None = None
        self._updates = 0
        self._synced_at: int | None = None
        self._resumed_version: int | None = None
        self._dropped = False

    @property
    def engine(self) -> RolloutEngine:
        """The engine itself."""
        return self._engine

    @property
    def weights_version(self) -> int:
        """Finished weight updates of the engine."""
        return self._engine.weights_version

    @property
    def weight_lag(self) -> int | None:
        """Optimiser steps since the last sync; None before the first one."""
        return None if self._synced_at is None else self._updates - self._synced_at

    def note_update(self) -> None:
        """The actor has taken one optimiser step."""
        self._updates += 1

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        """Generations in the order of the requests, n for each. Collective over the rollout TP group.

        Raises:
            StaleWeightsError: no sync yet, or the engine is older than the configured lag allows.
        """
        lag = self.weight_lag
        if lag is None or lag > self._max_lag:
            state = "was never sent" if lag is None else f"is {lag} optimiser steps older than"
            raise StaleWeightsError(
                f"the engine (weights version {self.weights_version}) {state} the actor's weights; allowed lag "
                f"{self._max_lag}: call update_engine_weights(actor) after each update, or raise max_weight_lag"
            )
        return gather_and_generate(self._engine, list(requests), sampling, self._groups)

    def update_engine_weights(self, state: TrainState) -> SyncReport:
        """Send the actor's weights, verify them and raise the engine's version. Collective over the world.

        Raises:
            WeightSyncError: on every rank; the engine then refuses to generate until an update succeeds.
        """
        state.memory.model.require("update_engine_weights")
        state.release_gathered()
        if self._manager is None:
            self._manager = self._connect(state.checkpoint_module, self._engine, self._config)
        report = self._manager.broadcast_to_engine(self._resumed_version)
        self._resumed_version = None
        self._synced_at = self._updates
        self._dropped = False
        return report

    def resume(self, version: int) -> None:
        """Give the next sync the version that the engine had when the checkpoint was written."""
        self._resumed_version = version

    def sleep(self, *, update_follows: bool) -> bool:
        """Give the engine's memory up, its weights too when a full update follows; nothing when sleep is off.

        Returns whether the engine went to sleep by this call.
        """
        if not self._enable_sleep or self._engine.state is EngineState.ASLEEP:
            return False
        level = self._engine.contract.level_for(full_update_follows=update_follows)
        self._engine.sleep(level)
        self._dropped = self._engine.contract.effect(level).weights is Fate.UNDEFINED
        return True

    def restore_weights(self, state: TrainState) -> None:
        """Send the weights again if a sleep dropped them and the actor has not moved on since the last update.

        Otherwise nothing happens: an engine that lacks weights, or has old ones, refuses to generate. Collective over
        the world where they are sent.
        """
        if not self._dropped or self.weight_lag != 0 or self._manager is None:
            return
        state.memory.model.reload()
        state.release_gathered()
        self._manager.broadcast_to_engine(self.weights_version)
        self._dropped = False

    def wake(self) -> None:
        """Make the engine ready to generate: weights first, then the KV cache. No communication."""
        self._engine.wake_up()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Engine ready to generate inside; asleep afterwards, with its weights kept, if it slept before."""
        slept = self._engine.state is EngineState.ASLEEP
        self._engine.wake_up()
        try:
            yield
        finally:
            if slept:
                self.sleep(update_follows=False)

    def close(self) -> None:
        """End the engine."""
        self._engine.close()
