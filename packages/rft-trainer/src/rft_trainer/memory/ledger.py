"""What was on the device at the end of each phase, by owner, beside what was expected."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rft_trainer.memory.plan import Placement, PlacementPlan

logger = logging.getLogger("rft_trainer.memory")
MIB = 1 << 20
SLACK = "allocator slack"
OTHER = "other device memory"


@dataclass(frozen=True)
class LedgerEntry:
    """One phase that ended.

    measured: owner -> bytes of its live storages; on a GPU also the slack of torch's common pool, and what is in use on
        the device beside that pool (engines, CUDA graphs, contexts).
    expected: owner -> bytes by the forecast; empty without one.
    peak: most bytes that were allocated in torch's common pool during the phase, if private pools did not change in it;
        on a CPU the sum of what was measured.
    """

    step: int
    phase: str
    measured: Mapping[str, int]
    expected: Mapping[str, int]
    peak: int

    def line(self) -> str:
        """One line for a log, in MiB."""
        parts = ", ".join(
            f"{owner} {size / MIB:.1f}" + (f" ({self.expected[owner] / MIB:.1f})" if owner in self.expected else "")
            for owner, size in self.measured.items()
        )
        return f"step {self.step} {self.phase}: peak {self.peak / MIB:.1f} MiB; measured (expected) {parts}"


def common_pool(segments: Iterable[Mapping[str, Any]], device: int) -> tuple[int, int]:
    """Bytes reserved and bytes allocated in torch's common pool on one device.

    Private pools are left out: an engine that sleeps keeps its pool's addresses without memory behind them, and torch
    goes on counting them; what an engine or a CUDA graph really holds is seen from the device's side.

    Args:
        segments: of `torch.cuda.memory_snapshot()`.
        device: index.
    """
    common = [s for s in segments if s["device"] == device and tuple(s.get("segment_pool_id", (0, 0))) == (0, 0)]
    return sum(s["total_size"] for s in common), sum(s["allocated_size"] for s in common)


def unowned(in_use: int, reserved: int, allocated: int, *, in_pools: int, engine: int) -> dict[str, int]:
    """What no owner holds, by name, in bytes.

    Args:
        in_use: on the device, by whomever.
        reserved: in torch's common pool.
        allocated: of that.
        in_pools: allocated in private pools, as torch counts.
        engine: what the rollout engine holds by its own word; as far as it lies in private pools, it is seen from the
            device's side only.
    """
    return {SLACK: reserved - allocated, OTHER: in_use - reserved - min(engine, in_pools)}


class MemoryLedger:
    """Keeps an entry for each phase that ends.

    Args:
        owners: owner -> bytes on the device now.
        plan: tells which owners should be away.
        expected: phase -> owner -> bytes.
        device: of this rank.
        file: JSONL file of this rank; None keeps none.
        residue_limit_bytes: growth after sleep that is worth a warning.
        engine: the rollout engine's bytes by owner.
    """

    def __init__(
        self,
        owners: Mapping[str, Callable[[], int]],
        plan: PlacementPlan,
        expected: Mapping[str, Mapping[str, int]],
        device: torch.device,
        *,
        file: Path | None = None,
        residue_limit_bytes: int = 64 * MIB,
        engine: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._owners = dict(owners)
        self._engine = engine
        self._plan = plan
        self._expected = expected
        self._device = device
        self._file = file
        self._limit = residue_limit_bytes
        self._residues: list[int] = []
        self._last: dict[str, LedgerEntry] = {}
        self._peaks: dict[str, int] = {}
        self.warnings: list[str] = []
        self.step = 0

    def begin(self) -> None:
        """A phase begins: peaks count from here."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def end(self, phase: str) -> LedgerEntry:
        """Measure, write down, and warn of owners that the plan says are away."""
        measured = {owner: measure() for owner, measure in self._owners.items()}
        inside = dict(self._engine())
        measured |= inside
        for owner, size in measured.items():
            if size and self._plan.placement(owner, phase) is Placement.HOST:
                self._warn(f"{owner} holds {size / MIB:.1f} MiB at the end of {phase}: the plan has it on the host")
        peak = sum(measured.values())
        if self._device.type == "cuda":
            segments: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            reserved, allocated = common_pool(segments, self._device.index or 0)
            free, total = torch.cuda.mem_get_info(self._device)
            in_pools = torch.cuda.memory_allocated(self._device) - allocated
            measured |= unowned(total - free, reserved, allocated, in_pools=in_pools, engine=sum(inside.values()))
            peak = torch.cuda.max_memory_allocated(self._device) - in_pools
        entry = LedgerEntry(self.step, phase, measured, dict(self._expected.get(phase, {})), peak)
        self._last[phase] = entry
        self._peaks[phase] = max(peak, self._peaks.get(phase, 0))
        logger.info("%s", entry.line())
        self._write(entry)
        return entry

    def slept(self) -> None:
        """The engine has just gone to sleep: what is left should not grow.

        The first two sleeps are left out; engines allocate workspaces in them that stay.
        """
        residue = sum(measure() for measure in self._owners.values())
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            residue = total - free
        self._residues.append(residue)
        growth = residue - self._residues[min(1, len(self._residues) - 1)]
        if growth > self._limit:
            self._warn(
                f"memory in use after sleep grew by {growth / MIB:.1f} MiB since the second sleep "
                f"(limit {self._limit / MIB:.0f} MiB): {residue / MIB:.1f} MiB after sleep {len(self._residues)}"
            )

    def table(self) -> str:
        """Phases down; largest peak, then the owners as they were when the phase last ended. In MiB."""
        owners = list(dict.fromkeys(owner for entry in self._last.values() for owner in entry.measured))
        head = ["phase", "peak", *owners]
        rows = [
            [phase, *(f"{size / MIB:.1f}" for size in (self._peaks[phase], *(e.measured.get(o, 0) for o in owners)))]
            for phase, e in self._last.items()
        ]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
        return "\n".join(["memory of this rank, MiB", *lines])

    def metrics(self) -> dict[str, float]:
        """Largest peak and largest sum of owners so far, in GiB."""
        if not self._last:
            return {}
        return {
            "memory/peak_gib": max(self._peaks.values()) / 2**30,
            "memory/owners_gib": max(sum(entry.measured.values()) for entry in self._last.values()) / 2**30,
        }

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        logger.warning("%s", text)

    def _write(self, entry: LedgerEntry) -> None:
        if self._file is None:
            return
        row = {
            "step": entry.step,
            "phase": entry.phase,
            "peak": entry.peak,
            "measured": dict(entry.measured),
            "expected": dict(entry.expected),
        }
        with self._file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
