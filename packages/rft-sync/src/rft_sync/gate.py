"""The state of an engine object around an update: asleep, closed, its own update session."""

from typing import Any

from rft_sync.errors import EngineNotReady


class EngineGate:
    """Asks an engine object whether it may be written, wakes it where the caller wants that, and tells it the outcome.

    Works on any object by the names `state`, `weights_defined`, `wake_up`, `begin_weight_update`, `use_adapter`,
    `finish_weight_update`, `cancel_weight_update` and `abort_weight_update`; what it lacks is left out.

    Args:
        engine: An object with `.native`, or a raw engine.
        receiver: Its receiver; `asleep()` and `wake()` are used where it has them.
        wake: Wake a sleeping engine's weights; otherwise a sleeping engine is refused.
    """

    def __init__(self, engine: Any, receiver: Any, *, wake: bool) -> None:
        self._engine = engine
        self._receiver = receiver
        self._wake = wake
        self._opened = False

    @property
    def _state(self) -> str:
        return str(getattr(self._engine, "state", ""))

    @property
    def weights_undefined(self) -> bool:
        """Whether the engine says that its weights are; one that sleeps says so by `weights_defined` only."""
        return self._state == "weights_undefined" or not getattr(self._engine, "weights_defined", True)

    def prepare(self, kind: str) -> None:
        """Wake the engine or refuse, and open its update session unless the caller has done so.

        Raises:
            EngineNotReady: Closed, or asleep without leave to wake it.
        """
        if self._state == "closed":
            raise EngineNotReady("the engine is closed; create a new one and connect again")
        # Inside a session of the caller's, the weights below may have come in it already.
        if self._state != "updating" and self.weights_undefined and kind != "full":
            raise EngineNotReady("the engine's base weights are undefined; send the full weights before an adapter")
        if self._state == "asleep":
            self._require_wake()
            self._engine.wake_up(["weights"])
        elif self._receiver_asleep():
            self._require_wake()
            self._receiver.wake()
        if hasattr(self._engine, "begin_weight_update") and self._state != "updating":
            self._engine.begin_weight_update()
            self._opened = True

    def _receiver_asleep(self) -> bool:
        asleep = getattr(self._receiver, "asleep", None)
        return bool(asleep()) if asleep is not None else False

    def _require_wake(self) -> None:
        if not self._wake:
            raise EngineNotReady('the engine is asleep; wake its weights first, or set on_asleep="wake"')

    def finish(self, version: int) -> None:
        """Close the session that `prepare` opened; the engine learns which adapter to generate with."""
        if self._opened:
            self._opened = False
            if hasattr(self._engine, "use_adapter"):
                self._engine.use_adapter(getattr(self._receiver, "adapter", None))
            self._engine.finish_weight_update(version)

    def cancel(self, reason: str) -> None:
        """Close the session that `prepare` opened; nothing was written, so the weights are what they were before.

        An engine without `cancel_weight_update` can only be told that the update failed.
        """
        if self._opened and hasattr(self._engine, "cancel_weight_update"):
            self._opened = False
            self._engine.cancel_weight_update()
        else:
            self.abort(reason)

    def abort(self, reason: str) -> None:
        """Close the session that `prepare` opened; the weights are undefined."""
        if self._opened:
            self._opened = False
            self._engine.abort_weight_update(reason)
