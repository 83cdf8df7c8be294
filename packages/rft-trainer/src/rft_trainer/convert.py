"""Make a Hugging Face folder of a checkpoint, or a checkpoint of a Hugging Face folder.

    python -m rft_trainer.convert --config RUN/config.json --resume_from RUN/checkpoints/step_000010
    python -m rft_trainer.convert --config RUN/config.json --from_model FOLDER --output_dir NEW

The first makes OUTPUT_DIR/model_step_000010. The second makes NEW/checkpoints/step_000000, which holds the weights of
FOLDER and an optimiser that has not begun; the reference and frozen layers stay those of `--pretrain`. A run goes on
from it by `--config NEW/config.json --resume auto`.

The config.json of a run gives model and strategy. Where its model is a name that only an app knows, use that app's own
command, or give the run's exported model by `--pretrain RUN/model`. Under FSDP2 any number of processes will do, with
torchrun or without; DeepSpeed needs that of the run.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from rft_dist import DistError
from rft_trainer.cli import parse_config
from rft_trainer.config import RFTConfig
from rft_trainer.errors import ConfigurationError, RFTrainerError
from rft_trainer.models import checkpoint_folder, load_tokenizer, quieten_transformers
from rft_trainer.preflight import check_output, check_resume, claim_output
from rft_trainer.run_files import write_config
from rft_trainer.standalone import (
    AppParts,
    check_model_fits,
    checkpoint_of_model,
    checkpointed_actor,
    initial_folder,
    one_process_without_torchrun,
)
from rft_trainer.strategy import get_strategy


def main(argv: Sequence[str] | None = None, app: AppParts | None = None) -> int:
    """Convert and return the exit code: 0, or 2 for an error of the user's with one line for each problem."""
    rank = os.environ.get("RANK", "0")
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--from_model")
    chosen, flags = chooser.parse_known_args(list(sys.argv[1:] if argv is None else argv))
    try:
        config = parse_config(flags, {} if app is None else app.recipes, description=__doc__)
        config = config if app is None else app.resolve(config)
        made = to_model(config) if chosen.from_model is None else to_checkpoint(config, chosen.from_model)
        if rank == "0":
            print(made)
    except (RFTrainerError, DistError) as error:
        for line in str(error).splitlines():
            print(f"[rank {rank}] error: {line}", file=sys.stderr)
        return 2
    return 0


def to_model(config: RFTConfig) -> str:
    """A Hugging Face folder of the checkpoint `resume_from`; its place. Collective over the world that it begins.

    Raises:
        ConfigurationError: no model or no checkpoint is named, or one of them is not there.
        CheckpointError: the checkpoint is damaged or of another model or strategy.
    """
    if config.pretrain is None or config.resume_from is None:
        raise ConfigurationError(
            f"pretrain is {config.pretrain} and resume_from is {config.resume_from}: give --config with the run's "
            "config.json, and --resume_from with one of its checkpoints; for the other way --from_model FOLDER"
        )
    check_resume(config)
    one_process_without_torchrun()
    quieten_transformers()
    folder = initial_folder(config)
    tokenizer = load_tokenizer(folder)
    with get_strategy(config).setup_distributed() as strategy:
        actor, step = checkpointed_actor(config, strategy, folder)
        made = config.output_dir / f"model_step_{step:06d}"
        strategy.save_model(actor, made, tokenizer)
    return str(made)


def to_checkpoint(config: RFTConfig, model: str) -> str:
    """A checkpoint before the first step with the weights of the folder `model`; its place. Collective over the world.

    Raises:
        ConfigurationError: the folder holds no model, or none that a checkpoint of this run can hold; or `output_dir`
            holds something.
    """
    # The reference of a run without a model of its own is the one that it begins with. The config.json of a run that
    # was allowed to overwrite an earlier one allows nothing here.
    config = replace(config, pretrain=config.pretrain or model, resume="off", resume_from=None, overwrite=False)
    assert config.pretrain is not None
    if config.output_dir.exists() and not (config.output_dir.is_dir() and not any(config.output_dir.iterdir())):
        raise ConfigurationError(f"output_dir is {config.output_dir}: it is there; give --output_dir with a new folder")
    check_output(config)
    one_process_without_torchrun()
    quieten_transformers()
    folder, weights = checkpoint_folder(config.pretrain), checkpoint_folder(model)
    load_tokenizer(folder)
    check_model_fits(config, folder, weights)
    with get_strategy(config).setup_distributed() as strategy:
        strategy.on_main(lambda: claim_output(config))
        made = checkpoint_of_model(config, strategy, folder, weights)
        strategy.on_main(lambda: write_config(config))
    return str(made)


if __name__ == "__main__":
    sys.exit(main())
