"""What a rank is about to call, in words and as a fingerprint that ranks compare."""

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

# Frames inside these folders are not where a user's call was made.
_LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One call of a collective on one rank.

    Attributes:
        op: name of the function.
        signature: dtypes and shapes that must agree, as text; empty where ranks may pass different things.
        detail: root, reduction and the like, which must agree too.
        group: name of the process group, the same on every rank.
        ranks: members of the group.
        sequence: number of this call among those with the same members, from 1.
        tag: what the caller's code was doing (`collective_tag`).
        site: file and line of the call; it need not agree.
    """

    op: str
    signature: str
    detail: str
    group: str
    ranks: tuple[int, ...]
    sequence: int
    tag: str
    site: str = field(compare=False)

    @cached_property
    def fingerprint(self) -> int:
        """63 bits over everything that must agree."""
        agreed = (self.op, self.signature, self.detail, self.group, self.ranks, self.sequence, self.tag)
        return int.from_bytes(hashlib.blake2b(repr(agreed).encode(), digest_size=8).digest(), "little") >> 1

    def __str__(self) -> str:
        arguments = ", ".join(part for part in (self.signature, self.detail) if part)
        tag = f" tagged {self.tag!r}" if self.tag else ""
        return (
            f"{self.op}({arguments}){tag} on group {self.group!r} of ranks {list(self.ranks)} "
            f"(call {self.sequence} of these ranks) at {self.site}"
        )


# Arguments whose dtype and shape must agree over the ranks. Left out are those that may differ: the inputs of an
# all_gather into a list, the outputs of a reduce_scatter from a list, and everything that is pickled.
_AGREEING_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "all_gather": ("tensor_list",),
    "all_gather_into_tensor": ("input_tensor", "output_tensor"),
    "all_gather_object": (),
    "all_gather_single": ("input_tensor", "output_tensor"),
    "all_reduce": ("tensor",),
    "all_reduce_coalesced": ("tensors",),
    "all_to_all": (),
    "all_to_all_single": (),
    "barrier": (),
    "broadcast": ("tensor",),
    "broadcast_object_list": (),
    "gather": ("tensor",),
    "gather_object": (),
    "monitored_barrier": (),
    "new_group": (),
    "reduce": ("tensor",),
    "reduce_scatter": ("input_list",),
    "reduce_scatter_single": ("input", "output"),
    "reduce_scatter_tensor": ("input", "output"),
    "scatter": ("tensor",),
    "scatter_object_list": (),
}
_AGREEING_CHOICES = ("op", "src", "dst", "group_src", "group_dst", "ranks", "backend")

OPERATIONS = tuple(_AGREEING_ARGUMENTS)


class Describer:
    """Turns one function's arguments into the words that must agree over ranks."""

    def __init__(self, op: str, function: Callable[..., Any]) -> None:
        self.op = op
        self._signature = inspect.signature(function)

    def arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """All arguments of the call by name, defaults filled in."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def signature(self, arguments: Mapping[str, Any]) -> str:
        """Dtypes and shapes that must agree."""
        if self.op == "all_to_all_single":
            # The splits are each rank's own affair; what lies behind the first dimension is not.
            return f"{_dtype(arguments['input'])}[*, {list(arguments['input'].shape[1:])}]"
        return ", ".join(_shape(arguments[name]) for name in _AGREEING_ARGUMENTS[self.op])

    def detail(self, arguments: Mapping[str, Any]) -> str:
        """Root, reduction and members that must agree."""
        chosen = ((name, arguments.get(name)) for name in _AGREEING_CHOICES)
        return ", ".join(f"{name}={_choice(value)}" for name, value in chosen if value is not None)


def call_site() -> str:
    """File, line and function of the innermost frame outside torch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARY_FOLDERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(argument: torch.Tensor | Sequence[torch.Tensor]) -> str:
    if isinstance(argument, torch.Tensor):
        return f"{_dtype(argument)}{list(argument.shape)}"
    return "[" + ", ".join(_shape(tensor) for tensor in argument) + "]"


def _choice(value: Any) -> str:
    # ReduceOp's text is RedOpType.SUM or, for an instance, an address.
    return str(getattr(value, "op", value)).rsplit(".", 1)[-1].lower()
