"""Everything that can be checked on one rank without talking to the others, all problems at once."""

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rft_dist import DistError, ParallelLayout, TorchrunEnvironment
from rft_engines.combinations import check_combination
from rft_trainer.algorithms import AdvantageEstimator, PolicyLoss, check_aggregation_mode, check_kl_kind
from rft_trainer.checkpoint import MANIFEST
from rft_trainer.config import RFTConfig
from rft_trainer.config.lora import LARGEST_VLLM_RANK
from rft_trainer.data import parse_sources
from rft_trainer.engine_split import check_engine_split
from rft_trainer.errors import ConfigurationError, UnsupportedCombination
from rft_trainer.memory.dry_run import describe, make_plan
from rft_trainer.memory.shapes import read_config
from rft_trainer.models.loading import check_model_folder

RUN_MARKER = "config.json"
_EXTRAS = {
    "deepspeed": ("DeepSpeed training", "rft-trainer[deepspeed]", "or train with --fsdp"),
    "peft": ("LoRA", "rft-trainer[lora]", "or leave out --lora_rank"),
    "vllm": ("the vLLM engine", "rft-engines[vllm]", "or use --engine_type hf"),
    "sglang": ("the SGLang engine", "rft-engines[sglang]", "or use --engine_type hf"),
    "wandb": ("logging to wandb", "rft-trainer[wandb]", "or leave out --wandb_project"),
    "tensorboard": ("TensorBoard logging", "rft-trainer[tensorboard]", "or pass --no_tensorboard"),
}


def preflight(config: RFTConfig, environment: TorchrunEnvironment) -> None:
    """Check settings, extras, model folder and output folder before the first collective.

    Every rank runs it and finds the same problems.

    Raises:
        ConfigurationError: one line per problem.
    """
    _raise_all([*_setting_checks(config, environment), *_run_checks(config)])


def dry_run(config: RFTConfig) -> str:
    """The plan of a run on `plan_ranks` ranks, or on those of the launcher. No weights, no output, no extras.

    Raises:
        ConfigurationError: one line per problem of the settings.
    """
    environment = _environment(config)
    _raise_all([*_setting_checks(config, environment), *_paper_checks(config)])

    def check(turned: RFTConfig) -> None:
        _raise_all(_setting_checks(turned, environment))

    return describe(make_plan(config, ranks=environment.world_size, check=check))


def _environment(config: RFTConfig) -> TorchrunEnvironment:
    """Of the launcher, or of the ranks that a dry run plans for."""
    if config.plan_ranks is None:
        return TorchrunEnvironment.from_environ()
    local = min(config.plan_ranks, config.plan_ranks_per_node)
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": config.plan_ranks, "LOCAL_WORLD_SIZE": local}
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    return TorchrunEnvironment.from_environ({name: str(value) for name, value in variables.items()} | place)


def _paper_checks(config: RFTConfig) -> list[Callable[[], object]]:
    """Checks of what a dry run reads."""
    return [lambda: check_engine_split(config), *(partial(read_config, f) for f in _model_folders(config))]


def _run_checks(config: RFTConfig) -> list[Callable[[], object]]:
    """Checks of what a run finds on this machine."""
    return [
        lambda: _check_extras(config),
        lambda: check_resume(config),
        lambda: check_output(config),
        lambda: check_engine_split(config),
        *(partial(check_model_folder, folder) for folder in _model_folders(config)),
    ]


def _setting_checks(config: RFTConfig, environment: TorchrunEnvironment) -> list[Callable[[], object]]:
    """Checks that follow from settings and the number of ranks alone."""
    return [
        lambda: _check_layout(config, environment),
        lambda: _check_batches(config, environment.world_size),
        lambda: _check_sharing(config, environment.world_size),
        lambda: _check_estimator(config),
        lambda: PolicyLoss.get(config.policy_loss).resolve(config.loss_options()),
        lambda: check_kl_kind(config.kl_estimator),
        lambda: check_aggregation_mode(config.loss_aggregation),
        lambda: _check_sampling(config),
        lambda: _check_required(config),
        lambda: parse_sources(config.blend),
        lambda: parse_sources(config.eval_sets),
        lambda: _check_offload(config),
        lambda: _check_sharding(config, environment.world_size),
        lambda: check_combination(
            backend="fsdp" if config.fsdp else "deepspeed",
            weights="full" if not config.lora_rank else "lora_adapter" if config.sends_adapter_only else "lora_merged",
            engine=config.engine_type,
            modality="text",
        ),
        lambda: _check_adapter_rank(config),
        lambda: _check_average(config),
        lambda: _check_warm_start(config, environment.world_size),
    ]


