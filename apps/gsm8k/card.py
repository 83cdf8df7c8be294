"""Make the card of a set of runs: python apps/gsm8k/card.py RUNS --section NAME [--title TITLE] [--page RESULTS.md]

RUNS holds seed_1, seed_2, ...; each is the folder of a run, or holds those of `reinforcement`, `control` and `base`
(`base` may also stand beside the seeds). What is not there stands in the card as not run. Settings and curves go to a
folder of the section's name beside the page. `--seconds_of RUN` prints the seconds of a run's reinforcement instead,
which are the control's `--warm_start_seconds`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gsm8k_app.result_card import card, keep_files, read_seeds, replace_section
from gsm8k_app.run_records import reinforcement_seconds

from rft_trainer.errors import ConfigurationError

PAGE = Path(__file__).parent / "RESULTS.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the card; 0, or 2 with one line that says what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", help="folder with seed_N below it")
    parser.add_argument("--section", help="name of the card's section and of the folder of its files")
    parser.add_argument("--title", help="heading of the card (default: the section)")
    parser.add_argument("--page", type=Path, default=PAGE, help="Markdown page that holds the card")
    parser.add_argument("--seconds_of", type=Path, help="print the seconds of this run's reinforcement and end")
    options = parser.parse_args(argv)
    try:
        if options.seconds_of is not None:
            print(f"{reinforcement_seconds(options.seconds_of):.1f}")
            return 0
        if options.runs is None or options.section is None:
            parser.error("give RUNS and --section, or --seconds_of")
        write_card(options.runs, options.page, options.section, options.title or options.section)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.page}: section {options.section}")
    return 0


def write_card(runs: Path, page: Path, section: str, title: str) -> None:
    """Put the card of `runs` into `page`, over an earlier one of the section."""
    seeds = read_seeds(runs)
    text = card(seeds, title=title)
    files = keep_files(seeds, page.parent / section)
    before = page.read_text(encoding="utf-8") if page.is_file() else ""
    page.write_text(replace_section(before, section, "\n".join([text.rstrip(), *files])), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
