"""The short help of a command line: groups of settings, and of each the few flags of every day."""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import fields

from rft_trainer.config.reading import setting_groups
from rft_trainer.config.run_config import RFTConfig

EVERYDAY = (
    "output_dir",
    "max_steps",
    "save_steps",
    "resume",
    "actor_learning_rate",
    "lora_rank",
    "advantage_estimator",
    "policy_loss",
    "init_kl_coef",
    "engine_type",
    "rollout_batch_size",
    "n_samples_per_prompt",
    "generate_max_len",
    "temperature",
    "fsdp",
    "zero_stage",
    "dry_run",
    "eval_dataset",
    "eval_steps",
    "pretrain",
    "dataset",
)
"""What a first run is likely to set."""
WIDTH = 100
_FLAG_WIDTH = 24


def short_help(default: RFTConfig) -> str:
    """Each group with its everyday flags, their first sentence and the value of `default`."""
    parts = []
    for name, group in setting_groups().items():
        texts = field_texts(group)
        chosen = [item.name for item in fields(group) if item.name in EVERYDAY]
        more = len(fields(group)) - len(chosen)
        count = f"{more} more" if chosen else f"{more} flags"
        parts.append(f"\n{name}: {_sentence(group.__doc__ or '')}" + (f" ({count})" if more else ""))
        parts += [_line(flag, texts[flag], getattr(default, flag)) for flag in chosen]
    return "\n".join(parts)


def field_texts(group: type) -> Mapping[str, str]:
    """The text behind each field of a group, as it stands in the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(group))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for item, behind in zip(body.body, body.body[1:], strict=False):
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        if isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant):
            texts[item.target.id] = " ".join(str(behind.value.value).split())
    return texts


def _line(flag: str, text: str, value: object) -> str:
    shown = "" if value is None or value is False else f" [{value}]"
    lines = textwrap.wrap(_sentence(text) + shown, WIDTH - _FLAG_WIDTH - 4)
    name = f"  --{flag}".ljust(_FLAG_WIDTH + 2)
    return ("\n" + " " * (_FLAG_WIDTH + 2)).join([name + lines[0], *lines[1:]])


def _sentence(text: str) -> str:
    first = text.strip().splitlines()[0].partition(". ")[0].partition("; ")[0]
    return first.rstrip(".")
