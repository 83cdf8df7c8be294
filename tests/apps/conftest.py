"""Make the modules of apps/gsm8k importable as they are under `torchrun apps/gsm8k`: the folder leads sys.path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "apps" / "gsm8k"))
