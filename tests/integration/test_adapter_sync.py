"""LoRA training that sends the adapter alone: same rollouts as merged sync, base weights of the engine untouched."""

import json

import pytest
import torch

from integration.lora_training import ROWS, weighted_loss
from integration.plain_training import config, low_bytes
from rft_dist import ParallelLayout, build_rollout_groups
from rft_dist.testing import run_ranks
from rft_engines import EngineConfig, EngineState, GenerationRequest, HFEngine, SamplingParams
from rft_rewards import RewardComputationEngine, RewardRecipe
from rft_sync import ModuleReceiver, WeightSyncError
from rft_trainer.config import OptimizerConfig
from rft_trainer.data import PromptDataset, RecordFields
from rft_trainer.models import Actor, AdapterConfig, load_causal_model, load_tokenizer, padded_layout
from rft_trainer.optim import AdamWConfig
from rft_trainer.roles import build_initial_model, build_policy
from rft_trainer.session import Ingredients, build_trainer
from rft_trainer.strategy import DeepspeedBackend, EngineRuntime, FSDPBackend, get_strategy
from rft_trainer.testing import tiny_model_folder

ADAPTERS = AdapterConfig(rank=4, alpha=8.0, seed=3)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=6)
REQUESTS = [GenerationRequest((5, 6, 7), seed=1), GenerationRequest((40, 41), seed=2)]
BACKENDS = ("fsdp2", "zero2", "zero3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def backend(kind):
    device = torch.device("cpu")
    return FSDPBackend(device) if kind == "fsdp2" else DeepspeedBackend(device, stage=int(kind[-1]))


def largest_gap(runtime, state):
    """Greatest difference between what the engine reports and what the actor scores for the same tokens."""
    runtime.wake()
    samples = runtime.generate(REQUESTS, GREEDY)
    prompts = [torch.tensor(sample.prompt_token_ids) for sample in samples]
    responses = [torch.tensor(sample.token_ids) for sample in samples]
    state.module.eval()
    with torch.no_grad():
        scores = state.module(padded_layout(prompts, responses, 0)).log_probs
    state.module.train()
    gaps = [
        (row[: len(sample.log_probs)] - torch.tensor(sample.log_probs)).abs().max()
        for row, sample in zip(scores, samples, strict=True)
    ]
    return float(max(gaps)), [sample.token_ids for sample in samples], samples[0].weights_version


def updates(rank, world, folder, kind):
    """Three optimiser steps, each sent as an adapter, after a sleep and after a failure too; what each sync saw."""
    machinery = backend(kind)
    actor = Actor(load_causal_model(folder))
    actor.add_adapters(ADAPTERS)
    state = machinery.prepare(actor, OptimizerConfig(adamw=AdamWConfig(lr=3e-2), max_norm=0.0))
    groups = build_rollout_groups(ParallelLayout(world, 1, rank=rank))
    runtime = EngineRuntime(HFEngine(folder), groups, enable_sleep=True, adapter_only=True)
    merged = EngineRuntime(HFEngine(folder), groups)
    before = {name: p.clone() for name, p in runtime.engine.native.named_parameters()}
    found = []
    for step in range(3):
        mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
        machinery.backward(state, weighted_loss(state.module, mine), last=True)
        machinery.optimizer_step(state)
        for each in (runtime, merged):
            each.note_update()
        if step == 1:
            runtime.sleep(update_follows=False)
            assert runtime.engine.state is EngineState.ASLEEP
        report = runtime.update_engine_weights(state)
        merged.update_engine_weights(state)
        gap, tokens, version = largest_gap(runtime, state)
        found.append((report.version, version, report.nbytes, report.tensors_verified, gap))
        assert tokens == largest_gap(merged, state)[1]
    for name, parameter in runtime.engine.native.named_parameters():
        assert torch.equal(parameter, before[name]), name
    # An update that fails leaves an engine that refuses, and the next one sends the base again.
    receiver = runtime._manager.receiver
    load = ModuleReceiver.load

    def refuse(bucket):
        load(receiver, bucket)
        raise OSError("the device fell off")

    receiver.load = refuse
    runtime.note_update()
    with pytest.raises(WeightSyncError, match="fell off"):
        runtime.update_engine_weights(state)
    del receiver.load
    assert runtime.engine.state is EngineState.WEIGHTS_UNDEFINED
    report = runtime.update_engine_weights(state)
    found.append((report.version, *largest_gap(runtime, state)[::-2], report.nbytes))
    groups.close()
    return found


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("fsdp2", 2),
        *(pytest.param(kind, world, marks=pytest.mark.slow) for kind in BACKENDS for world in (1, 2, 4)),
    ],
)
def test_the_engine_generates_what_the_actor_scores(folder, kind, world):
    actor = Actor(load_causal_model(folder))
    actor.add_adapters(ADAPTERS)
    factors = [p for name, p in actor.named_parameters() if "lora_" in name]
    nbytes = sum(p.numel() * 4 for p in factors)
    for found in run_ranks(updates, world, folder, kind, timeout_seconds=500):
        for number, (version, generated_with, sent, verified, gap) in enumerate(found[:3], start=1):
            assert (version, generated_with, sent) == (number, number, nbytes)
            # Everything at the first update, then sixteen in turn.
            assert verified == (len(factors) if number == 1 else min(16, len(factors)))
            assert gap < 1e-5
        version, generated_with, gap, sent = found[3]
        assert (version, generated_with, sent) == (4, 4, nbytes)
        assert gap < 1e-5


