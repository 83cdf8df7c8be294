"""Which training backend, weights, engine and modality go together: read by the start-up check and by the docs."""

from dataclasses import dataclass
from itertools import product

from rft_engines.errors import UnsupportedCombinationError

BACKENDS = ("fsdp", "deepspeed")
WEIGHTS_SENT = ("full", "lora_merged", "lora_adapter")
ENGINES = ("hf", "vllm", "sglang")
MODALITIES = ("text", "vision")
NO_SGLANG_ADAPTER = "this engine generates with whole weights only: send lora_merged"


@dataclass(frozen=True)
class Combination:
    """One row of the table; `refusal` is "" when it is supported.

    Attributes:
        backend: how the actor is trained.
        weights: what a weight update sends: all weights, all weights with adapters merged in, or the adapter alone.
        engine: what generates.
        modality: what a prompt holds.
        refusal: why not, and what to take instead.
    """

    backend: str
    weights: str
    engine: str
    modality: str
    refusal: str = ""

    @property
    def supported(self) -> bool:
        """Whether the combination works."""
        return not self.refusal


def _refusal(backend: str, weights: str, engine: str, modality: str) -> str:
    if engine == "sglang" and weights == "lora_adapter":
        return NO_SGLANG_ADAPTER
    return ""


COMBINATIONS: tuple[Combination, ...] = tuple(
    Combination(*row, refusal=_refusal(*row)) for row in product(BACKENDS, WEIGHTS_SENT, ENGINES, MODALITIES)
)


def check_combination(*, backend: str, weights: str, engine: str, modality: str) -> None:
    """The start-up check.

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
    for row in COMBINATIONS:
        if (row.backend, row.weights, row.engine, row.modality) == given and row.refusal:
            raise UnsupportedCombinationError(
                f"engine {engine!r} with weights {weights!r} ({backend}, {modality}): {row.refusal}"
            )


def combinations_table() -> str:
    """The table as Markdown, the text of the page docs/engines/combinations.md."""
    lines = ["| backend | weights sent | engine | modality | supported |", "|---|---|---|---|---|"]
    for row in COMBINATIONS:
        verdict = "yes" if row.supported else f"no: {row.refusal}"
        lines.append(f"| {row.backend} | {row.weights} | {row.engine} | {row.modality} | {verdict} |")
    return "\n".join(lines) + "\n"
