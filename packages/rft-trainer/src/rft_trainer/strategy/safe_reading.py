"""Reading torch's distributed checkpoints without running anything that a pickle asks for."""

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from rft_trainer.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *((_METADATA, name) for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Makes what torch's own metadata consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise CheckpointError(
            f"the checkpoint's metadata asks for {module}.{name}, which no checkpoint of this package holds: "
            "it was not written here, and is not read"
        )


class SafeReader(FileSystemReader):
    """torch's reader; its metadata is unpickled from a list of known classes."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's table of contents.

        Raises:
            CheckpointError: it holds anything but torch's own description of tensors.
        """
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            metadata: Metadata = _MetadataUnpickler(stream).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """torch's planner; values that are no tensors are read as plain values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one value where it belongs, as torch's own planner does after it unpickled it."""
        plain = torch.load(value, weights_only=True)
        # Written again, so that torch's own method unpickles nothing but what has just been read.
        checked = io.BytesIO()
        torch.save(plain, checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)
