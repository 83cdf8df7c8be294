"""What the adapters call of vLLM and SGLang exists in the oldest and newest releases that are supported."""

from __future__ import annotations

import ast
import re

import pytest

from contracts.workspace import ROOT, read_toml
from release.engine_sources import EngineSource, bound, unpacked

RELEASES = {"vllm": ("0.24.0", "0.32.0"), "sglang": ("0.5.14", "0.5.21")}
SOURCES = ROOT / "packages"
ADAPTERS = {
    "vllm": [
        *sorted((SOURCES / "rft-engines/src/rft_engines/vllm").glob("*.py")),
        SOURCES / "rft-sync/src/rft_sync/receivers/vllm.py",
        SOURCES / "rft-sync/src/rft_sync/receivers/vllm_adapter.py",
    ],
    "sglang": [
        *sorted((SOURCES / "rft-engines/src/rft_engines/sglang").glob("*.py")),
        SOURCES / "rft-sync/src/rft_sync/receivers/sglang.py",
    ],
}
# Expressions that hold an object of the engine's own in the adapters, and the class of that object.
OWNERS = {
    "vllm": {
        "self._llm": "vllm.entrypoints.llm:LLM",
        "self._llm.llm_engine": "vllm.v1.engine.llm_engine:LLMEngine",
        "engine": "vllm.v1.engine.llm_engine:LLMEngine",
        "self._engine()": "vllm.v1.engine.llm_engine:LLMEngine",
        "self._llm.llm_engine.engine_core": "vllm.v1.engine.core_client:InprocClient",
        "_reload_module()": "vllm.model_executor.model_loader.reload.layerwise",
    },
    "sglang": {
        "engine": "sglang.srt.entrypoints.engine:Engine",
        "self.engine": "sglang.srt.entrypoints.engine:Engine",
        "self._engine": "sglang.srt.entrypoints.engine:Engine",
        "manager": "sglang.srt.managers.tokenizer_manager:TokenizerManager",
        "MultiprocessingSerializer": "sglang.srt.utils.common:MultiprocessingSerializer",
        "flattened": "sglang.srt.weight_sync.tensor_bucket:FlattenedTensorBucket",
    },
}
ATTRIBUTES = {
    "vllm": {
        "vllm.distributed.parallel_state": ("_WORLD", "_NODE_COUNT", "destroy_distributed_environment"),
        "vllm.sampling_params": ("RequestOutputKind",),
    },
    "sglang": {},
}

names = pytest.mark.parametrize(
    "name_and_version", [(name, version) for name, versions in RELEASES.items() for version in versions], ids="-".join
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """(name, version) -> its unpacked wheel, one at a time; fails where there is no index."""
    made: dict[tuple[str, str], EngineSource] = {}

    def of(key):
        if key not in made:
            made[key] = unpacked(*key, tmp_path_factory.mktemp("-".join(key)))
        return made[key]

    return of


def trees(name):
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in ADAPTERS[name]]


def calls(name):
    """(path of the method, call, whether the adapter asks first whether it is there) for each call of the engine's."""
    found = []
    for _, tree in trees(name):
        asked = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner, method = OWNERS[name].get(ast.unparse(node.func.value)), node.func.attr
                if owner is not None:
                    found.append((f"{owner}{'.' if ':' in owner else ':'}{method}", node, method in asked))
                elif ast.unparse(node.func) == "self._call" and isinstance(node.args[0], ast.Constant):
                    # Called by name: the first argument is the method.
                    rest = ast.Call(func=node.func, args=node.args[1:], keywords=node.keywords)
                    method = node.args[0].value
                    asked_first = f'hasattr(self._engine, "{method}")' in ast.unparse(tree).replace("'", '"')
                    found.append((f"{OWNERS[name]['self._engine']}.{method}", rest, asked_first))
    return found


def test_the_releases_are_the_ends_of_the_published_ranges():
    extras = read_toml(SOURCES / "rft-engines/pyproject.toml")["project"]["optional-dependencies"]
    assert extras["vllm"] == ["vllm>=0.24,<0.33"]
    assert extras["sglang"] == ["sglang>=0.5.14,<0.5.22"]


@pytest.mark.parametrize(("name", "least"), [("vllm", 15), ("sglang", 12)])
def test_calls_of_the_adapters_are_found(name, least):
    assert len({path for path, _, _ in calls(name)}) >= least, sorted({path for path, _, _ in calls(name)})