def _model_folders(config: RFTConfig) -> list[str]:
    return [folder for folder in (config.pretrain, config.critic_pretrain, config.teacher) if folder is not None]


def with_further_problems(error: BaseException) -> BaseException:
    """`error` with what else is wrong with the settings; as it is where it is not about settings of a run.

    Settings that cannot be made say what is wrong with each of them. What is wrong with them together, with the number
    of ranks or with folders is found all the same, so that one launch names everything.
    """
    config = getattr(error, "settings", None)
    if not isinstance(config, RFTConfig):
        return error
    known = str(error).splitlines()
    try:
        environment = _environment(config)
    except DistError as problem:
        return ConfigurationError("\n".join([*known, str(problem)]))
    checks = _setting_checks(config, environment)
    checks += _paper_checks(config) if config.dry_run else _run_checks(config)
    # A check may stumble over a value that is reported already.
    found = _problems(checks, stumbling=(TypeError, ArithmeticError, LookupError, AttributeError))
    reported = {line.split(" ")[0] for line in known}
    return ConfigurationError("\n".join([*known, *(line for line in found if line.split(" ")[0] not in reported)]))


def _problems(checks: Sequence[Callable[[], object]], *, stumbling: tuple[type[Exception], ...] = ()) -> list[str]:
    """One line for each problem. A check raises one problem or yields several."""
    problems: list[str] = []
    for check in checks:
        try:
            found = check()
            if isinstance(found, Iterator):
                problems += found
        except (ValueError, NotImplementedError) as problem:
            problems += str(problem).splitlines()
        except stumbling:
            continue
    return problems


def _raise_all(checks: Sequence[Callable[[], object]]) -> None:
    problems = _problems(checks)
    if problems:
        raise ConfigurationError("\n".join(problems))


def _check_layout(config: RFTConfig, environment: TorchrunEnvironment) -> Iterator[str]:
    ParallelLayout(
        environment.world_size, config.engine_tp_size, local_world_size=environment.local_world_size
    ).tp_groups()
    if config.engine_type == "hf" and config.engine_tp_size > 1:
        yield (
            f"engine_tp_size {config.engine_tp_size} and engine_type 'hf' do not work together: the embedded engine is "
            "whole on each rank; use --engine_tp_size 1, or --engine_type vllm"
        )


def _check_sharing(config: RFTConfig, world_size: int) -> None:
    if not config.share_engine_weights:
        return
    against = {
        f"{world_size} ranks, each of which holds a part of the weights": world_size > 1,
        "DeepSpeed, which keeps parameters in buffers of its own (use --fsdp)": not config.fsdp,
        "lora_rank, whose adapters are merged on the way": config.lora_rank > 0,
        "offload_trained, which would take the engine's weights along": config.offload_trained,
        "fsdp_cpu_offload, whose weights are on the host": config.fsdp_cpu_offload,
        "precision bf16, which keeps fp32 masters (use --precision fp32)": config.precision == "bf16",
    }
    reasons = [reason for reason, holds in against.items() if holds]
    if reasons:
        raise UnsupportedCombination(f"share_engine_weights does not work with {'; '.join(reasons)}")


def _check_batches(config: RFTConfig, world_size: int) -> Iterator[str]:
    if config.rollout_batch_size % world_size:
        yield (
            f"rollout_batch_size is {config.rollout_batch_size}, which {world_size} ranks do not divide: "
            f"give a multiple of {world_size}"
        )
    if config.train_batch_size is not None and config.train_batch_size % world_size:
        yield (
            f"train_batch_size is {config.train_batch_size}, which {world_size} ranks do not divide: "
            f"give a multiple of {world_size}"
        )


