"""The embedded engine."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rft_engines.contract import SleepContract, SleepLevel, sleep_contract
from rft_engines.end_tokens import end_token_ids
from rft_engines.errors import EngineStartError, UnsupportedCombinationError
from rft_engines.generation import Generation, GenerationRequest, sample_id
from rft_engines.hf.attention import grouped_decode, inference
from rft_engines.hf.residency import ParameterStorage
from rft_engines.hf.rows import Row, StepBudget
from rft_engines.hf.stops import StopRules
from rft_engines.hf.waves import plan_waves
from rft_engines.lifecycle import ManagedEngine
from rft_engines.sampling import SamplingParams
from rft_engines.seeds import UniformStream, request_seed, sample_seed

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


class HFEngine(ManagedEngine):
    """Generates with a transformers causal model in this process, on the CPU or one accelerator.

    Each prompt is prefilled once for its n samples, all samples of a wave are decoded together over key-value buffers
    that are allocated once, and a sample that ends leaves the batch at that step. The same request and seed give the
    same tokens in any batch. The engine owns its module: dropping weights in sleep drops them for whoever shares it.
    """

    def __init__(
        self,
        model: nn.Module | str | Path,
        *,
        tokenizer: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        eos_token_ids: Sequence[int] | None = None,
        max_model_len: int | None = None,
        max_rows: int = 64,
        kv_cache_bytes: int = 4 << 30,
        prefill_tokens: int = 4096,
        seed: int = 0,
        weights_loaded: bool = True,
    ) -> None:
        """Take a module, or load one (and its tokenizer, when there is one) from a local folder.

        Args:
            model: causal model of transformers, or the folder of one.
            tokenizer: needed for stop strings only.
            device: where the module is moved to; None leaves it where it is.
            dtype: of the parameters; None leaves a module as it is and loads a folder in its own dtype.
            eos_token_ids: ids that end a sample; None takes the model's and the tokenizer's.
            max_model_len: most tokens of prompt and response; None takes the model config's limit.
            max_rows: samples decoded together at most.
            kv_cache_bytes: size the key-value buffers of one wave may reach.
            prefill_tokens: padded prompt tokens in one prefill forward at most.
            seed: source of the seeds of requests that bring none.
            weights_loaded: False when a weight update must come before the first generation.

        Raises:
            UnsupportedCombinationError: the model keeps other state than keys and values.
            EngineStartError: the folder cannot be loaded.
        """
        super().__init__(weights_loaded=weights_loaded)
        for name, value in (
            ("max_rows", max_rows),
            ("kv_cache_bytes", kv_cache_bytes),
            ("prefill_tokens", prefill_tokens),
        ):
            if value < 1:
                raise ValueError(f"HFEngine {name}={value}: give at least 1")
        if isinstance(model, (str, Path)):
            model, tokenizer = _load(Path(model), tokenizer, dtype)
        _refuse_stateful(model)
        # Any: the module is a PreTrainedModel, and naming that type would load transformers here.
        module: Any = model.to(device=device, dtype=dtype)
        self._model = module
        self._tokenizer = tokenizer
        self._contract = sleep_contract("hf")
        text_config = module.config.get_text_config()
        self._vocab_size = int(module.get_input_embeddings().weight.shape[0])
        limit = getattr(text_config, "max_position_embeddings", None)
        self._max_model_len = max_model_len if max_model_len is not None else limit
        if limit is not None and self._max_model_len is not None and self._max_model_len > limit:
            raise ValueError(
                f"HFEngine max_model_len={max_model_len}: the model has {limit} positions, give at most that"
            )
        if eos_token_ids is None:
            eos_token_ids = end_token_ids(text_config, tokenizer, getattr(module, "generation_config", None))
        self._eos = tuple(eos_token_ids)
        self._max_rows = max_rows
        self._max_tokens = max(1, kv_cache_bytes // _cache_bytes_per_token(text_config, module.dtype))
        self._prefill_tokens = prefill_tokens
        self._seed = seed
        self._calls = 0
        self._aborted = threading.Event()
        self._storage = ParameterStorage(self._model)

    @property
    def contract(self) -> SleepContract:
        """See `RolloutEngine`."""
        return self._contract

    @property
    def native(self) -> nn.Module:
        """The module."""
        model: nn.Module = self._model
        return model

    @property
    def max_model_len(self) -> int | None:
        """See `RolloutEngine`."""
        return self._max_model_len

    @property
    def vocab_size(self) -> int | None:
        """See `ManagedEngine`."""
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sample unless `ignore_eos` is set."""
        return self._eos

    def _rows(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[list[Row]]:
        """Fresh rows, n for each request."""
        rows = []
        for place, request in enumerate(requests):
            seed = request.seed if request.seed is not None else request_seed(self._seed, self._calls, place)
            budget = request.token_budget(sampling, self._max_model_len)
            rows.append(
                [
                    Row(place, index, request.prompt_token_ids, budget, UniformStream(sample_seed(seed, index)))
                    for index in range(sampling.n)
                ]
            )
        self._calls += 1
        return rows

    def _generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, max_steps: int | None
    ) -> list[Generation]:
        from rft_engines.hf.decoding import Decoder, decode_wave

        for place, request in enumerate(requests):
            if request.images:
                raise UnsupportedCombinationError(
                    f"request {sample_id(request, place)!r} has images: HFEngine takes text only"
                )
        stops = StopRules(sampling, eos_token_ids=self._eos, tokenizer=self._tokenizer)
        rows = self._rows(requests, sampling)
        waves = plan_waves(
            [len(request.prompt_token_ids) for request in requests],
            [request_rows[0].budget for request_rows in rows],
            samples=sampling.n,
            max_rows=self._max_rows,
            max_tokens=self._max_tokens,
        )
        budget = StepBudget(max_steps, self._aborted.is_set)
        try:
            with inference(self._model), grouped_decode(self._model):
                decoder = Decoder(self._model, prefill_tokens=self._prefill_tokens)
                for wave in waves:
                    wave_rows = [row for place in wave.places for row in rows[place]]
                    decode_wave(decoder, wave, wave_rows, sampling=sampling, stops=stops, budget=budget)
        finally:
            self._aborted.clear()
        return [
            row.generation(sample_id(request, row.place), sampling, self.weights_version)
            for request, own in zip(requests, rows, strict=True)
            for row in own
        ]

    def _abort_running(self) -> None:
        self._aborted.set()

    def _release(self, level: SleepLevel) -> None:
        self._storage.release(keep=level is SleepLevel.KEEP_WEIGHTS)

    def _restore(self, tags: Sequence[str]) -> None:
        if "weights" in tags:
            self._storage.restore()

    def _memory_in_use(self) -> Mapping[str, int]:
        weights = self._storage.resident_bytes()
        if self._model.device.type != "cuda":
            return {"weights": weights}
        return {"weights": weights, "other": torch.cuda.memory_allocated(self._model.device) - weights}

    def _drop_caches(self) -> bool:
        # Nothing outlives a generate call.
        return True

    def _shut_down(self) -> None:
        self._storage.restore()
        del self._model


def _cache_bytes_per_token(text_config: Any, dtype: torch.dtype) -> int:
    heads = text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    return 2 * int(text_config.num_hidden_layers) * int(kv_heads) * int(head_dim) * dtype.itemsize


def _refuse_stateful(model: Any) -> None:
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _ATTENTION_LAYERS
    if kinds or getattr(model, "_is_stateful", False) or model.config.is_encoder_decoder:
        raise UnsupportedCombinationError(
            f"engine 'hf' and {type(model).__name__} (layers {sorted(kinds) or 'with recurrent or encoder state'}): "
            f"the embedded engine caches keys and values of attention only, use the vLLM or SGLang engine"
        )


def _load(folder: Path, tokenizer: Any, dtype: torch.dtype | None) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise EngineStartError(f"no config.json in {str(folder)!r}: give the folder of a saved transformers model")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto" if dtype is None else dtype, local_files_only=True
    )
    if tokenizer is None and any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model, tokenizer
