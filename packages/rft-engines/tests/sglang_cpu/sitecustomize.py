"""Lets SGLang run on a CPU with what PyPI has: this folder goes first on PYTHONPATH, also for SGLang's processes.

PyPI's `sglang-kernel`, `cutlass` bindings and `torchaudio` are CUDA builds, and SGLang imports them although the CPU
path with torch_native attention never calls them. Their modules are stood in for by empty ones whose attributes are
mocks.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

_STUBBED = ("sgl_kernel", "cutlass", "torchaudio")


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
        pass


sys.meta_path.insert(0, _Stubs())
