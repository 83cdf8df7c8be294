"""Flags and files to configuration: every field of RFTConfig is a flag; a recipe and a file give the defaults."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, make_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tyro

from rft_trainer.config import RFTConfig
from rft_trainer.config.help import short_help
from rft_trainer.config.reading import load_settings, setting_groups
from rft_trainer.errors import ConfigurationError

Recipe = Callable[[], RFTConfig]
_ALL = "*"


def parse_config(argv: Sequence[str] | None, recipes: Mapping[str, Recipe], *, description: str = "") -> RFTConfig:
    """The configuration of a run: a recipe's values, overridden by those of a file, overridden by flags.

    `--recipe NAME` chooses among `recipes`; without it the library's defaults hold. `--config FILE` is a `.toml` file
    of settings or the config.json of an earlier run. Underscores and hyphens in flags are the same.

    `--help` shows the groups and the flags of every day, `--help GROUP` all flags of one group, `--help_all` all flags;
    they and wrong flags end the process as command-line programs do (exit code 0 and 2).

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
    about = f"{description}\n\n{_starting_points(recipes)}".strip()
    wanted = _help_wanted(flags)
    if wanted == "":
        program = Path(sys.argv[0])
        name = program.parent.name if program.name == "__main__.py" else program.name
        print(f"usage: {name} [--FLAG VALUE ...]\n\n{about}\n{short_help(default)}")
        print("\n--help GROUP lists all flags of a group, --help_all lists all flags.")
        sys.exit(0)
    if wanted is not None:
        return _parse_flags(["--help"], default, about, () if wanted == _ALL else (wanted,))
    return _parse_flags(flags, default, about)


def _help_wanted(flags: Sequence[str]) -> str | None:
    """What `--help` asks for: "" for the short one, a group, or all; None without it.

    Raises:
        ConfigurationError: a group that does not exist.
    """
    for place, flag in enumerate(flags):
        name, _, group = flag.replace("-", "_").partition("=")
        if name == "__help_all":
            return _ALL
        if name not in ("__help", "_h"):
            continue
        behind = flags[place + 1 : place + 2]
        group = group or (behind[0] if behind and not behind[0].startswith("-") else "")
        groups = setting_groups()
        if group and group not in groups:
            close = get_close_matches(group, groups, 1)
            meant = f"did you mean {close[0]}?" if close else f"groups are {', '.join(groups)}"
            raise ConfigurationError(f"--help {group}: no group of settings has that name; {meant}")
        return group
    return None


def _starting_points(recipes: Mapping[str, Recipe]) -> str:
    lines = ["--config FILE: settings in TOML, or the config.json of a run; flags win"]
    if recipes:
        lines.insert(0, f"--recipe NAME: {', '.join(sorted(recipes))}")
    return "\n".join(lines)


def _parse_flags(flags: Sequence[str], default: RFTConfig, description: str, shown: Sequence[str] = ()) -> RFTConfig:
    """tyro sees one nested group for each group of settings, which is how help shows them; `shown` limits them."""
    groups = {name: group for name, group in setting_groups().items() if not shown or name in shown}
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
