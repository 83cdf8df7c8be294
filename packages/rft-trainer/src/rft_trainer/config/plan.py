"""Planning a run without running it."""

from dataclasses import dataclass

from rft_trainer.config.ranges import below


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Planning a run without running it."""

    dry_run: bool = False
    """Check the settings, print what each phase will hold and whether it fits, and end; reads config.json only."""
    plan_ranks: int | None = None
    """Ranks to plan for; none: those of the launcher."""
    plan_ranks_per_node: int = 8
    """Ranks of one node in a plan."""
    plan_device_gib: float | None = None
    """Memory of one device in a plan, in GiB; none: this machine's, or 80 without one."""

    def _plan_problems(self) -> list[str]:
        return below(self, 1, "plan_ranks", "plan_ranks_per_node", "plan_device_gib")
