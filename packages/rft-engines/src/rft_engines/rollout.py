"""Generation by the ranks of one engine together."""

from collections.abc import Sequence

from rft_dist import RolloutGroups, gather_inputs, raise_together, slice_local
from rft_engines.generation import Generation, GenerationRequest
from rft_engines.protocol import RolloutEngine
from rft_engines.sampling import SamplingParams


def gather_and_generate(
    engine: RolloutEngine,
    requests: Sequence[GenerationRequest],
    sampling: SamplingParams,
    groups: RolloutGroups | None = None,
    *,
    max_steps: int | None = None,
) -> list[Generation]:
    """This rank's samples, generated together with the other ranks of its TP group. Collective over `groups.tp_cpu`.

    The ranks of a TP group hold one engine, which must see the same requests on each of them. So the requests are
    gathered (each travels once, whatever n is), all ranks generate all of them, and each takes its own samples back,
    in the order A0 A1 B0 B1. Ranks may bring different numbers of requests, none too. Without groups, or with a TP
    group of one, nothing is sent.

    Raises:
        ValueError: the ranks of the group disagree about `sampling` or `max_steps`; on all of them.
        EngineError: what the engine raised on one rank, on all of them.
    """
    if groups is None or groups.layout.engine_tp_size == 1:
        return engine.generate(requests, sampling, max_steps=max_steps)
    group = groups.tp_cpu
    everywhere, _ = gather_inputs([(sampling, max_steps)], group)
    # Every rank sees the same list here, so every rank raises or none does.
    if any(other != everywhere[0] for other in everywhere):
        raise ValueError(f"the ranks of one engine ask for different sampling {everywhere}: give all of them the same")
    gathered, plan = gather_inputs(requests, group)
    samples: list[Generation] = []
    error: Exception | None = None
    try:
        samples = engine.generate(gathered, sampling, max_steps=max_steps)
    except Exception as failure:  # noqa: BLE001 - raised on all ranks below
        error = failure
    raise_together(error, group)
    return slice_local(samples, plan, samples_per_input=sampling.n)
