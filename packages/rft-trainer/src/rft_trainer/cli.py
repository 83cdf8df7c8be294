"""Flags to configuration: every field of RFTConfig is a flag, a recipe gives the defaults."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

import tyro

from rft_trainer.config import RFTConfig
from rft_trainer.errors import ConfigurationError

Recipe = Callable[[], RFTConfig]


def parse_config(argv: Sequence[str] | None, recipes: Mapping[str, Recipe], *, description: str = "") -> RFTConfig:
    """The configuration of a run: a recipe's values, overridden by flags.

    `--recipe NAME` chooses among `recipes`; without it the library's defaults hold. Underscores and hyphens in flags
    are the same. `--help` and wrong flags end the process as command-line programs do (exit code 0 and 2).

    Raises:
        ConfigurationError: unknown recipe, or values that cannot work.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--recipe")
    chosen, flags = chooser.parse_known_args(arguments)
    if chosen.recipe is not None and chosen.recipe not in recipes:
        raise ConfigurationError(f"recipe is {chosen.recipe!r}: choose one of {', '.join(sorted(recipes))}")
    default = recipes[chosen.recipe]() if chosen.recipe is not None else RFTConfig()
    return tyro.cli(
        RFTConfig,
        args=flags,
        default=default,
        description=f"{description}\n\n--recipe NAME: {', '.join(sorted(recipes))}".strip(),
        use_underscores=True,
    )
