"""What is on the device in each phase: planned, carried out, and measured."""

from rft_trainer.memory.plan import ENGINE, Placement, PlacementPlan, plan_placement
from rft_trainer.memory.stage import Stage

__all__ = ["ENGINE", "Placement", "PlacementPlan", "Stage", "plan_placement"]
