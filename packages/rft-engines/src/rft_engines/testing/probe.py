"""What the conformance checks need to know about the engine under test."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rft_engines.errors import EngineError
from rft_engines.generation import GenerationRequest
from rft_engines.protocol import EngineState, RolloutEngine
from rft_engines.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(n=2, max_new_tokens=6, ignore_eos=True)


@dataclass(frozen=True, kw_only=True)
class EngineProbe:
    """Facts about the engine under test.

    Attributes:
        prompts: at least three different prompts of different lengths that the model answers with six tokens or more.
        vocab_size: ids below this are the model's.
        load_weights: writes the weights the engine started with into `engine.native`; None leaves out the comparison
            of tokens after weights were dropped.
        reference: (prompt, tokens, temperature) -> log-probability of each token; None leaves that check out.
        tolerance: allowed difference to the reference.
        interruptible: whether the engine can be aborted in the middle of a generate call.
        step_budget: whether `max_steps` works; where it does not, it must be refused.
        truncation: whether top-k and top-p work; where they do not, they must be refused.
        seeded: whether the seeds of requests decide their tokens.
    """

    prompts: Sequence[tuple[int, ...]]
    vocab_size: int
    load_weights: Callable[[RolloutEngine], None] | None = None
    reference: Callable[[tuple[int, ...], tuple[int, ...], float], Sequence[float]] | None = None
    tolerance: float = 1e-4
    interruptible: bool = True
    step_budget: bool = True
    truncation: bool = True
    seeded: bool = True

    def __post_init__(self) -> None:
        if len({len(prompt) for prompt in self.prompts}) < 3:
            raise ValueError(f"EngineProbe.prompts has {len(self.prompts)} prompts: give three of different lengths")

    def requests(self, seed: int | None = 11) -> list[GenerationRequest]:
        """One request a prompt, with seeds from `seed` on."""
        return [
            GenerationRequest(tuple(prompt), seed=None if seed is None else seed + place, request_id=f"probe-{place}")
            for place, prompt in enumerate(self.prompts)
        ]

    def update(self, engine: RolloutEngine, version: int) -> None:
        """One finished weight update with the weights the engine started with."""
        engine.begin_weight_update()
        if self.load_weights is not None:
            self.load_weights(engine)
        engine.finish_weight_update(version)

    def make_ready(self, engine: RolloutEngine) -> None:
        """Bring any open engine into the ready state."""
        if engine.state is EngineState.UPDATING:
            engine.finish_weight_update(engine.weights_version)
        engine.wake_up()
        if engine.state is EngineState.WEIGHTS_UNDEFINED:
            self.update(engine, engine.weights_version)
        require(engine.state is EngineState.READY, f"the engine is {engine.state}, expected ready")


@dataclass(frozen=True)
class Check:
    """One promise of the contract.

    Attributes:
        name: what is promised, readable as a sentence.
        run: raises AssertionError where the promise is broken.
    """

    name: str
    run: Callable[[Any, EngineProbe], None]


def require(condition: bool, message: str) -> None:
    """Raise AssertionError with a message; unlike the statement it also works under `python -O`."""
    if not condition:
        raise AssertionError(message)


def require_equal(found: object, expected: object, what: str) -> None:
    """Raise AssertionError that names both values when they differ."""
    require(found == expected, f"{what}: found {found!r}, expected {expected!r}")


def require_refused(call: Callable[[], object], words: str, error: type[Exception] = EngineError) -> None:
    """The call raises `error` with a message that holds `words`."""
    try:
        call()
    except error as refused:
        require(words in str(refused), f"refused with {str(refused)!r}, which does not say {words!r}")
        return
    raise AssertionError(f"not refused: expected {error.__name__} saying {words!r}")