def _check_estimator(config: RFTConfig) -> Iterator[str]:
    estimator = AdvantageEstimator.get(config.advantage_estimator)
    try:
        estimator.check(group_size=config.n_samples_per_prompt, has_teacher=config.teacher is not None)
    except ConfigurationError as problem:
        yield str(problem)
    if config.teacher is not None and not estimator.needs_teacher:
        yield (
            f"teacher {config.teacher!r} and advantage_estimator {estimator.name!r} do not work together: only "
            "'on_policy_distillation' reads a teacher"
        )
    for name in ("critic_pretrain", "critic_warmup_steps"):
        if getattr(config, name) and not estimator.needs_critic:
            yield (
                f"{name} {getattr(config, name)!r} and advantage_estimator {estimator.name!r} do not work together: it "
                "has no critic; use --advantage_estimator gae"
            )
    is_norm = estimator.name in ("group_norm", "grpo", "on_policy_distillation")
    for name, own in (("advantage_std", "sample"), ("advantage_scale", "group")):
        if getattr(config, name) != own and not is_norm:
            yield (
                f"{name} {getattr(config, name)!r} and advantage_estimator {estimator.name!r} do not work together: it "
                "divides by no deviation; use group_norm"
            )
    if config.gae_lambda != 0.95 and not estimator.needs_critic:
        yield (
            f"gae_lambda {config.gae_lambda} and advantage_estimator {estimator.name!r} do not work together: use gae"
        )


def _check_sampling(config: RFTConfig) -> Iterator[str]:
    """What the engine can sample and report, so that training sees the distribution that was sampled from."""
    if config.first_token_temperature is not None and config.engine_type != "hf":
        yield (
            f"first_token_temperature {config.first_token_temperature} and engine_type {config.engine_type!r} do not "
            "work together: it has one temperature for all tokens of a response; use --engine_type hf"
        )
    if config.engine_type == "sglang" and (config.top_p < 1 or config.top_k > 0):
        yield (
            f"top_p {config.top_p}, top_k {config.top_k} and engine_type 'sglang' do not work together: it reports "
            "log-probabilities from before the truncation; use --top_p 1 --top_k 0, or another engine"
        )
    if config.temperature == 0 and config.n_samples_per_prompt > 1:
        yield (
            f"temperature 0 and n_samples_per_prompt {config.n_samples_per_prompt} do not work together: greedy "
            "responses to a prompt are all the same; raise temperature"
        )


def _check_extras(config: RFTConfig) -> Iterator[str]:
    needed = [] if config.fsdp else ["deepspeed"]
    needed += [config.engine_type] if config.engine_type != "hf" else []
    needed += ["peft"] if config.lora_rank else []
    needed += ["tensorboard"] if config.tensorboard else []
    needed += ["wandb"] if config.wandb_project is not None else []
    for module in needed:
        if importlib.util.find_spec(module) is None:
            feature, requirement, otherwise = _EXTRAS[module]
            extra = requirement.partition("[")[2].rstrip("]")
            yield (
                f"{feature} needs the extra {extra!r}: add `--extra {extra}` to `uv run`, or "
                f"`pip install '{requirement}'`, {otherwise}"
            )


def check_resume(config: RFTConfig) -> None:
    """A checkpoint to continue from is complete as far as its folder shows.

    Raises:
        ConfigurationError: it has no manifest.
    """
    if config.resume_from is not None and not (config.resume_from / MANIFEST).is_file():
        raise ConfigurationError(
            f"resume_from is {config.resume_from}: no {MANIFEST} there; give a folder checkpoints/step_NNNNNN of a run"
        )


def _check_offload(config: RFTConfig) -> None:
    if config.adam_offload and not config.fsdp and config.zero_stage == 0:
        raise UnsupportedCombination("adam_offload and ZeRO stage 0 do not work together: use --zero_stage 1, 2 or 3")


