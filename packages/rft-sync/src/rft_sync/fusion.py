"""Which checkpoint tensors an engine fuses into one of its own, told from their names."""

import re
from collections.abc import Iterable

# Members of one fused linear layer, as siblings under one parent.
FUSED_SIBLINGS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
_SET_OF = {member: index for index, members in enumerate(FUSED_SIBLINGS) for member in members}
_EXPERT = re.compile(r"^(.*\.experts)\.\d+\.")


def fused_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Groups of `names` that must arrive together, each in the order of `names`.

    q+k+v, gate+up (weights, biases and LoRA factors alike) and all experts of a layer. Groups of one name are left out.
    """
    groups: dict[tuple[str, int], list[str]] = {}
    for name in names:
        expert = _EXPERT.match(name)
        if expert is not None:
            groups.setdefault((expert.group(1), -1), []).append(name)
            continue
        parts = name.split(".")
        for depth, part in enumerate(parts):
            if part in _SET_OF:
                groups.setdefault((".".join(parts[:depth]), _SET_OF[part]), []).append(name)
                break
    return [tuple(members) for members in groups.values() if len(members) > 1]


def missing_members(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Sibling modules that a fused layer needs and `names` lacks: q_proj without k_proj and v_proj.

    Returns:
        Parent module -> absent members. Models that have only some of the members by design (an up projection without
        a gate) are told apart by their reference list, see `receiver.expected()`.
    """
    present: dict[tuple[str, int], set[str]] = {}
    for name in names:
        parts = name.split(".")
        for depth, part in enumerate(parts):
            if part in _SET_OF:
                present.setdefault((".".join(parts[:depth]), _SET_OF[part]), set()).add(part)
                break
    return {
        parent: tuple(member for member in FUSED_SIBLINGS[index] if member not in members)
        for (parent, index), members in present.items()
        if len(members) < len(FUSED_SIBLINGS[index])
    }
