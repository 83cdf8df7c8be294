"""Make a Hugging Face folder of a checkpoint.

    python -m rft_trainer.convert --config RUN/config.json --resume_from RUN/checkpoints/step_000010

The run's config.json gives model and strategy. Under FSDP2 any number of processes will do, with torchrun or without;
DeepSpeed needs that of the run. The folder is OUTPUT_DIR/model_step_000010. The other way needs no command: a run takes
such a folder by `--pretrain`.
"""

import os
import sys
from collections.abc import Sequence

from rft_dist import DistError
from rft_trainer.cli import parse_config
from rft_trainer.errors import ConfigurationError, RFTrainerError
from rft_trainer.models import load_tokenizer, quieten_transformers
from rft_trainer.preflight import check_resume
from rft_trainer.standalone import checkpointed_actor, initial_folder, one_process_without_torchrun
from rft_trainer.strategy import get_strategy


def main(argv: Sequence[str] | None = None) -> int:
    """Convert and return the exit code: 0, or 2 for an error of the user's with one line for each problem."""
    rank = os.environ.get("RANK", "0")
    try:
        config = parse_config(argv, {}, description="A Hugging Face folder from a checkpoint")
        if config.pretrain is None or config.resume_from is None:
            raise ConfigurationError(
                f"pretrain is {config.pretrain} and resume_from is {config.resume_from}: give --config with the run's "
                "config.json, and --resume_from with one of its checkpoints"
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
        if rank == "0":
            print(made)
    except (RFTrainerError, DistError) as error:
        for line in str(error).splitlines():
            print(f"[rank {rank}] error: {line}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
