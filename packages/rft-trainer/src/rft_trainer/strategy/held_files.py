"""Files that are kept in memory first and written later, by a thread that talks to no other rank."""

import io
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystem


class _Stream(io.BytesIO):
    def close(self) -> None:
        """Keep the bytes: torch's writer closes its streams before they can be taken."""


class HeldFiles(FileSystem):
    """A file system for torch's checkpoint writer whose files exist in memory until `write` has written them."""

    def __init__(self) -> None:
        self._held: dict[Path, bytes] = {}

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """A stream whose bytes are kept under `path`; `mode` is "wb" here."""
        stream = _Stream()
        yield stream
        self._held[Path(path)] = stream.getvalue()

    def rename(self, path: str | PathLike[str], new_path: str | PathLike[str]) -> None:
        """Give a kept file another name."""
        self._held[Path(new_path)] = self._held.pop(Path(path))

    def exists(self, path: str | PathLike[str]) -> bool:
        """Whether a file is kept."""
        return Path(path) in self._held

    def rm_file(self, path: str | PathLike[str]) -> None:
        """Forget a kept file."""
        del self._held[Path(path)]

    def write(self) -> Future[None]:
        """Start writing the kept files; the future is done when all are written, or raises what went wrong."""
        held, self._held = self._held, {}
        writer = ThreadPoolExecutor(1, "checkpoint")
        future = writer.submit(_write_all, held)
        writer.shutdown(wait=False)
        return future


def _write_all(held: dict[Path, bytes]) -> None:
    while held:  # each file's memory is free as soon as it is written
        path, content = held.popitem()
        path.write_bytes(content)
