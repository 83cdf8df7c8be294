"""Run by test_checkpoint.py in a process of its own: saves that are killed (SIGKILL) at one point after another.

    python checkpoint_kills.py FOLDER POINTS

Each point gets a copy of a run with one complete checkpoint, of step 1; a forked child saves step 2 there and kills
itself at the point's file-system call, counted by the interpreter's own audit events. Prints the number of those calls.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from rft_trainer.checkpoint import CheckpointStore, RetentionPolicy, TrainerState
from rft_trainer.testing import AloneDataParallel

CALLS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir"}


def state(step):
    return TrainerState(step=step, weights_version=step + 1, world_size=1, strategy="plain")


def save(root, step):
    def shards(folder):
        for name in ("a.pt", "b.pt"):
            torch.save({"weights": torch.full((1000,), float(step))}, folder / name)
        return ()

    CheckpointStore(root, AloneDataParallel(), RetentionPolicy(count=1)).save(state(step), shards)


def killed_save(root, point):
    """The number of calls of a save of step 2, which ends the process at call `point`."""
    calls = 0

    def watch(event, arguments):
        nonlocal calls
        if event in CALLS:
            calls += 1
            if calls == point:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    save(root, 2)
    return calls


def in_child(root, point):
    """Exit code of the save; the count of its calls goes to a file."""
    child = os.fork()
    if child == 0:
        (root.parent / f"{root.name}.calls").write_text(str(killed_save(root, point)))
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main():
    folder, points = Path(sys.argv[1]), int(sys.argv[2])
    save(folder / "first", 1)
    shutil.copytree(folder / "first", folder / "whole")
    assert in_child(folder / "whole", 0) == 0
    calls = int((folder / "whole.calls").read_text())
    for number in range(points):
        point = 1 + number * (calls - 1) // (points - 1)
        shutil.copytree(folder / "first", folder / f"killed_{number:02d}")
        status = in_child(folder / f"killed_{number:02d}", point)
        assert status == signal.SIGKILL, (point, status)
    print(calls)


if __name__ == "__main__":
    main()
