"""Files that survive a power cut: contents and folder entries are on the disk before a name is relied on."""

import hashlib
import os
from pathlib import Path


def sha256(file: Path) -> str:
    """Hash of a file's bytes, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync_file(path: Path) -> None:
    """Wait until the bytes of a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(file: Path, text: str) -> None:
    """Replace a file so that a reader sees the old or the new content, also after a power cut."""
    temporary = file.with_name(f".{file.name}.new")
    temporary.write_text(text, encoding="utf-8")
    sync_file(temporary)
    temporary.replace(file)
    sync_file(file.parent)
