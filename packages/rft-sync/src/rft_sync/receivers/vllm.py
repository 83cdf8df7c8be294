"""vLLM in the process of the trainer: `vllm.LLM` with the external launcher, or a single in-process engine."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rft_sync.errors import (
    EngineNotReady,
    EngineRefused,
    IncompleteGroup,
    UnknownTensor,
    UnsupportedCombination,
    WeightSyncError,
)
from rft_sync.live import tensor_trace
from rft_sync.manifest import Manifest
from rft_sync.parameters import Bucket, ParamMeta
from rft_sync.receivers.copy_plan import CopyRecorder, ResolvedPlan
from rft_sync.receivers.protocol import UpdateSession
from rft_sync.receivers.random_state import preserved_random_state
from rft_sync.receivers.replay import LiveCopies, Replay, same_place
from rft_sync.receivers.vllm_adapter import EngineAdapter
from rft_sync.receivers.vllm_model import (
    check_vocabulary,
    fills_live_layout,
    reset_lora_state,
    without_lora_wrappers,
)
from rft_sync.scan import Piece


class VLLMReceiver:
    """Writes into the model of an in-process `vllm.LLM`; each rank writes the slices of its own engine.

    Where the live parameters are in the layout that the loader fills (an unquantised dense model on a card), the
    loader runs once and its copies are replayed from then on (`CopyPlan`). Elsewhere (quantised, repacked, mixtures of
    experts, CPU) a layerwise reload is opened for the update. Prefix, encoder, multimodal and LoRA caches are reset
    after every update, and the trainer's random state is kept.

    Args:
        llm: The engine. Its class is not imported; what it can do is found by asking it.
        live_layout: Whether the loader may write into the live parameters; found out if None.

    Attributes:
        session: Version and usability.
        plan_refusal: Why copies are not replayed; empty when they are or before the first update.

    Raises:
        EngineNotReady: The engine was shut down.
        UnsupportedCombination: The model lives in another process.
    """

    def __init__(self, llm: Any, *, live_layout: bool | None = None) -> None:
        self._llm = llm
        self._live_layout = live_layout
        self._layerwise = False
        self.session = UpdateSession("VLLMReceiver")
        self.plan_refusal = ""
        self._plan: ResolvedPlan | None = None
        self._plan_trace: object = None
        self._copies = LiveCopies()
        self._checked: Manifest | None = None
        self._taken: tuple[object, object] = (None, None)
        self._recorder: CopyRecorder | None = None
        self._writing = False
        self._written: set[str] | None = set()
        self._adapter = EngineAdapter()
        self._model()

    def _engine(self) -> Any:
        engine = getattr(self._llm, "llm_engine", None)
        if engine is None:
            raise EngineNotReady("the vLLM engine is gone (shut down); create a new one and connect again")
        return engine

    def _model(self) -> nn.Module:
        found: list[nn.Module] = []
        self._engine()
        try:
            self._llm.apply_model(found.append)
        except Exception as error:
            raise UnsupportedCombination(
                f"vLLM in another process ({type(error).__name__}: {error}) and VLLMReceiver: use "
                'distributed_executor_backend="external_launcher", or send_weights to a receiver in that process'
            ) from error
        if not found:
            raise UnsupportedCombination(
                "vLLM in another process and VLLMReceiver: set VLLM_ENABLE_V1_MULTIPROCESSING=0, or use the "
                "external launcher"
            )
        return found[0]

    @property
    def _config(self) -> Any:
        return self._engine().vllm_config

    def dtype_policy(self) -> torch.dtype | None:
        """The engine's model dtype."""
        dtype: torch.dtype = self._config.model_config.dtype
        return dtype

    @property
    def lora_request(self) -> Any:
        """The request to generate with, after an adapter-only update; None again after a full one."""
        return self._adapter.request

    @property
    def adapter(self) -> Any:
        """What an engine object generates with after the last update: `lora_request`."""
        return self.lora_request

    def asleep(self) -> bool:
        """Whether the weights are asleep; a KV cache that still sleeps does not count."""
        engine = self._engine()
        core = getattr(getattr(engine, "engine_core", None), "engine_core", None)
        tags = getattr(getattr(core, "model_executor", None), "sleeping_tags", None)
        if tags is not None:
            return "weights" in tags
        return bool(engine.is_sleeping()) if hasattr(engine, "is_sleeping") else False

    def wake(self) -> None:
        """Wake the weights only: the KV cache comes back after the update."""
        self._llm.wake_up(["weights"])

    def start(self, manifest: Manifest) -> None:
        """Check the engine and the manifest; nothing is written.

        Raises:
            EngineNotReady: Asleep, generating, gone, or inside an update.
            ShapeMismatch: Another vocabulary size than the engine's.
            UnsupportedCombination: An adapter for an engine without LoRA.
        """
        engine = self._engine()
        if self.asleep():
            raise EngineNotReady('the vLLM weights are asleep; call wake_up(["weights"]) first')
        if hasattr(engine, "has_unfinished_requests") and engine.has_unfinished_requests():
            raise EngineNotReady("vLLM has unfinished requests; finish or abort them before an update")
        self.session.require_full(manifest)
        if manifest.kind == "adapter":
            if getattr(self._config, "lora_config", None) is None:
                raise UnsupportedCombination("adapter-only sync and a vLLM engine without enable_lora=True")
        elif manifest is not self._checked:
            check_vocabulary(manifest, self._config.model_config.get_vocab_size())
            self._checked = manifest
        self.session.open(manifest)
        self._writing, self._written = False, set()
        if manifest.kind == "adapter":
            self._adapter.begin(self._model(), manifest)

    def load(self, bucket: Bucket) -> None:
        """Hand the bucket to the engine's loader, or replay the recorded copies."""
        manifest = self.session.manifest
        self.session.count(bucket.names)
        assert manifest is not None  # count refuses buckets outside an update
        if manifest.kind == "adapter":
            self._adapter.take(bucket.tensors)
            return
        for group in manifest.groups:
            inside = [name for name in group if name in bucket.tensors]
            if inside and len(inside) < len(group):
                raise IncompleteGroup(f"fused group {group} came in part: {inside}", group)
        model = self._model()
        with preserved_random_state(), torch.no_grad(), self._engine_context():
            if not self._writing:
                self._begin(model)
            if self._plan is not None:
                self._plan.replay(bucket)
                return
            with self._recorder.watch(bucket) if self._recorder is not None else nullcontext(bucket) as pairs:
                self._run_loader(model, pairs)

    def _begin(self, model: nn.Module) -> None:
        self._writing = True
        live = self._live_layout
        self._layerwise = not (fills_live_layout(model, self._config) if live is None else live)
        if self._layerwise:
            self.plan_refusal = "the live layout is not the loader's; a layerwise reload is used"
            self._hold(None)
            self._recorder = None
            _reload_module().initialize_layerwise_reload(model)
        elif self._fitting_plan(model) is None:
            self._recorder = CopyRecorder(model) if not self.plan_refusal else None

    def _fitting_plan(self, model: nn.Module) -> ResolvedPlan | None:
        """The recorded plan for `model` as it is now; one for another layout is forgotten."""
        if self._plan is None:
            return None
        trace = tensor_trace(model)
        if trace == self._plan_trace:
            return self._plan
        if not self._plan.fits(model):
            plan = self._plan.plan
            self._copies.forget()
            # The same parameters at other addresses, or another layout.
            self._hold(plan.resolve(model) if plan.fits(model) else None)
        self._plan_trace = trace
        return self._plan

    def _hold(self, plan: ResolvedPlan | None) -> None:
        """From now on this plan, of which nothing is known yet."""
        self._plan, self._plan_trace, self._taken = plan, None, (None, None)

    def takes_live(self, metadata: Sequence[ParamMeta], tensors: Mapping[str, Tensor]) -> bool:
        """Whether there is a plan, and every tensor is dense, on the engine's device, and rounded once on its way.

        Never in a subclass with a `load` of its own.
        """
        if type(self).load is not VLLMReceiver.load:
            return False
        plan = self._fitting_plan(self._model())
        if plan is None or self._recorder is not None:
            return False
        asked = metadata, getattr(tensors, "token", None)
        known = asked[1] is not None and all(old is new for old, new in zip(self._taken, asked, strict=True))
        if not known and not plan.takes(metadata, tensors):
            return False
        self._taken = asked
        return True

    def load_live(self, tensors: Mapping[str, Tensor]) -> None:
        """Replay all copies from the trainer's tensors, from a CUDA graph where that can be captured."""
        plan = self._plan
        assert plan is not None  # takes_live has said so
        assert self.session.manifest is not None
        self._writing, self._layerwise = True, False
        self._copies.run(
            tensors,
            lambda: [pair for name, tensor in tensors.items() for pair in plan.pairs(name, tensor)],
            plan.padding,
        )
        self.session.count(self.session.manifest.names)

    @property
    def replay(self) -> Replay | None:
        """The copies of the last update from live tensors; None before the first."""
        return self._copies.replay

    def sharing_refusal(self) -> str:
        """Why no trainer can train in this engine's memory; empty where one can."""
        if getattr(self._config.model_config, "enable_sleep_mode", False):
            return "enable_sleep_mode=True lets vLLM drop or move its weights"
        if int(getattr(getattr(self._config, "parallel_config", None), "tensor_parallel_size", 1)) > 1:
            return "with tensor parallelism each rank's engine holds slices of the weights"
        if getattr(self._config, "lora_config", None) is not None:
            return "enable_lora=True adds adapters to base weights that training changes"
        return self.plan_refusal

    def home(self, name: str, tensor: Tensor) -> Tensor | None:
        """The engine's memory for all of the sent tensor `name`, as a view of its shape; None where it has no such."""
        found = self._plan.pairs(name, tensor) if self._plan is not None and tensor.is_contiguous() else []
        return next((target for source, target in found if same_place(source, tensor)), None)

    def _run_loader(self, model: nn.Module, pairs: Iterable[tuple[str, Tensor]]) -> None:
        names: list[str] = []

        def offered() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in pairs:
                names.append(name)
                # A layerwise reload keeps what it is given until a layer is complete, padded ones until the end:
                # it gets copies of its own, since the bucket's memory is overwritten by then.
                yield name, tensor.clone() if self._layerwise else tensor

        with without_lora_wrappers(model):
            try:
                written = model.load_weights(offered())  # type: ignore[operator]
            except WeightSyncError:
                raise
            except (ValueError, KeyError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise UnknownTensor(f"vLLM could not place {names[-1:]}: {reason}", names[-1:]) from error
        if written is None:
            self._written = None
        elif self._written is not None:
            self._written.update(written)

    def finish(self, version: int) -> None:
        """Complete the update, reset every cache that was computed with the old weights.

        Raises:
            UnknownTensor: Parameters of the engine that no sent tensor reached.
            EngineRefused: A cache or the adapter was refused.
        """
        self.session.check_complete()
        manifest = self.session.manifest
        assert manifest is not None  # check_complete refuses otherwise
        with preserved_random_state(), torch.no_grad(), self._engine_context():
            if manifest.kind == "adapter":
                from safetensors.torch import save_file
                from vllm.lora.request import LoRARequest

                self._adapter.apply(self._engine(), manifest, LoRARequest, save_file)
            else:
                self._finish_weights(self._model())
                self._adapter.drop(self._engine())
        self._reset_caches()
        self.session.close(version)
        if hasattr(self._engine(), "set_weight_version"):
            self._engine().set_weight_version(str(version))

    def _finish_weights(self, model: nn.Module) -> None:
        if self._layerwise:
            _reload_module().finalize_layerwise_reload(model, self._config.model_config)
        if self._plan is not None:
            self._plan.zero_padding()
            return
        self._check_all_written(model)
        if self._recorder is not None:
            plan = self._recorder.plan()
            self._hold(plan.resolve(model) if plan is not None else None)
            self.plan_refusal = self._recorder.refusal
            self._recorder = None

    def _check_all_written(self, model: nn.Module) -> None:
        if self._written is None or self._config.model_config.quantization is not None:
            return
        names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        absent = sorted(name for name in names - self._written if ".lora_" not in name)
        if absent:
            raise UnknownTensor(f"no sent tensor reached the vLLM parameters {absent}", absent)

    def _reset_caches(self) -> None:
        engine = self._engine()
        if not self._llm.reset_prefix_cache():
            raise EngineRefused("vLLM did not reset its prefix cache; finish or abort its requests")
        for owner in (self._llm, engine):
            for name in ("reset_mm_cache", "reset_encoder_cache"):
                if hasattr(owner, name):
                    getattr(owner, name)()
        manifest = self.session.manifest
        if manifest is not None and manifest.kind == "full":
            self._llm.collective_rpc(reset_lora_state)

    def cancel(self) -> None:
        """Nothing was loaded: be what it was before."""
        self.session.cancel()

    def abort(self, reason: str) -> None:
        """Mark as unusable; the next full update writes everything again, by the loader."""
        if self._writing and self._layerwise and self.session.manifest is not None:
            with preserved_random_state(), torch.no_grad(), self._engine_context():
                # Puts the kernels' tensors back in place, with undefined content, so that the next update can begin.
                _reload_module().finalize_layerwise_reload(self._model(), self._config.model_config)
        self._hold(None)
        self._recorder = None
        self._copies.forget()
        self._adapter.forget()
        self._writing = False
        self.session.abort(reason)

    def readable(self) -> Sequence[str]:
        """Names whose bytes can be followed: all weights under a `CopyPlan`, and the factors of linear layers."""
        return (*(self._plan.targets if self._plan is not None else ()), *self._adapter.places)

    def expected_parts(self, name: str, tensor: Tensor) -> Sequence[Piece]:
        """The slices of `tensor` that this rank's engine holds, in the engine's dtype."""
        if name in self._adapter.places:
            return self._adapter.expected(name, tensor)
        whole = tensor.contiguous()
        if self._plan is not None:
            return [Piece(source, target.dtype) for source, target in self._plan.pairs(name, whole)]
        if self._recorder is None:
            return ()
        copies = self._recorder.copies.get(name, [])
        return [Piece(copy.source.of(whole), copy.dtype) for copy in copies if copy.source is not None]

    def read_back(self, name: str) -> Sequence[Tensor]:
        """The live slices, in the same order."""
        if name in self._adapter.places:
            return self._adapter.read_back(name)
        return [target for _, target in self._plan.targets[name]] if self._plan is not None else ()

    @contextmanager
    def _engine_context(self) -> Iterator[None]:
        """vLLM's layers read its current configuration while they load."""
        try:
            from vllm.config import set_current_vllm_config
        except ImportError:  # an engine of the same form without the package: a recording engine in a test
            yield
            return
        with set_current_vllm_config(self._config):
            yield


def _reload_module() -> Any:
    try:
        from vllm.model_executor.model_loader import reload
    except ImportError as error:
        raise UnsupportedCombination(
            "a vLLM without layerwise reload and a model whose weights are repacked: use vLLM 0.20 or later"
        ) from error
    return reload
