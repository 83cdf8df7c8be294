"""Lets SGLang run on a CPU with what PyPI has: this folder goes first on PYTHONPATH, also for SGLang's processes.

PyPI's `sglang-kernel`, `cutlass` bindings and `torchaudio` are CUDA builds, and SGLang imports them although the CPU
path with torch_native attention never calls them. Their modules are stood in for by empty ones whose attributes are
mocks. Some models look up operators of the kernel package while they are imported, also where they will not be used
(SGLang 0.5.21's Qwen3.5, which the processor of all Qwen-VL models imports): those are declared without a body.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

_STUBBED = ("sgl_kernel", "cutlass", "torchaudio")
_OPERATORS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_qkvzba_split_reshape_cat_cpu",
    "fused_gdn_gating_cpu",
)
_libraries = []


class _Stub(ModuleType):
    __path__ = ()
    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class _Stubs(MetaPathFinder, Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in _STUBBED:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        if module.__name__ == "sgl_kernel":
            import torch

            library = torch.library.Library("sgl_kernel", "FRAGMENT")
            for name in _OPERATORS:
                library.define(f"{name}(Tensor x) -> Tensor")
            _libraries.append(library)  # an operator lives as long as its library


sys.meta_path.insert(0, _Stubs())
