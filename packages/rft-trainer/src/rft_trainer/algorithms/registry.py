"""Entries that are found by name."""

from __future__ import annotations

from typing import ClassVar, Self

from rft_trainer.errors import ConfigurationError


class Registered:
    """Base of a kind of entry: the subclass names the kind and holds its own table."""

    name: str
    kind: ClassVar[str]
    """What an entry is called in messages."""
    _registry: ClassVar[dict[str, Registered]]

    @classmethod
    def register(cls, entry: Self) -> Self:
        """Add an entry; a name that is taken is a ConfigurationError."""
        if entry.name in cls._registry:
            raise ConfigurationError(f"{cls.kind} {entry.name!r} is already registered; choose another name")
        cls._registry[entry.name] = entry
        return entry

    @classmethod
    def names(cls) -> list[str]:
        """All names, sorted."""
        return sorted(cls._registry)

    @classmethod
    def get(cls, name: str) -> Self:
        """The entry called `name`; ConfigurationError listing the names when there is none."""
        entry = cls._registry.get(name)
        if not isinstance(entry, cls):
            raise ConfigurationError(f"{cls.kind} {name!r} is not known; choose one of {', '.join(cls.names())}")
        return entry
