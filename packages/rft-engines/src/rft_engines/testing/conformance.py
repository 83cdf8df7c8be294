"""Running the conformance kit."""

from collections.abc import Collection
from dataclasses import dataclass

from rft_engines.protocol import RolloutEngine
from rft_engines.testing.generation_checks import GENERATION_CHECKS
from rft_engines.testing.lifecycle_checks import CLOSING_CHECK, LIFECYCLE_CHECKS
from rft_engines.testing.probe import Check, EngineProbe

CHECKS: tuple[Check, ...] = (*GENERATION_CHECKS, *LIFECYCLE_CHECKS, CLOSING_CHECK)
"""Every check, in the order in which they run on one engine; the last one closes it."""


class ConformanceError(AssertionError):
    """Some checks failed; the message lists each with its reason."""


@dataclass(frozen=True)
class CheckOutcome:
    """One check's result: `failure` is "" when it passed."""

    name: str
    failure: str = ""


def check_engine(engine: RolloutEngine, probe: EngineProbe, *, skip: Collection[str] = ()) -> list[CheckOutcome]:
    """Run every check on one engine, which is closed afterwards. Collective over the engine's TP group.

    Args:
        engine: ready to generate.
        probe: facts about it.
        skip: names of checks to leave out; unknown names are an error.

    Raises:
        ConformanceError: at least one check failed.
    """
    unknown = sorted(set(skip) - {check.name for check in CHECKS})
    if unknown:
        raise ValueError(f"skip names {unknown} are no checks: known are {[check.name for check in CHECKS]}")
    outcomes = [_outcome(check, engine, probe) for check in CHECKS if check.name not in skip]
    failed = [f"- {outcome.name}: {outcome.failure}" for outcome in outcomes if outcome.failure]
    if failed:
        raise ConformanceError("\n".join([f"{len(failed)} of {len(outcomes)} checks failed", *failed]))
    return outcomes


def _outcome(check: Check, engine: RolloutEngine, probe: EngineProbe) -> CheckOutcome:
    try:
        probe.make_ready(engine)
        check.run(engine, probe)
    except Exception as failure:  # noqa: BLE001 - reported with the other checks
        return CheckOutcome(check.name, f"{type(failure).__name__}: {failure}")
    return CheckOutcome(check.name)
