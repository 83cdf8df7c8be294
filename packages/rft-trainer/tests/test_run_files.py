"""What stays of a run's files when it is resumed."""

import json
from types import SimpleNamespace

from rft_trainer.memory.build import StagedMemory
from rft_trainer.run_files import drop_later_files


def test_memory_entries_are_of_the_step_that_runs_and_go_with_it(tmp_path):
    ledger = SimpleNamespace(step=0)
    memory = StagedMemory(SimpleNamespace(), ledger)
    memory.begin(3)
    assert ledger.step == 3
    file = tmp_path / "memory.rank1.jsonl"
    lines = [json.dumps({"step": step, "phase": "update"}) + "\n" for step in (0, 1, 2, 3)]
    file.write_text("".join(lines) + '{"step": 4, "pha')
    drop_later_files(tmp_path, 2)
    assert file.read_text() == "".join(lines[:3])
    # A run that ended before its first checkpoint begins again, and finds its warm start done.
    warm = json.dumps({"step": 0, "phase": "warm_start"}) + "\n"
    file.write_text(warm + file.read_text())
    drop_later_files(tmp_path, -1)
    assert file.read_text() == warm
