"""LoRA under both backends: the numbers of plain PEFT, a reference without a second model, files that others read."""

import json
from pathlib import Path

import pytest
import torch

from integration.lora_training import ROWS, prompts_and_responses, weighted_loss
from integration.made_prompts import low_bytes, made_prompts, whole_weights
from rft_dist.testing import run_ranks
from rft_engines import EngineConfig
from rft_rewards import RewardComputationEngine, RewardRecipe
from rft_trainer.config import OptimizerConfig, RFTConfig
from rft_trainer.errors import ConfigurationError, UnsupportedCombination
from rft_trainer.export import export_adapter, export_model
from rft_trainer.models import Actor, AdapterConfig, WithoutAdapters, load_causal_model, load_tokenizer
from rft_trainer.optim import AdamWConfig
from rft_trainer.roles import build_initial_model, build_policy
from rft_trainer.session import Ingredients, build_trainer
from rft_trainer.strategy import DeepspeedBackend, FSDPBackend, get_strategy
from rft_trainer.testing import tiny_model_folder

ADAPTERS = AdapterConfig(rank=4, alpha=8.0, targets=("q_proj", "up_proj"), seed=3)
OPTIMIZER = OptimizerConfig(adamw=AdamWConfig(lr=1e-2), max_norm=0.05)
BACKENDS = ("fsdp2", "zero2", "zero3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def adapted(folder):
    actor = Actor(load_causal_model(folder))
    actor.add_adapters(ADAPTERS)
    return actor


def backend(kind):
    device = torch.device("cpu")
    return FSDPBackend(device) if kind == "fsdp2" else DeepspeedBackend(device, stage=int(kind[-1]))


def step(kind, machinery, state, rank, world):
    mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    machinery.backward(state, weighted_loss(state.module, mine), last=True)
    return machinery.optimizer_step(state)


def train(rank, world, folder, kind, output):
    """Two steps, the reference scored before, between and after; the second is repeated from a checkpoint."""
    machinery = backend(kind)
    state = machinery.prepare(adapted(folder), OPTIMIZER)
    reference = WithoutAdapters(state.module)
    everything = prompts_and_responses()
    base, norms = [], []

    def score():
        reference.eval()
        with torch.no_grad():
            base.append(reference(everything).log_probs.clone())
        state.module.train()

    score()
    norms.append(step(kind, machinery, state, rank, world).grad_norm)
    score()
    machinery.save(state, Path(output) / "shards")
    norms.append(step(kind, machinery, state, rank, world).grad_norm)
    score()
    weights = whole_weights(state.checkpoint_module)
    again = machinery.prepare(adapted(folder), OPTIMIZER)
    machinery.load(again, Path(output) / "shards")
    assert step(kind, machinery, again, rank, world).grad_norm == norms[1]
    for name, tensor in whole_weights(again.checkpoint_module).items():
        assert torch.equal(tensor, weights[name]), name
    trained = sum(p.numel() for group in state.optimizer.param_groups for p in group["params"])
    export_model(state, Path(output) / "model", load_tokenizer(folder), group=None)
    export_adapter(state, Path(output) / "adapter", group=None)
    return norms, weights, base, trained


def train_in_turn(rank, world, folder, output):
    """Every backend by the same processes."""
    return {kind: train(rank, world, folder, kind, str(Path(output) / kind)) for kind in BACKENDS}


def plain(folder):
    """The same two steps with PEFT and torch alone: norms, merged weights, adapter numbers, scores of the base."""
    untouched = Actor(load_causal_model(folder))
    actor = adapted(folder)
    trained = [p for p in actor.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=OPTIMIZER.adamw.betas, weight_decay=0.0)
    norms = []
    for _ in range(2):
        weighted_loss(actor, slice(None)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, OPTIMIZER.max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    merged = actor.model.merge_and_unload().state_dict()
    with torch.no_grad():
        scores = untouched(prompts_and_responses()).log_probs
    return norms, merged, scores, sum(p.numel() for p in trained)


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 4))])
def test_lora_is_that_of_plain_peft_and_its_files_are_read_by_others(folder, tmp_path, world):
    expected = plain(folder)
    results = run_ranks(train_in_turn, world, folder, str(tmp_path), timeout_seconds=500)
    for kind in BACKENDS:
        assert_plain_peft(folder, tmp_path / kind, [of_rank[kind] for of_rank in results], expected)


