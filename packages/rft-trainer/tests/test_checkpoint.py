"""Checkpoints: complete or absent after a kill at any point, intact on a full disk, and never unpickled blindly."""

import json
import os
import pickle
import random
import resource
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rft_trainer import RFTConfig
from rft_trainer.checkpoint import (
    CheckpointStore,
    Manifest,
    RetentionPolicy,
    TrainerState,
    find_checkpoint,
    fitted_settings,
    read_manifest,
    resolve_resume,
)
from rft_trainer.checkpoint.random_state import restore_random_state, save_random_state
from rft_trainer.checkpoint.retention import Stored
from rft_trainer.errors import CheckpointError
from rft_trainer.testing import AloneDataParallel

SETTINGS = {"n_samples_per_prompt": 8, "adam_betas": [0.9, 0.95], "model": "2 tensors, abc"}


def state(step, **changes):
    base = TrainerState(step=step, weights_version=step + 1, world_size=1, strategy="plain", settings=SETTINGS)
    return replace(base, **changes)


def shards(step, size=1000):
    def write(folder):
        torch.save({"weights": torch.full((size,), float(step))}, folder / "a.pt")
        return ()

    return write


def store(root, **retention):
    return CheckpointStore(root, AloneDataParallel(), RetentionPolicy(**retention))