@pytest.mark.slow
@names
def test_every_import_is_provided(engine, name_and_version):
    name, _ = name_and_version
    source = engine(name_and_version)
    wanted = {
        (node.module, alias.name)
        for _, tree in trees(name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == name
        for alias in node.names
    } | {(module, attribute) for module, attributes in ATTRIBUTES[name].items() for attribute in attributes}
    assert wanted
    assert [row for row in sorted(wanted) if not source.provides(*row)] == []


def keywords(name, function):
    """Names of the keywords in the adapters' calls of `function`."""
    return {
        word.arg
        for _, tree in trees(name)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function
        for word in node.keywords
    }


def dictionary_keys(name, function):
    """Text keys of the dictionaries in the adapters' functions called `function`, and of assignments to their items."""
    bodies = [
        node
        for _, tree in trees(name)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    keys = [key for body in bodies for node in ast.walk(body) if isinstance(node, ast.Dict) for key in node.keys]
    keys += [node.slice for body in bodies for node in ast.walk(body) if isinstance(node, ast.Subscript)]
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


@pytest.mark.slow
@names
def test_every_argument_is_known(engine, name_and_version):
    name, _ = name_and_version
    source = engine(name_and_version)
    if name == "vllm":
        known = set(source.signature("vllm.entrypoints.llm:LLM.__init__").parameters)
        known |= source.fields("vllm.engine.arg_utils:EngineArgs")
        wanted = {
            "LLM": (dictionary_keys(name, "engine_arguments"), known),
            "SamplingParams": (keywords(name, "NativeSampling"), source.fields("vllm.sampling_params:SamplingParams")),
            "LoRARequest": (
                dictionary_keys(name, "_apply_adapter") - {"r", "load_inplace"},
                source.fields("vllm.lora.request:LoRARequest"),
            ),
        }
    else:
        fields = source.fields("sglang.srt.server_args:ServerArgs") | source.all_fields("sglang.srt.arg_groups.fields")
        sampling = "sglang.srt.sampling.sampling_params:SamplingParams"  # a plain class, later a struct
        made_by = source.signature(f"{sampling}.__init__")
        known = source.fields(sampling) if made_by is None else set(made_by.parameters)
        generate = source.signature("sglang.srt.entrypoints.engine:Engine.generate")
        wanted = {
            "ServerArgs": (dictionary_keys(name, "engine_arguments"), fields),
            "SamplingParams": (dictionary_keys(name, "native_sampling"), known),
            "generate": (dictionary_keys(name, "_native_call"), set(generate.parameters)),
        }
    assert all(asked and known for asked, known in wanted.values()), wanted
    assert {what: sorted(asked - known) for what, (asked, known) in wanted.items() if asked - known} == {}


@pytest.mark.slow
@names
def test_every_call_fits_its_signature(engine, name_and_version):
    name, _ = name_and_version
    source = engine(name_and_version)
    rows = []
    for path, call, asked_first in calls(name):
        signature = source.signature(path)
        if signature is None and not asked_first:
            rows.append(f"{path} is not there: {ast.unparse(call)}")
        elif signature is not None and (reason := bound(call, signature)):
            rows.append(f"{path}: {ast.unparse(call)}: {reason}")
    assert rows == []


@pytest.fixture
def planted(tmp_path):
    """A package with a class, its base in another module, a lazy name and a star import."""
    package = tmp_path / "engine"
    package.mkdir()
    (package / "__init__.py").write_text('LAZY = {"Lazy": ".core:Core"}\nfrom engine.base import *\n')
    (package / "base.py").write_text("class Base:\n    size: int = 1\n    def sleep(self, level=1): ...\n")
    (package / "core.py").write_text(
        "from engine.base import Base\nclass Core(Base):\n    name: str\n    def step(self, a, /, b, *, c, **d): ...\n"
    )
    return EngineSource(name="engine", version="1", folder=tmp_path)


def test_names_are_found_where_they_are(planted):
    assert [planted.provides("engine", name) for name in ("Lazy", "Base", "core", "Core")] == [True, True, True, False]
    assert planted.fields("engine.core:Core") == {"name", "size"}
    assert planted.signature("engine.core:Core.sleep").parameters.keys() == {"level"}
    assert planted.signature("engine.core:Core.wake") is None
    assert planted.signature("engine.none:Core.wake") is None


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("x.step(1, 2, c=3)", ""),
        ("x.step(1, b=2, c=3, e=4)", ""),
        ("x.step(1, 2)", "missing a required.*'c'"),
        ("x.step(1, 2, 3, c=3)", "too many positional"),
        ("x.step(c=3, b=1)", "missing a required.*'a'"),
    ],
)
def test_calls_are_held_against_signatures(planted, call, reason):
    told = bound(ast.parse(call, mode="eval").body, planted.signature("engine.core:Core.step"))
    assert re.search(reason, told) if reason else told == ""
