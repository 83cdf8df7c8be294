"""The ledger: what is measured, what is written, what is warned of."""

import json

import torch

from rft_trainer.memory import plan_placement
from rft_trainer.memory.ledger import MIB, MemoryLedger, common_pool, unowned

PLAN = plan_placement(
    trained=("actor",),
    frozen=("reference",),
    offload_trained=True,
    offload_frozen=True,
    optimizer_on_host=False,
    engine_sleeps=True,
)


def ledger(held, tmp_path=None, **options):
    owners = {owner: lambda owner=owner: held[owner] for owner in held}
    expected = {"update": {"actor": 3 * MIB}}
    file = None if tmp_path is None else tmp_path / "memory.jsonl"
    return MemoryLedger(owners, PLAN, expected, torch.device("cpu"), file=file, **options)


def test_each_phase_is_measured_beside_the_forecast_and_written(tmp_path):
    held = {"actor": 3 * MIB, "reference": 0}
    book = ledger(held, tmp_path)
    book.step = 2
    book.begin()
    entry = book.end("update")
    assert (entry.measured, entry.expected, entry.peak) == (held, {"actor": 3 * MIB}, 3 * MIB)
    assert entry.line() == "step 2 update: peak 3.0 MiB; measured (expected) actor 3.0 (3.0), reference 0.0"
    held["actor"] = MIB
    book.end("update")
    rows = [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]
    assert [row["peak"] for row in rows] == [3 * MIB, MIB]
    assert book.table().splitlines()[1].split() == ["phase", "peak", "actor", "reference"]
    assert book.table().splitlines()[2].split() == ["update", "3.0", "1.0", "0.0"]
    assert book.metrics() == {"memory/peak_gib": 3 / 1024, "memory/owners_gib": 1 / 1024}
    assert book.warnings == []


def test_an_owner_that_should_be_away_is_named(caplog):
    book = ledger({"actor": MIB, "reference": 2 * MIB})
    book.end("update")
    assert book.warnings == ["reference holds 2.0 MiB at the end of update: the plan has it on the host"]
    assert "reference holds" in caplog.text


def test_what_is_left_after_sleep_may_not_grow():
    held = {"actor": 10 * MIB}
    book = ledger(held, residue_limit_bytes=64 * MIB)
    for size in (10, 200, 210, 264):
        # The first sleeps leave workspaces that stay.
        held["actor"] = size * MIB
        book.slept()
    assert book.warnings == []
    held["actor"] = 265 * MIB
    book.slept()
    assert len(book.warnings) == 1
    assert "grew by 65.0 MiB since the second sleep (limit 64 MiB): 265.0 MiB after sleep 5" in book.warnings[0]


def test_private_pools_and_other_devices_are_left_out():
    segments = [
        {"device": 0, "segment_pool_id": (0, 0), "total_size": 20, "allocated_size": 12},
        {"device": 0, "segment_pool_id": (0, 0), "total_size": 2, "allocated_size": 1},
        {"device": 0, "segment_pool_id": (1, 0), "total_size": 4000, "allocated_size": 4000},
        {"device": 1, "segment_pool_id": (0, 0), "total_size": 70, "allocated_size": 7},
    ]
    assert common_pool(segments, 0) == (22, 13)
    assert common_pool(segments, 1) == (70, 7)
    assert common_pool(segments, 2) == (0, 0)


def test_the_engine_has_rows_of_its_own(tmp_path):
    said = {"engine weights": 2 * MIB, "kv cache": 5 * MIB, "cuda graphs": MIB}
    book = ledger({"actor": MIB, "experiences": 0}, tmp_path, engine=lambda: said)
    entry = book.end("generate")
    assert entry.measured == {"actor": MIB, "experiences": 0, **said}
    assert entry.peak == 9 * MIB
    said = {}
    assert book.end("update").measured == {"actor": MIB, "experiences": 0}
    # The table keeps every column, empty where an owner said nothing.
    assert book.table().splitlines()[-1].split() == ["update", "1.0", "1.0", "0.0", "0.0", "0.0", "0.0"]


def test_what_nobody_owns_by_hand():
    # 100 in use; the common pool has 40 of them, 30 in tensors; the engine's 25 lie in a private pool that torch
    # counts with 50, because 25 of it sleep: 100 - 40 - 25 are contexts, workspaces and other processes.
    assert unowned(100, 40, 30, in_pools=50, engine=25) == {"allocator slack": 10, "other device memory": 35}
    # An engine in the common pool is in the 30 already.
    assert unowned(100, 40, 30, in_pools=0, engine=25) == {"allocator slack": 10, "other device memory": 60}