def loop(rank, world, runs):
    """Whole runs with evaluation, one after the other: metrics by step, sleep levels, layers with an adapter."""
    return [one_run(settings) for settings in runs]


def one_run(settings):
    tokenizer = load_tokenizer(settings.pretrain)
    fields = RecordFields(reference_key=None)
    records = [fields.record({"question": f"say {i}"}, f"made:{i}") for i in range(4)]
    prompts = PromptDataset(records, tokenizer, max_prompt_tokens=200)
    with get_strategy(settings).setup_distributed() as strategy:
        strategy.on_main(lambda: settings.output_dir.mkdir(parents=True, exist_ok=True))
        actor = strategy.prepare(build_policy(settings, settings.pretrain, bf16=False))
        initial = build_initial_model(settings, settings.pretrain, strategy, actor)
        strategy.create_engine(EngineConfig(model_path=settings.pretrain, load_weights=False))
        parts = {"actor": actor, "initial_model": initial, "tokenizer": tokenizer, "prompts": prompts}
        rewards = RewardComputationEngine(RewardRecipe(functions=[low_bytes]))
        trainer = build_trainer(settings, strategy, Ingredients(**parts, held_out=prompts, rewards=rewards))
        engine, levels = strategy.runtime.engine, []
        release = engine._release
        engine._release = lambda level: (levels.append(int(level)), release(level))
        trainer.fit()
        hooked = sum(bool(m._forward_hooks) for m in engine.native.modules())
    lines = (settings.output_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if "rollout/reward" in line], levels, hooked


@pytest.fixture(scope="module", params=["fsdp2", pytest.param("zero2", marks=pytest.mark.slow)])
def runs(request, folder, tmp_path_factory):
    """Folder and results of a run by what its updates send."""
    output = tmp_path_factory.mktemp("runs")
    options = {"lora_rank": 4, "init_kl_coef": 0.1, "enable_engine_sleep": True, "max_steps": 2, "train_batch_size": 8}
    options |= {"fsdp": request.param == "fsdp2", "ema_decay": 0.5, "replay_on_device": True}
    settings = [config(folder, output / sync, **options, lora_sync=sync) for sync in ("adapter", "merged")]
    (results,) = run_ranks(loop, 1, settings, timeout_seconds=500)
    return output, dict(zip(("adapter", "merged"), results, strict=True))


def test_a_run_is_that_of_merged_sync_with_an_engine_that_keeps_its_weights_asleep(runs):
    steps, levels, hooked = runs[1]["adapter"]
    other_steps, other_levels, other_hooked = runs[1]["merged"]
    # Level 2 would drop the weights that no update brings back.
    assert set(levels) == {1}
    assert 2 in other_levels
    assert hooked
    assert other_hooked == 0
    assert len(steps) == 2
    for step, other in zip(steps, other_steps, strict=True):
        assert step["train/gap/gap"] < 1e-5
        assert step["sync/version"] == other["sync/version"]
        assert step["rollout/reward"] == pytest.approx(other["rollout/reward"], abs=1e-5)
        assert step["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-3)


def test_every_owner_has_a_row_within_a_tenth_of_its_forecast(runs):
    lines = (runs[0] / "adapter" / "memory.rank0.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] == 2]
    seen = set()
    for row in rows:
        for owner in ("actor", "actor optimiser", "weight average", "engine weights"):
            measured, expected = row["measured"][owner], row["expected"].get(owner, 0)
            if row["phase"] in ("sync", "record") and owner == "engine weights":
                continue  # woken in the middle of the phase
            assert measured == pytest.approx(expected, rel=0.1), (row["phase"], owner)
            seen |= {owner} if measured else set()
    assert seen == {"actor", "actor optimiser", "weight average", "engine weights"}
    by_phase = {row["phase"]: row["measured"] for row in rows}
    generate = next(row for row in rows if row["phase"] == "generate")
    # The forecast is for prompts and responses at their longest.
    assert 0 < generate["measured"]["kv cache"] < generate["expected"]["kv cache"]
    assert by_phase["update"]["kv cache"] == 0
    assert by_phase["update"]["engine weights"] == 0
    assert by_phase["generate"]["experiences"] > 0
    assert by_phase["update"]["experiences"] > by_phase["generate"]["experiences"]
    assert by_phase["evaluate"]["engine weights"] == generate["measured"]["engine weights"]
