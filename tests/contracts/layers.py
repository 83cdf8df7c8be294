"""What the layers of rft-trainer may speak of: the loop of no shard and no collective, the strategies of no reward."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SHARDING_MODULES = ("torch.distributed", "deepspeed", "rft_dist.collectives", "rft_trainer.strategy.fsdp")
SHARDING_CALLS = frozenset(
    {
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_reduce_metrics",
        "all_gather_ragged",
        "balanced_micro_batches",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "full_tensor",
        "fully_shard",
        "init_process_group",
        "raise_together",
        "reduce_scatter",
        "reshard",
        "run_on_first_rank",
        "unshard",
        "GatheredParameters",
    }
)
TASK_MODULES = ("rft_rewards", "rft_trainer.trainer", "rft_trainer.experience", "rft_trainer.evaluate")
TASK_WORDS = ("reward", "evaluat")


@dataclass(frozen=True)
class Layer:
    """Folders that must not import `modules`, use a name in `calls`, or contain one of `words` in a name."""

    folders: Sequence[str]
    modules: tuple[str, ...]
    calls: frozenset[str] = frozenset()
    words: tuple[str, ...] = ()


LAYERS = (
    Layer(("trainer", "experience"), SHARDING_MODULES, calls=SHARDING_CALLS),
    Layer(("strategy",), TASK_MODULES, words=TASK_WORDS),
)


def violations(source: str, layer: Layer) -> list[str]:
    """`line: name` of everything in `source` that the layer must not speak of."""
    rows = []
    for line, name, imported in _names(ast.parse(source)):
        if imported:
            if any(name == module or name.startswith(module + ".") for module in layer.modules):
                rows.append(f"{line}: imports {name}")
        elif name in layer.calls or any(word in name.lower() for word in layer.words):
            rows.append(f"{line}: {name}")
    return rows


def _names(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """(line, name, whether it is an imported module) of imports, attributes, functions and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, True) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}", True) for alias in node.names)
            yield from ((node.lineno, alias.name, False) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr, False
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id, False
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name, False
