"""For tests: an engine whose every answer is scripted, and the conformance kit for engines."""

from rft_engines.testing.conformance import CHECKS, CheckOutcome, ConformanceError, check_engine
from rft_engines.testing.probe import Check, EngineProbe
from rft_engines.testing.scripted import ScriptedEngine

__all__ = ["CHECKS", "Check", "CheckOutcome", "ConformanceError", "EngineProbe", "ScriptedEngine", "check_engine"]
