"""GSM8K: reinforcement fine-tuning of a language model on grade-school problems.

    torchrun --nproc_per_node 2 apps/gsm8k --fsdp --recipe quickstart
    python apps/gsm8k evaluate --config RUN/config.json --resume_from RUN/checkpoints/step_000010
    python apps/gsm8k convert --config RUN/config.json --resume_from RUN/checkpoints/step_000010

The last two are `rft_trainer.evaluate` and `rft_trainer.convert`, which here know the bundled model and the generated
problems too. Reads from top to bottom: flags, checks on every rank, process groups, warm start, models, engine,
training, summary.
"""

import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace

from gsm8k_app.gold_answers import demonstrations
from gsm8k_app.inputs import Inputs, held_out_sets, prepare_inputs, with_model_folder
from gsm8k_app.recipes import RECIPES
from gsm8k_app.rewards import gsm8k_rewards
from gsm8k_app.summary import write_summary

from rft_dist import DistError, TorchrunEnvironment
from rft_engines import EngineError
from rft_trainer import convert, evaluate
from rft_trainer.checkpoint import resolve_resume
from rft_trainer.cli import parse_config
from rft_trainer.config import RFTConfig
from rft_trainer.data import Demonstrations
from rft_trainer.errors import RFTrainerError, RunInterrupted
from rft_trainer.models import quieten_transformers
from rft_trainer.preflight import claim_output, dry_run, preflight, with_further_problems
from rft_trainer.report import Console
from rft_trainer.roles import build_initial_model, build_policy, prepare_critic, prepare_teacher
from rft_trainer.session import Ingredients, build_trainer
from rft_trainer.standalone import AppParts
from rft_trainer.strategy import Strategy, get_strategy
from rft_trainer.warm_start import is_warm_started, starting_folder, warm_start

PARTS = AppParts(recipes=RECIPES, resolve=with_model_folder, held_out=held_out_sets, rewards=gsm8k_rewards)


def main(argv: Sequence[str] | None = None) -> int:
    """Run and return the exit code: 0, 130 for a signal, 2 for an error of the user's with a line for each problem."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["evaluate"]:
        return evaluate.main(arguments[1:], PARTS)
    if arguments[:1] == ["convert"]:
        return convert.main(arguments[1:], PARTS)
    rank, started = "0", time.perf_counter()
    try:
        config = resolve_resume(parse_config(arguments, RECIPES, description="GSM8K by reinforcement fine-tuning"))
        if config.dry_run:
            print(dry_run(with_model_folder(config)))
            return 0
        environment = TorchrunEnvironment.from_environ()
        rank = str(environment.rank)
        preflight(config, environment)
        quieten_transformers()
        # torch warns of its own calls: FSDP2 and DeepSpeed still use collectives that torch 2.13 renames.
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.", category=FutureWarning)
        inputs = prepare_inputs(config)
        # A resumed run has its warm start behind it.
        examples = (
            None if not config.warm_starts or is_warm_started(config) else demonstrations(config, inputs.model_folder)
        )
        with get_strategy(config).setup_distributed() as strategy:
            strategy.on_main(lambda: claim_output(config))
            inputs = warm_started(config, inputs, examples, strategy)
            train(config, inputs, strategy, started=started)
    except RunInterrupted as stopped:
        if rank == "0":
            print(stopped, file=sys.stderr)
        return 130
    except (RFTrainerError, DistError, EngineError) as error:
        for line in str(with_further_problems(error)).splitlines():
            print(f"[rank {rank}] error: {line}", file=sys.stderr)
        return 2
    return 0


def warm_started(config: RFTConfig, inputs: Inputs, examples: Demonstrations | None, strategy: Strategy) -> Inputs:
    """The inputs with the warm-started model in the place of the first one. Collective over the world."""
    if examples is not None:
        warm_start(
            config,
            strategy,
            folder=inputs.model_folder,
            tokenizer=inputs.tokenizer,
            demonstrations=examples,
            say=Console(enabled=strategy.data.rank == 0).line,
        )
    folder = starting_folder(config, inputs.model_folder)
    return replace(inputs, model_folder=folder, engine=replace(inputs.engine, model_path=folder))


def train(config: RFTConfig, inputs: Inputs, strategy: Strategy, *, started: float) -> None:
    """Models, engine and the loop. Collective over the world."""
    actor = strategy.prepare(build_policy(config, inputs.model_folder, bf16=strategy.bf16))
    initial_model = build_initial_model(config, inputs.model_folder, strategy, actor)
    critic = prepare_critic(config, strategy, inputs.model_folder)
    teacher = prepare_teacher(config, strategy)
    # Last: vLLM measures what the models have left of the device.
    strategy.create_engine(inputs.engine)
    ingredients = Ingredients(
        actor=actor,
        initial_model=initial_model,
        critic=critic,
        teacher=teacher,
        tokenizer=inputs.tokenizer,
        prompts=inputs.train,
        held_out=inputs.held_out,
        rewards=gsm8k_rewards(config.partial_credit),
        started=started,
    )
    trainer = build_trainer(config, strategy, ingredients)
    evaluations = trainer.fit()
    # Without a round the model is the one that the run began with, and lies where it lay.
    if trainer.finished_steps:
        with trainer.averaged():
            strategy.save_model(actor, config.output_dir / "model", inputs.tokenizer)
            if config.lora_rank:
                strategy.save_adapter(actor, config.output_dir / "adapter")
    seconds = time.perf_counter() - started
    strategy.on_main(lambda: write_summary(config, evaluations, trainer.progress, strategy=strategy, seconds=seconds))


if __name__ == "__main__":
    sys.exit(main())
