"""The evaluator of a run from its configuration."""

from collections.abc import Mapping, Sequence

from rft_engines import SamplingParams
from rft_rewards import symbolic_answer
from rft_trainer.config import RFTConfig
from rft_trainer.data import EncodedPrompt
from rft_trainer.experience.maker import FastExperienceMaker
from rft_trainer.strategy import Strategy
from rft_trainer.trainer.evaluation import Evaluator, Extractor, three_extractors


def make_evaluator(
    config: RFTConfig,
    strategy: Strategy,
    maker: FastExperienceMaker,
    held_out: Sequence[EncodedPrompt] | Mapping[str, Sequence[EncodedPrompt]],
) -> Evaluator | None:
    """The evaluator of a run; None without a held-out set."""
    if not held_out:
        return None
    return Evaluator(
        sets=held_out if isinstance(held_out, Mapping) else {"": held_out},
        sampling=evaluation_sampling(config),
        greedy=config.eval_greedy,
        maker=maker,
        data=strategy.data,
        extractors=evaluation_extractors(config),
        pass_at=config.eval_pass_at,
        majority=config.eval_majority,
        folder=config.output_dir / "evaluation",
    )


def evaluation_extractors(config: RFTConfig) -> tuple[Extractor, ...]:
    """What scores the responses of an evaluation besides the rewards."""
    symbolic = (symbolic_answer(name="accuracy_symbolic"),) if config.eval_symbolic else ()
    return (*(three_extractors() if config.eval_extractors else ()), *symbolic)


def evaluation_sampling(config: RFTConfig) -> SamplingParams:
    """The evaluation's own sampling."""
    return SamplingParams(
        n=config.eval_samples,
        temperature=config.eval_temperature,
        top_p=config.eval_top_p,
        top_k=config.eval_top_k,
        max_new_tokens=config.eval_max_len or config.generate_max_len,
    )
