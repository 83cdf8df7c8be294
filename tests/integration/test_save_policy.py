"""A save that fails, and a run that fails during a save: what stays on the disk, and what the run says of it."""

import resource
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Event

import pytest
import torch

from integration.plain_training import StopError, config, train
from rft_dist.testing import run_ranks
from rft_trainer.checkpoint import find_checkpoint, read_manifest
from rft_trainer.errors import CheckpointError
from rft_trainer.testing import tiny_model_folder

SHAPE = {"max_steps": 3, "save_steps": 1}
SMALL = 60_000
"""Bytes that a file may have on a disk that is full: less than a shard, more than a log."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


@contextmanager
def largest_file(size):
    """The kernel lets no file of this process grow further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_on_rank_1(said, trainer, rank, step):
    """The disk of one rank is full while the checkpoint after step 2 is written; `said` gets the run's lines."""
    if step == 1:
        say = trainer.progress.line
        trainer.progress.line = lambda text: (said.append(text), say(text))
    if rank != 1 or step != 2:
        return
    begin = trainer.checkpoints.begin

    def begun(state, write_shards):
        trainer.checkpoints.begin = begin
        with largest_file(SMALL):
            begin(state, write_shards)
            for write in trainer.checkpoints._writing.pending:
                write.exception()  # the background writes while the disk is full

    trainer.checkpoints.begin = begun


def policies(rank, world, plans, stopping):
    """Results and lines of runs that go on, and the error of one that stops."""
    outcomes = []
    for settings in plans:
        said = []
        outcomes.append((train(rank, world, settings, partial(full_on_rank_1, said)), said))
    with pytest.raises(CheckpointError, match="could not be written") as error:
        train(rank, world, stopping, partial(full_on_rank_1, []))
    return outcomes, str(error.value)


@pytest.mark.parametrize(
    "strategy", [{"fsdp": True}, pytest.param({"fsdp": False, "zero_stage": 2}, marks=pytest.mark.slow)]
)
def test_a_full_disk_stops_the_run_or_not_as_it_was_told(folder, tmp_path, strategy):
    going = config(folder, tmp_path / "going", **SHAPE, **strategy, on_save_error="continue")
    behind = replace(going, output_dir=tmp_path / "behind", save_in_background=True)
    unharmed = replace(going, output_dir=tmp_path / "unharmed")
    stopping = replace(going, output_dir=tmp_path / "stopping", on_save_error="stop")
    results = run_ranks(policies, 2, [going, behind], stopping, timeout_seconds=500)
    reference = run_ranks(train, 2, unharmed, timeout_seconds=500)
    for (outcomes, error), (_, weights, texts) in zip(results, reference, strict=True):
        for (_, found, said), lines in outcomes:
            assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
            assert said == texts
            failed = [line for line in lines if line.startswith("training goes on without a checkpoint: ")]
            assert len(failed) == 1
            assert "GiB free there); earlier checkpoints are as they were" in failed[0]
            assert next(line for line in lines if line.startswith("checkpoint ")).endswith("step_000001")
        assert "on_save_error continue" in error
    for run in ("going", "behind"):
        folders = sorted(path.name for path in (tmp_path / run / "checkpoints").iterdir())
        assert folders == ["latest", "step_000001", "step_000003"]
        assert read_manifest(find_checkpoint(tmp_path / run / "checkpoints")).step == 3
        read_manifest(tmp_path / run / "checkpoints" / "step_000001")
    assert sorted(path.name for path in (tmp_path / "stopping" / "checkpoints").iterdir()) == ["latest", "step_000001"]
    assert read_manifest(find_checkpoint(tmp_path / "stopping" / "checkpoints")).step == 1


def fails_on_rank_1(trainer, rank, step):
    """The checkpoint after step 1 is still being written when rank 1 fails in step 2 and rank 0 waits for it."""
    if step == 1:
        held, save = Event(), trainer.backend.save

        def slow(*args, **options):
            pending = save(*args, **options)
            original, pending.result = pending.result, lambda *_: (held.wait(), original())[1]
            return pending

        trainer.backend.save, trainer.released = slow, held
    elif rank == 1:
        trainer.released.set()
        raise StopError
    else:
        trainer.released.set()


def failing(rank, world, settings):
    result = train(rank, world, settings, fails_on_rank_1)
    assert (result is None) == (rank == 1)
    raise StopError


def test_a_failing_step_does_not_abandon_the_checkpoint_behind_it(folder, tmp_path):
    settings = config(folder, tmp_path / "run", **SHAPE, save_in_background=True)
    with pytest.raises(Exception, match="StopError"):
        run_ranks(failing, 2, settings, timeout_seconds=500)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_000001"]
    assert read_manifest(find_checkpoint(checkpoints)).step == 1