def load(root, folder, **options):
    found = {}

    def read(path):
        found.update(torch.load(path / "a.pt", weights_only=True))

    loaded = store(root).load(folder, read, **{"strategy": "plain", **options})
    return loaded, found["weights"]


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_a_save_killed_at_any_point_leaves_a_complete_checkpoint(tmp_path):
    points = 20
    driver = Path(__file__).with_name("checkpoint_kills.py")
    done = subprocess.run([sys.executable, driver, tmp_path, str(points)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= points
    found = []
    for number in range(points):
        root = tmp_path / f"killed_{number:02d}"
        folder = find_checkpoint(root)
        assert folder is not None
        loaded, weights = load(root, folder)
        assert torch.equal(weights, torch.full((1000,), float(loaded.step)))
        found.append(loaded.step)
        # What the kill left is in nobody's way, and goes.
        store(root, count=1).save(state(3), shards(3))
        assert names(root) == ["latest", "step_000003"]
    assert found == sorted(found)
    assert set(found) == {1, 2}


def test_the_same_step_written_again_is_never_missing(tmp_path):
    root = tmp_path / "run"
    store(root).save(state(4), shards(4))
    # The moment between the two renames.
    (root / "step_000004").rename(root / ".step_000004.replaced")
    folder = find_checkpoint(root)
    assert load(root, folder)[0].step == 4
    store(root).save(state(4), shards(5))
    assert names(root) == ["latest", "step_000004"]
    assert load(root, find_checkpoint(root))[1][0] == 5


def test_a_full_disk_is_an_error_and_the_last_checkpoint_stays(tmp_path):
    root = tmp_path / "run"
    store(root).save(state(1), shards(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # the kernel refuses to write further
    try:
        with pytest.raises(CheckpointError, match=r"could not be written.*GiB free.*on_save_error continue"):
            store(root).save(state(2), shards(2, size=100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(root) == ["latest", "step_000001"]  # the space is given back
    assert load(root, find_checkpoint(root))[0].step == 1
    store(root).save(state(2), shards(2))
    assert find_checkpoint(root).name == "step_000002"


def test_a_folder_that_is_not_complete_is_never_trusted(tmp_path):
    root = tmp_path / "run"
    assert find_checkpoint(root) is None
    for step in (1, 2):
        store(root).save(state(step), shards(step))
    (root / "step_000003").mkdir()
    (root / "latest").write_text("step_000003")
    assert find_checkpoint(root).name == "step_000002"
    for spoilt in (b"", b"\0\0\0", b"\xff\xfe step", b"step_000009", b"../../elsewhere"):
        (root / "latest").write_bytes(spoilt)
        assert find_checkpoint(root).name == "step_000002"
    manifest = root / "step_000002" / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    assert find_checkpoint(root).name == "step_000001"
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        load(root, root / "step_000002")
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        load(root, root / "step_000003")
    file = root / "step_000001" / "shards" / "a.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.pt is missing or differs"):
        load(root, root / "step_000001")
    with pytest.raises(CheckpointError, match=r"a\.pt is missing or differs"):
        read_manifest(root / "step_000001")


def test_what_does_not_fit_is_named(tmp_path):
    root = tmp_path / "run"
    folder = store(root).save(state(1), shards(1))
    assert load(root, folder, settings={**SETTINGS, "adam_betas": (0.9, 0.95), "new": 1})[0].step == 1
    with pytest.raises(CheckpointError, match=r"n_samples_per_prompt was 8 and is 4; model was '2 tensors, abc'"):
        load(root, folder, settings={**SETTINGS, "n_samples_per_prompt": 4, "model": "3 tensors, d"})
    with pytest.raises(CheckpointError, match="written by plain and this run trains with fsdp2"):
        load(root, folder, strategy="fsdp2")
    eight = store(root).save(state(2, world_size=8), shards(2))
    with pytest.raises(CheckpointError, match="written by 8 ranks and this run has 1"):
        load(root, eight)
    assert load(root, eight, resizable=True)[0].world_size == 8


def test_settings_that_must_fit():
    base = RFTConfig()

    def differing(**changes):
        now = fitted_settings(replace(base, **changes), "m")
        return {name for name, value in fitted_settings(base, "m").items() if now[name] != value}

    assert differing(micro_train_batch_size=2, output_dir=Path("x"), max_steps=99, save_steps=5) == set()
    assert differing(n_samples_per_prompt=4, adam_betas=(0.8, 0.9), init_kl_coef=0.1, seed=3) == {
        "n_samples_per_prompt",
        "adam_betas",
        "init_kl_coef",
        "seed",
    }
    assert "max_steps" in fitted_settings(replace(base, lr_scheduler="linear"), "m")
    placed = {"offload_trained": True, "offload_frozen": True, "plan_device_gib": 40.0}
    laid_out = {"packing": True, "replay_on_device": True}
    limits = {"gap_warn": 0.1, "gap_stop": 0.5}  # a run that was stopped by a limit goes on under a higher one
    assert differing(**placed, **laid_out, **limits) == set()


def test_loading_an_older_step_makes_it_the_latest(tmp_path):
    root = tmp_path / "run"
    for step in (2, 4):
        store(root).save(state(step), shards(step))
    load(root, root / "step_000002")
    assert find_checkpoint(root).name == "step_000002"  # step 4 belongs to the course that was left
    elsewhere = tmp_path / "other"
    load(elsewhere, root / "step_000004")
    assert find_checkpoint(root).name == "step_000002"


def test_evaluations_and_samplers_come_back_as_they_were(tmp_path):
    folder = store(tmp_path / "run").save(
        state(2, evaluations={0: {"eval/accuracy": 0.25}, 2: {"eval/accuracy": 0.5}}, sampler={"epoch": 1}), shards(2)
    )
    loaded = read_manifest(folder)
    assert loaded.evaluations == {0: {"eval/accuracy": 0.25}, 2: {"eval/accuracy": 0.5}}
    assert loaded.sampler == {"epoch": 1}


def test_every_generator_comes_back(tmp_path):
    def draw():
        return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(2).tolist()

    random.gauss(0, 1)  # Python's generator keeps a second normal value
    np.random.standard_normal()  # so does numpy's
    save_random_state(tmp_path, 3)
    first = draw()
    restore_random_state(tmp_path, 3)
    assert draw() == first
    restore_random_state(tmp_path, 4)  # a rank that did not exist keeps its own


def test_the_newest_and_the_best_stay(tmp_path):
    root = tmp_path / "run"
    for step, accuracy in enumerate((0.1, 0.9, 0.2, 0.3, 0.9), start=1):
        kept = store(root, count=2, metric="eval/accuracy")
        kept.save(state(step, evaluations={step: {"eval/accuracy": accuracy}}), shards(step))
        if step == 4:
            assert names(root) == ["best", "latest", "step_000002", "step_000004"]
            assert (root / "best").read_text() == "step_000002"
    assert (root / "best").read_text() == "step_000005"
    assert names(root) == ["best", "latest", "step_000004", "step_000005"]


def test_retention_is_decided_from_the_facts():
    def gone(stored, **policy):
        return [item.name for item in RetentionPolicy(**policy).removed(stored)]

    three = [Stored(name=name, bytes=10, score=score) for name, score in (("a", 0.5), ("b", None), ("c", 0.7))]
    assert gone(three) == []
    assert gone(three, count=1) == ["a", "b"]
    assert gone(three, count=5, bytes=20) == ["a"]
    assert gone(three, bytes=1) == ["a", "b"]  # the newest stays whatever its size
    assert gone(three, count=1, metric="m", lowest=True) == ["b"]
    assert gone([], count=1) == []
    assert RetentionPolicy(metric="m").best([Stored(name="a", bytes=1)]) is None


def test_a_checkpoint_in_the_background_is_completed_when_its_files_are_written(tmp_path):
    root = tmp_path / "run"
    kept, written = store(root), Future()

    def start(folder):
        shards(1)(folder)
        return [written]

    kept.begin(state(1), start)
    assert kept.poll() is None
    assert find_checkpoint(root) is None
    written.set_result(None)
    while (folder := kept.poll()) is None:
        time.sleep(0.01)
    assert folder == root / "step_000001"
    assert kept.poll() is None
    assert kept.finish() is None
    assert load(root, find_checkpoint(root))[0].step == 1
    evaluations = {1: {"eval/accuracy": 0.5}}
    going_on = Future()
    kept.begin(state(1, evaluations=evaluations), lambda folder: [going_on])
    assert kept.is_writing
    evaluations[2] = {"eval/accuracy": 0.75}  # training goes on
    going_on.set_result(None)
    assert read_manifest(kept.finish()).evaluations == {1: {"eval/accuracy": 0.5}}
    assert not kept.is_writing
    store(root).save(state(1), shards(1))
    failing = Future()
    failing.set_exception(OSError("no space left"))
    kept.begin(state(2), lambda folder: [failing])
    with pytest.raises(CheckpointError, match="no space left"):
        kept.finish()
    assert find_checkpoint(root).name == "step_000001"


def test_resume_auto(tmp_path):
    config = RFTConfig(output_dir=tmp_path, resume="auto")
    assert resolve_resume(config).resume_from is None
    folder = store(tmp_path / "checkpoints").save(state(1), shards(1))
    assert resolve_resume(config).resume_from == folder
    assert resolve_resume(replace(config, resume="off")).resume_from is None
    began = tmp_path / "another_run"
    assert resolve_resume(replace(config, resume_from=began, output_dir=tmp_path / "new")).resume_from == began
    assert resolve_resume(replace(config, resume_from=began, resume="off")).resume_from == began
    # The config.json of a resumed run names the checkpoint of that time; a later one is not thrown away.
    first = resolve_resume(config)
    later = store(tmp_path / "checkpoints").save(state(2), shards(2))
    assert resolve_resume(first).resume_from == later


class Hostile:
    def __reduce__(self):
        return os.system, ("true",)


def test_deepspeed_files_hold_tensors_plain_values_and_known_classes(tmp_path):
    from rft_trainer.strategy.checkpoint_engine import ShardFiles

    shared = torch.arange(4.0)
    content = {"tied": [shared, shared], "part": (shared[:2], 3), "policy": RetentionPolicy(count=2)}
    files = ShardFiles([RetentionPolicy])
    files.copies = True
    files.save(content, str(tmp_path / "a.pt"))
    shared += 100  # training goes on
    files.written().result()
    read = files.load(str(tmp_path / "a.pt"))
    assert read["tied"][0].tolist() == [0, 1, 2, 3]
    assert read["tied"][0].data_ptr() == read["tied"][1].data_ptr()
    assert (read["part"][0].tolist(), read["policy"].count) == ([0, 1], 2)
    torch.save({"x": Hostile()}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match=r"b\.pt holds what no checkpoint"):
        files.load(str(tmp_path / "b.pt"))
    files.save(content, str(tmp_path / "missing" / "c.pt"))
    with pytest.raises(RuntimeError, match="missing"):
        files.written().result()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_of_shards_is_read_without_running_it(tmp_path):
    from torch.distributed.checkpoint.state_dict_loader import load as read_shards
    from torch.distributed.checkpoint.state_dict_saver import save as write_shards

    from rft_trainer.strategy.safe_reading import SafePlanner, SafeReader

    content = {"w": torch.arange(3.0), "plain": {"lr": 0.5, "betas": (0.9, 0.95)}}
    write_shards(content, checkpoint_id=tmp_path / "good", no_dist=True)
    found = {"w": torch.zeros(3), "plain": {"lr": 0.0, "betas": (0.0, 0.0)}}
    read_shards(found, storage_reader=SafeReader(tmp_path / "good"), planner=SafePlanner(), no_dist=True)
    assert found["w"].tolist() == [0, 1, 2]
    assert found["plain"] == {"lr": 0.5, "betas": (0.9, 0.95)}
    (tmp_path / "good" / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointError, match=r"asks for (posix|os)\.system"):
        SafeReader(tmp_path / "good").read_metadata()


def test_the_manifest_lists_every_file_with_size_and_hash(tmp_path):
    folder = store(tmp_path / "run").save(state(1), shards(1))
    manifest = Manifest.read(folder)
    assert sorted(manifest.files) == ["random_00000.pt", "shards/a.pt"]
    assert manifest.bytes == sum((folder / name).stat().st_size for name in manifest.files)
    assert json.loads((folder / "manifest.json").read_text())["trainer"]["step"] == 1
