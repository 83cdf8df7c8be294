"""Configurations from files: TOML by hand, or the config.json of a run; what is wrong is named with its remedy."""

import json
import tomllib
import types
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rft_trainer.config.run_config import RFTConfig
from rft_trainer.errors import ConfigurationError


def setting_groups() -> dict[str, type]:
    """The groups of settings by name, in the order in which RFTConfig lists them."""
    return {group.__name__.removesuffix("Options").lower(): group for group in RFTConfig.__bases__}


def load_settings(path: Path) -> dict[str, Any]:
    """The settings of a `.toml` or `.json` file, checked one by one; those that are not there are not in the result.

    In TOML a setting stands at the top or in a table named after its group.

    Raises:
        ConfigurationError: the file cannot be read, or has keys or values that no setting has; one line for each.
    """
    if not path.is_file():
        raise ConfigurationError(f"config is {path}: no such file; give a .toml file, or the config.json of a run")
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"config is {path}: it cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"config is {path}: it holds {type(content).__name__}, expected names and values")
    return _checked(_flat(content, path), path)


def load_config(path: Path) -> RFTConfig:
    """The configuration of a file; settings that it leaves out have the library's defaults.

    Raises:
        ConfigurationError: as `load_settings`, or values that cannot work.
    """
    return RFTConfig(**load_settings(path))


def _flat(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Settings without their tables."""
    groups = setting_groups()
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if not isinstance(value, dict):
            flat[key] = value
            continue
        if key not in groups:
            raise ConfigurationError(f"{path}: table [{key}] is no group of settings; {_nearest(key, groups)}")
        flat.update(value)
    return flat


def _checked(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    hints = get_type_hints(RFTConfig)
    known = [item.name for item in fields(RFTConfig)]
    problems, checked = [], {}
    for name, value in values.items():
        if name not in known:
            problems.append(f"{path}: {name!r} is no setting; {_nearest(name, known)}")
            continue
        try:
            checked[name] = converted(value, hints[name])
        except TypeError:
            problems.append(f"{path}: {name} is {value!r}: expected {_spelled(hints[name])}")
    if problems:
        raise ConfigurationError("\n".join(problems))
    return checked


def converted(value: Any, hint: Any) -> Any:
    """`value` of a TOML or JSON file as the type `hint`; TypeError when it is none."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for choice in arguments:
            try:
                return converted(value, choice)
            except TypeError:
                continue
        raise TypeError
    if origin is Literal:
        # 1 and True are equal; a choice is one of its own type.
        if not any(value == choice and type(value) is type(choice) for choice in arguments):
            raise TypeError
        return value
    if origin is tuple:
        return _converted_tuple(value, arguments)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise TypeError
    return value


def _converted_tuple(value: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TypeError
    kinds = [arguments[0]] * len(value) if arguments[1:] == (...,) else list(arguments)
    if len(kinds) != len(value):
        raise TypeError
    return tuple(converted(item, kind) for item, kind in zip(value, kinds, strict=True))


def _nearest(name: str, known: Any) -> str:
    close = get_close_matches(name, list(known), 1)
    return f"did you mean {close[0]}?" if close else "--help_all lists all of them"


def _spelled(hint: Any) -> str:
    """A type as a person would name it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_spelled(choice) for choice in arguments)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin is tuple:
        return f"a list of {_spelled(arguments[0])}"
    names = {str: "text", Path: "a path", bool: "true or false", int: "a whole number", float: "a number"}
    return names.get(hint, "nothing" if hint is type(None) else str(hint))