def _check_sharding(config: RFTConfig, world_size: int) -> Iterator[str]:
    """Settings of one strategy with the other are refused by both names."""
    fsdp = {"fsdp_shard_size": None, "fsdp_reshard": True, "fsdp_cpu_offload": False}
    zero = {"zero_hpz_size": 1, "zero_overlap": None}
    for name, own in (zero if config.fsdp else fsdp).items():
        if getattr(config, name) != own:
            halves = ("FSDP2", "leave it out, or leave out --fsdp") if config.fsdp else ("DeepSpeed", "add --fsdp")
            yield (f"{name} {getattr(config, name)} and {halves[0]} do not work together: {halves[1]}")
    if config.fsdp_cpu_offload and config.adam_offload:
        yield (
            "fsdp_cpu_offload and adam_offload do not work together: the optimiser is on the host already; "
            "leave out --adam_offload"
        )
    if config.zero_hpz_size > 1 and config.zero_stage != 3:
        yield (
            f"zero_hpz_size {config.zero_hpz_size} and ZeRO stage {config.zero_stage} do not work together: only stage "
            "3 has a secondary partition; use --zero_stage 3"
        )
    for name in ("fsdp_shard_size", "zero_hpz_size"):
        size = getattr(config, name)
        if size is not None and world_size % size:
            yield (f"{name} is {size}, which does not divide {world_size} ranks: choose a divisor")


def _check_adapter_rank(config: RFTConfig) -> None:
    if config.sends_adapter_only and config.engine_type == "vllm" and config.lora_rank > LARGEST_VLLM_RANK:
        raise UnsupportedCombination(
            f"lora_sync adapter, lora_rank {config.lora_rank} and engine_type 'vllm' do not work together: it applies "
            f"adapters up to rank {LARGEST_VLLM_RANK}; use --lora_sync merged"
        )


def _check_average(config: RFTConfig) -> None:
    if config.ema_decay > 0 and not config.fsdp and config.zero_stage == 3:
        raise UnsupportedCombination(
            f"ema_decay {config.ema_decay} and ZeRO stage 3 do not work together: it holds some weights twice; use "
            "--fsdp, or --zero_stage 2"
        )


def _check_warm_start(config: RFTConfig, world_size: int) -> Iterator[str]:
    if not config.warm_starts:
        return
    if config.warm_start_batch_size % world_size:
        yield (
            f"warm_start_batch_size is {config.warm_start_batch_size}, which {world_size} ranks do not divide: "
            f"give a multiple of {world_size}"
        )
    source, own = config.resume_from, config.output_dir.resolve()
    if source is not None and own not in source.resolve().parents:
        yield (
            f"resume_from {source} and a warm start do not work together: the checkpoint has one behind it; leave out "
            "the --warm_start flags and give --pretrain the folder warm_start of the run that it is from"
        )


def _check_required(config: RFTConfig) -> Iterator[str]:
    if config.pretrain is None:
        yield ("pretrain is not set: give --pretrain, or a --recipe that sets it")
    if config.dataset is None and not config.blend:
        yield ("dataset is not set: give --dataset or --blend, or a --recipe that sets one")


def check_output(config: RFTConfig) -> None:
    """The output folder can be written and holds nothing that would be lost.

    Raises:
        ConfigurationError: it holds a run and neither overwrite nor a resume from inside it was asked for, it holds
            something that is no run, or it cannot be written.
    """
    folder = config.output_dir
    resumes_here = config.resume == "auto" or (
        config.resume_from is not None and folder.resolve() in config.resume_from.resolve().parents
    )
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"output_dir is {folder}: a file has that name; choose another folder")
    if folder.is_dir() and any(folder.iterdir()) and not resumes_here:
        if not (folder / RUN_MARKER).is_file():
            raise ConfigurationError(f"output_dir is {folder}: it holds files that no run wrote; choose another folder")
        if not config.overwrite:
            raise ConfigurationError(
                f"output_dir is {folder}: it already holds a run; choose another folder, resume with --resume auto or "
                "--resume_from, or delete it with --overwrite"
            )
    existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.is_dir())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigurationError(f"output_dir is {folder}: {existing} cannot be written ({error.strerror})") from error


def claim_output(config: RFTConfig) -> None:
    """Create the output folder on the one rank that writes; an old run goes only with `overwrite`."""
    check_output(config)
    if config.overwrite and config.resume_from is None and config.output_dir.is_dir():
        shutil.rmtree(config.output_dir)
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    # From now on the folder is known as a run's, also if this one ends before its first step.
    (config.output_dir / RUN_MARKER).write_text(json.dumps(config.as_dict(), indent=1))
