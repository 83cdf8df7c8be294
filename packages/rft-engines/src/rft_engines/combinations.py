"""Which training backend, weights, engine and modality go together: read by the start-up check and by the docs."""

import logging
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from rft_engines.errors import UnsupportedCombinationError

logger = logging.getLogger(__name__)

BACKENDS = ("fsdp", "deepspeed")
WEIGHTS_SENT = ("full", "lora_merged", "lora_adapter")
ENGINES = ("hf", "vllm", "sglang")
MODALITIES = ("text", "vision")
NO_SGLANG_ADAPTER = "this engine generates with whole weights only: send lora_merged"


class Evidence(StrEnum):
    """What the project's tests ran for a row."""

    REAL = "the engine itself"
    """Generation, and updates of this kind, with the engine's own release."""
    NOTHING = "nothing"
    """The parts were tested in other rows."""


@dataclass(frozen=True)
class Combination:
    """One row of the table; `refusal` is "" when it is supported.

    Attributes:
        backend: how the actor is trained.
        weights: what a weight update sends: all weights, all weights with adapters merged in, or the adapter alone.
        engine: what generates.
        modality: what a prompt holds.
        refusal: why not, and what to take instead.
        tested: with what the tests ran it.
    """

    backend: str
    weights: str
    engine: str
    modality: str
    refusal: str = ""
    tested: Evidence = Evidence.NOTHING

    @property
    def supported(self) -> bool:
        """Whether the combination works."""
        return not self.refusal


def _refusal(backend: str, weights: str, engine: str, modality: str) -> str:
    if engine == "sglang" and weights == "lora_adapter":
        return NO_SGLANG_ADAPTER
    return ""


def _tested(weights: str, modality: str) -> Evidence:
    """Full and merged weights come as the same tensors under the same names, whichever backend trains them."""
    return Evidence.NOTHING if (weights, modality) == ("lora_adapter", "vision") else Evidence.REAL


def _row(backend: str, weights: str, engine: str, modality: str) -> Combination:
    refusal = _refusal(backend, weights, engine, modality)
    tested = Evidence.NOTHING if refusal else _tested(weights, modality)
    return Combination(backend, weights, engine, modality, refusal, tested)


COMBINATIONS: tuple[Combination, ...] = tuple(
    _row(*key) for key in product(BACKENDS, WEIGHTS_SENT, ENGINES, MODALITIES)
)


def check_combination(*, backend: str, weights: str, engine: str, modality: str) -> None:
    """The start-up check. A combination that the tests did not run with the engine itself is logged as a warning.

    Raises:
        ValueError: a name the table does not know.
        UnsupportedCombinationError: the table refuses the combination.
    """
    given = (backend, weights, engine, modality)
    for name, value, known in zip(
        ("backend", "weights", "engine", "modality"), given, (BACKENDS, WEIGHTS_SENT, ENGINES, MODALITIES), strict=True
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown: give one of {list(known)}")
    row = next(row for row in COMBINATIONS if (row.backend, row.weights, row.engine, row.modality) == given)
    if row.refusal:
        raise UnsupportedCombinationError(
            f"engine {engine!r} with weights {weights!r} ({backend}, {modality}): {row.refusal}"
        )
    if row.tested is not Evidence.REAL:
        logger.warning(
            "engine %r with weights %r (%s, %s) was tested with %s: compare its log-probabilities with the actor's",
            engine, weights, backend, modality, row.tested,
        )  # fmt: skip


def combinations_table() -> str:
    """The table as Markdown, the text of the page docs/engines/combinations.md."""
    lines = ["| backend | weights sent | engine | modality | supported | tested with |", "|---|---|---|---|---|---|"]
    for row in COMBINATIONS:
        verdict = "yes" if row.supported else f"no: {row.refusal}"
        evidence = row.tested if row.supported else ""
        cells = (row.backend, row.weights, row.engine, row.modality, verdict, evidence)
        lines.append(" ".join(f"| {cell}" for cell in cells) + " |")
    return "\n".join(lines) + "\n"
