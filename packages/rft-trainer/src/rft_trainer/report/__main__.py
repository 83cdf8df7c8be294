"""Make the report of a run: python -m rft_trainer.report RUN_DIR"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rft_trainer.errors import ConfigurationError
from rft_trainer.report.page import write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; 0, or 2 with one line that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m rft_trainer.report", description=write_report.__doc__)
    parser.add_argument("run", type=Path, help="output folder of a run, also one that is still going on")
    parser.add_argument("--max_mib", type=float, default=64.0, help="rollouts in the page, in MiB (default 64)")
    options = parser.parse_args(argv)
    try:
        report = write_report(options.run, max_mib=options.max_mib)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    more = f" ({report.left_out} more found no room)" if report.left_out else ""
    print(f"{report.page}: {report.rollouts} responses{more}, {len(report.curves)} curves")
    return 0


if __name__ == "__main__":
    sys.exit(main())
