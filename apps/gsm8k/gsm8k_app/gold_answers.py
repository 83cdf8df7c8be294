"""What a warm start imitates: the data set's own worked answers."""

from gsm8k_app.inputs import records_of, worked_answer
from rft_trainer.config import RFTConfig
from rft_trainer.data import DataSource, Demonstrations, PromptDataset, encode_demonstrations, parse_sources
from rft_trainer.errors import ConfigurationError
from rft_trainer.models import load_tokenizer
from rft_trainer.warm_start import warm_start_steps


def demonstrations(config: RFTConfig, model_folder: str) -> Demonstrations:
    """Worked answers behind the prompts of the training set.

    Raises:
        ConfigurationError: the data cannot be read, a row has a bare answer and no worked one, or the warm start's
            schedule does not fit.
    """
    tokenizer = load_tokenizer(model_folder)
    sources = parse_sources(config.blend) or [DataSource(source=str(config.dataset))]
    records = [record for source in sources for record in records_of(config, source, "train", parse=worked_answer)]
    bare = [record.origin for record in records if "####" not in (record.reference or "")]
    if bare:
        raise ConfigurationError(
            f"{len(bare)} rows have an answer without '####', the first at {bare[0]}: a warm start imitates worked "
            "answers; leave out the --warm_start flags"
        )
    prompts = PromptDataset(records, tokenizer, max_prompt_tokens=config.prompt_max_len)
    found = encode_demonstrations(
        prompts,
        [record.reference or "" for record in records],
        tokenizer,
        max_answer_tokens=config.generate_max_len,
    )
    warm_start_steps(config, len(found.examples))
    return found
