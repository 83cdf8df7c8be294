"""Evaluate a model without training it.

    torchrun --nproc_per_node 2 -m rft_trainer.evaluate --pretrain FOLDER --eval_sets svamp.jsonl mawps.jsonl
    python -m rft_trainer.evaluate --config RUN/config.json --resume_from RUN/checkpoints/step_000010

Flags are those of a run. `--resume_from` takes the weights of a checkpoint instead of those of `--pretrain`; `--config`
with the run's config.json gives the strategy and model that it belongs to. Answers are scored by the strict, flexible
and boxed extraction, side by side. OUTPUT_DIR/evaluate gets one line for each response, and metrics.json.

Names that only an app knows (a bundled model, generated problems) are refused here; the app has this command for its
own runs, and calls `main` with its `AppParts`.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rft_dist import DistError
from rft_engines import EngineError
from rft_rewards import RewardComputationEngine, RewardRecipe, exact_answer
from rft_trainer.cli import parse_config
from rft_trainer.config import RFTConfig
from rft_trainer.data import DataSource, EncodedPrompt, PromptDataset, load_source, parse_sources
from rft_trainer.errors import ConfigurationError, RFTrainerError
from rft_trainer.evaluators import make_evaluator
from rft_trainer.models import load_tokenizer, quieten_transformers
from rft_trainer.preflight import check_resume
from rft_trainer.report import Console
from rft_trainer.roles import engine_config
from rft_trainer.session import Ingredients, experience_maker
from rft_trainer.standalone import AppParts, checkpointed_actor, initial_folder, one_process_without_torchrun
from rft_trainer.strategy import Strategy, get_strategy

Sets = Mapping[str, Sequence[EncodedPrompt]]


def main(argv: Sequence[str] | None = None, app: AppParts | None = None) -> int:
    """Evaluate and return the exit code: 0, or 2 for an error of the user's with one line for each problem."""
    rank = os.environ.get("RANK", "0")
    app = app or AppParts(held_out=evaluation_sets, rewards=flexible_rewards)
    try:
        config = parse_config(argv, app.recipes, description="Evaluation of a model folder or checkpoint")
        if config.pretrain is None:
            raise ConfigurationError("pretrain is not set: give --pretrain, or --config with a run's config.json")
        check_resume(config)
        config = app.resolve(config)
        assert config.pretrain is not None
        one_process_without_torchrun()
        quieten_transformers()
        folder = initial_folder(config)
        config = replace(config, eval_extractors=True, output_dir=config.output_dir / "evaluate")
        tokenizer = load_tokenizer(folder)
        sets = app.held_out(config, tokenizer)
        if not sets:
            raise ConfigurationError("nothing to evaluate: give --eval_sets SOURCE[,name=...] or --eval_dataset")
        with get_strategy(config).setup_distributed() as strategy:
            evaluate(config, strategy, folder, tokenizer, sets, app.rewards())
    except (RFTrainerError, DistError, EngineError) as error:
        for line in str(error).splitlines():
            print(f"[rank {rank}] error: {line}", file=sys.stderr)
        return 2
    return 0


def evaluation_sets(config: RFTConfig, tokenizer: object) -> dict[str, Sequence[EncodedPrompt]]:
    """The held-out sets of the configuration, by name.

    Raises:
        ConfigurationError: one cannot be read.
    """
    sources = parse_sources(config.eval_sets)
    if config.eval_dataset is not None:
        sources = [DataSource(source=config.eval_dataset)]
    sets: dict[str, Sequence[EncodedPrompt]] = {}
    for source in sources:
        records = load_source(
            source,
            split=config.eval_split,
            input_key=config.input_key,
            reference_key=config.reference_key,
            system_prompt=config.system_prompt,
            input_template=config.input_template,
        )[: config.eval_limit]
        sets[source.title] = PromptDataset(
            [replace(record, label="default") for record in records],
            tokenizer,  # type: ignore[arg-type]
            max_prompt_tokens=config.prompt_max_len,
        )
    return sets


def flexible_rewards() -> RewardComputationEngine:
    """One point for the right last number or marked answer."""
    return RewardComputationEngine(RewardRecipe(functions=[exact_answer("flexible")]))


def evaluate(
    config: RFTConfig,
    strategy: Strategy,
    folder: str,
    tokenizer: object,
    sets: Sets,
    rewards: RewardComputationEngine,
) -> dict[str, float]:
    """Metrics of a model; written to `output_dir` and shown. Collective over the world."""
    actor, step = checkpointed_actor(config, strategy, folder)
    strategy.create_engine(replace(engine_config(config, folder), enable_sleep=False))
    strategy.update_engine_weights(actor)
    ingredients = Ingredients(
        actor=actor, initial_model=None, tokenizer=tokenizer, prompts=(), held_out=sets, rewards=rewards
    )
    evaluator = make_evaluator(config, strategy, experience_maker(config, strategy, ingredients), sets)
    assert evaluator is not None
    metrics = evaluator.evaluate(step)
    strategy.on_main(lambda: _write_metrics(config.output_dir, step, metrics))
    _show(Console(enabled=strategy.data.rank == 0), config.output_dir, metrics, list(sets))
    return metrics


def _write_metrics(folder: Path, step: int, metrics: Mapping[str, float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(json.dumps({"step": step, **metrics}, indent=1), encoding="utf-8")


def _show(console: Console, folder: Path, metrics: Mapping[str, float], names: Sequence[str]) -> None:
    for name in names:
        prefix = f"eval/{name}/" if name else "eval/"
        rows = [(key.removeprefix(prefix), f"{value:.4g}") for key, value in metrics.items() if key.startswith(prefix)]
        # What has a slash left is a count, or belongs to a set with a name.
        console.table(name or "held out", [row for row in rows if "/" not in row[0]])
    console.line(f"metrics {folder / 'metrics.json'}, responses {folder / 'evaluation'}")


if __name__ == "__main__":
    sys.exit(main())
