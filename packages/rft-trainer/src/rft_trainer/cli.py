"""Flags and files to configuration: every field of RFTConfig is a flag; a recipe and a file give the defaults."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from rft_trainer.config import RFTConfig
from rft_trainer.config.reading import load_settings, setting_groups
from rft_trainer.errors import ConfigurationError

Recipe = Callable[[], RFTConfig]


def parse_config(argv: Sequence[str] | None, recipes: Mapping[str, Recipe], *, description: str = "") -> RFTConfig:
    """The configuration of a run: a recipe's values, overridden by those of a file, overridden by flags.

    `--recipe NAME` chooses among `recipes`; without it the library's defaults hold. `--config FILE` is a `.toml` file
    of settings or the config.json of an earlier run. Underscores and hyphens in flags are the same. `--help` and wrong
    flags end the process as command-line programs do (exit code 0 and 2).

    Raises:
        ConfigurationError: unknown recipe, a file with unknown settings, or values that cannot work.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--recipe")
    chooser.add_argument("--config", type=Path)
    chosen, flags = chooser.parse_known_args(arguments)
    if chosen.recipe is not None and chosen.recipe not in recipes:
        raise ConfigurationError(f"recipe is {chosen.recipe!r}: choose one of {', '.join(sorted(recipes))}")
    default = recipes[chosen.recipe]() if chosen.recipe is not None else RFTConfig()
    if chosen.config is not None:
        default = replace(default, **load_settings(chosen.config))
    return _parse_flags(flags, default, f"{description}\n\n{_starting_points(recipes)}".strip())


def _starting_points(recipes: Mapping[str, Recipe]) -> str:
    lines = ["--config FILE: settings in TOML, or the config.json of a run; flags win"]
    if recipes:
        lines.insert(0, f"--recipe NAME: {', '.join(sorted(recipes))}")
    return "\n".join(lines)


def _parse_flags(flags: Sequence[str], default: RFTConfig, description: str) -> RFTConfig:
    """tyro sees one nested group for each group of settings, which is how `--help` shows them."""
    groups = setting_groups()
    chosen: Any = {
        name: group(**{item.name: getattr(default, item.name) for item in fields(group)})
        for name, group in groups.items()
    }
    grouped: Any = make_dataclass("Settings", list(groups.items()), frozen=True, kw_only=True)
    parsed = tyro.cli(
        grouped,
        config=(tyro.conf.OmitArgPrefixes,),
        args=flags,
        default=grouped(**chosen),
        description=description,
        use_underscores=True,
    )
    values = {item.name: getattr(getattr(parsed, name), item.name) for name in groups for item in fields(groups[name])}
    return RFTConfig(**values)
