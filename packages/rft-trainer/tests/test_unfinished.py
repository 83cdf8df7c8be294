"""A checkpoint in the background, and ranks that do not answer each other any more."""

from concurrent.futures import Future

import pytest
import torch

from rft_trainer.checkpoint import CheckpointStore, Manifest, TrainerState, find_checkpoint, read_manifest
from rft_trainer.errors import CheckpointError
from rft_trainer.testing import AloneDataParallel


def names(root):
    return sorted(path.name for path in root.iterdir())


class OneOfTwo(AloneDataParallel):
    """One of two ranks that do not answer each other."""

    size = 2

    def __init__(self, rank):
        self.rank = rank

    def on_main(self, action):
        if self.rank == 0:
            action()


def begun_by_two(root, *futures):
    """Stores of two ranks that write step 1 in the background."""
    stores = [CheckpointStore(root, OneOfTwo(rank)) for rank in range(2)]
    for rank, (kept, future) in enumerate(zip(stores, futures, strict=True)):

        def write(folder, rank=rank, future=future):
            torch.save({"weights": torch.full((10,), 1.0)}, folder / f"{rank}.pt")
            return [future]

        kept.begin(TrainerState(step=1, weights_version=2, world_size=2, strategy="plain"), write)
    return stores


def written(error=None):
    future = Future()
    future.set_result(None) if error is None else future.set_exception(error)
    return future


def test_ranks_that_cannot_ask_each_other_complete_what_all_have_written(tmp_path):
    root = tmp_path / "run"
    stores = begun_by_two(root, written(), written())
    # Whoever comes first completes it; the other finds it done.
    for kept in stores[::-1]:
        assert kept.finish_alone() == root / "step_000001"
        assert not kept.is_writing
        assert kept.finish_alone() is None
    files = Manifest.read(root / "step_000001").files
    assert sorted(files) == ["random_00000.pt", "random_00001.pt", "shards/0.pt", "shards/1.pt"]
    assert read_manifest(find_checkpoint(root)).step == 1
    assert names(root) == ["latest", "step_000001"]
    assert names(root / "step_000001") == ["manifest.json", "random_00000.pt", "random_00001.pt", "shards"]


def test_what_a_rank_has_not_written_is_never_completed_alone(tmp_path):
    first, _ = begun_by_two(tmp_path / "failed", written(), written(OSError("no space left")))
    with pytest.raises(CheckpointError, match=r"could not be written: rank 1: OSError: no space left"):
        first.finish_alone()
    late = Future()
    first, _ = begun_by_two(tmp_path / "late", written(), late)
    with pytest.raises(CheckpointError, match=r"ranks \[1\] have not written their part within 0.05 seconds"):
        first.finish_alone(timeout_seconds=0.05)
    for root in (tmp_path / "failed", tmp_path / "late"):
        assert find_checkpoint(root) is None
    late.set_result(None)
