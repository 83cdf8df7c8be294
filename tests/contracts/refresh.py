"""Freeze the public names as they are now: run it when a change of the public surface is meant."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contracts.surface import FROZEN, surface_of, written

if __name__ == "__main__":
    FROZEN.write_text(written(surface_of()), encoding="utf-8")
    print(f"froze {FROZEN}; add a changelog fragment to each package that changed")
