"""Running other programs, and git in particular."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

# A source tree on the path would stand in for the distribution that is tried.
_HIDDEN = ("PYTHONPATH", "VIRTUAL_ENV")


class CommandError(RuntimeError):
    """A program failed; the message holds its command line and its output."""


def run(*command: str | Path, cwd: Path, timeout: float = 600, **environment: str) -> str:
    """Run a command and return what it printed.

    Raises:
        CommandError: it ended with another status than 0.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    if done.returncode != 0:
        raise CommandError(f"{' '.join(words)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def git(root: Path, *arguments: str) -> str:
    """Run git in `root` and return its output without the last line break."""
    return run("git", *arguments, cwd=root).rstrip("\n")