def assert_plain_peft(folder, output, results, expected):
    from peft import PeftModel

    norms, merged, base, count = expected
    for got_norms, got, scores, _ in results:
        assert got_norms == pytest.approx(norms, rel=1e-5)
        for name, tensor in got.items():
            assert torch.allclose(tensor, merged[name], atol=2e-5), name
        # No second model: the reference is the base to the last bit of each pass, and stays so while adapters train.
        assert torch.equal(scores[0], scores[1])
        assert torch.equal(scores[0], scores[2])
        assert torch.allclose(scores[0], base, atol=1e-5)
    assert results[0][3] <= count  # this rank's share of the adapters, and nothing of the base
    files = [file for file in (output / "shards").rglob("*") if file.is_file()]
    base_bytes = sum(t.numel() * 4 for t in load_causal_model(folder).parameters())
    assert sum(file.stat().st_size for file in files) < base_bytes
    everything = prompts_and_responses()
    exported = Actor(load_causal_model(str(output / "model")))
    attached = PeftModel.from_pretrained(load_causal_model(folder), output / "adapter")
    with torch.no_grad():
        expected = exported(everything).log_probs
        assert not torch.allclose(expected, base, atol=1e-3)
        assert torch.allclose(Actor(attached)(everything).log_probs, expected, atol=1e-5)


def test_targets_must_match(folder):
    with pytest.raises(ConfigurationError, match=r"\['k_prj'\] match no linear layer.*q_proj"):
        Actor(load_causal_model(folder)).add_adapters(AdapterConfig(rank=2, alpha=4.0, targets=("q_proj", "k_prj")))
    with pytest.raises(ConfigurationError, match="nothing_here"):
        Actor(load_causal_model(folder)).add_adapters(AdapterConfig(rank=2, alpha=4.0, targets=("nothing_here",)))


def test_an_adapter_on_the_head_is_refused(folder):
    with pytest.raises(UnsupportedCombination, match=r"output layer.*chunked"):
        Actor(load_causal_model(folder)).add_adapters(AdapterConfig(rank=2, alpha=4.0, targets=("lm_head",)))


def test_every_rank_of_every_run_begins_alike(folder):
    torch.manual_seed(1)
    first = dict(adapted(folder).named_parameters())
    torch.manual_seed(2)
    for name, parameter in adapted(folder).named_parameters():
        assert torch.equal(parameter, first[name]), name
        assert parameter.requires_grad == ("lora_" in name)


def learn(rank, world, settings):
    """Train a run of the whole loop; the metrics of each step."""
    tokenizer = load_tokenizer(settings.pretrain)
    with get_strategy(settings).setup_distributed() as strategy:
        strategy.on_main(lambda: settings.output_dir.mkdir(parents=True, exist_ok=True))
        actor = strategy.prepare(build_policy(settings, settings.pretrain, bf16=False))
        initial = build_initial_model(settings, settings.pretrain, strategy, actor)
        strategy.create_engine(EngineConfig(model_path=settings.pretrain))
        rewards = RewardComputationEngine(RewardRecipe(functions=[low_bytes]))
        prompts = made_prompts(tokenizer, 4)
        parts = {"actor": actor, "initial_model": initial, "tokenizer": tokenizer, "prompts": prompts}
        trainer = build_trainer(settings, strategy, Ingredients(**parts, held_out=(), rewards=rewards))
        trainer.fit()
    lines = (settings.output_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if "rollout/reward" in line]


def test_the_reward_rises_with_adapters_alone(folder, tmp_path):
    model = load_causal_model(folder)
    # A random tied head is too small to prefer any token by more than a hair, and adapters leave it as it is.
    model.get_input_embeddings().weight.data.mul_(10)
    wide = str(tmp_path / "wide")
    model.save_pretrained(wide)
    load_tokenizer(folder).save_pretrained(wide)
    settings = RFTConfig(
        pretrain=wide,
        fsdp=True,
        output_dir=tmp_path / "run",
        rollout_batch_size=4,
        n_samples_per_prompt=8,
        generate_max_len=6,
        actor_learning_rate=1e-2,
        init_kl_coef=0.01,
        lora_rank=8,
        max_steps=12,
        tensorboard=False,
    )
    (steps,) = run_ranks(learn, 1, settings, timeout_seconds=500)
    rewards = [step["rollout/reward"] for step in steps]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3
    assert steps[0]["train/kl"] == pytest.approx(0.0, abs=1e-6)
    assert steps[-1]["train/kl"] > 1e-3
