"""The embedded engine."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rft_engines.contract import KV_CACHE, WEIGHTS, SleepContract, SleepLevel, sleep_contract
from rft_engines.end_tokens import end_token_ids
from rft_engines.generation import Generation, GenerationRequest, check_requests, sample_id
from rft_engines.hf.attention import grouped_decode, inference
from rft_engines.hf.models import (
    cache_bytes_per_token,
    context_length,
    load_model,
    refuse_stateful,
    require_positive,
)
from rft_engines.hf.residency import ParameterStorage
from rft_engines.hf.rows import Row, StepBudget
from rft_engines.hf.stops import StopRules
from rft_engines.hf.vision import PicturePreparer, Pictures
from rft_engines.hf.waves import plan_waves
from rft_engines.lifecycle import ManagedEngine
from rft_engines.sampling import SamplingParams
from rft_engines.seeds import UniformStream, request_seed, sample_seed


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
        image_processor: Callable[..., Any] | None = None,
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
            image_processor: makes patches of pictures (models of Qwen-VL's form); None takes text only.
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
        require_positive(max_rows=max_rows, kv_cache_bytes=kv_cache_bytes, prefill_tokens=prefill_tokens)
        if isinstance(model, (str, Path)):
            model, tokenizer = load_model(Path(model), tokenizer, dtype)
        refuse_stateful(model)
        # Any: the module is a PreTrainedModel, and naming that type would load transformers here.
        module: Any = model.to(device=device, dtype=dtype)
        self._model = module
        self._tokenizer = tokenizer
        self._image_processor = image_processor
        text_config = module.config.get_text_config()
        self._vocab_size = int(module.get_input_embeddings().weight.shape[0])
        self._max_model_len = context_length(text_config, max_model_len)
        if eos_token_ids is None:
            eos_token_ids = end_token_ids(text_config, tokenizer, getattr(module, "generation_config", None))
        self._eos = tuple(eos_token_ids)
        self._max_rows = max_rows
        self._max_tokens = max(1, kv_cache_bytes // cache_bytes_per_token(text_config, module.dtype))
        self._prefill_tokens = prefill_tokens
        self._seed = seed
        self._calls = 0
        self._largest_cache = 0
        self._storage = ParameterStorage(self._model)

    @property
    def contract(self) -> SleepContract:
        """See `RolloutEngine`."""
        return sleep_contract("hf")

    @property
    def native(self) -> nn.Module:
        """The module."""
        model: nn.Module = self._model
        return model

    def _rows(
        self, requests: Sequence[GenerationRequest], pictures: Sequence[Pictures | None], sampling: SamplingParams
    ) -> list[list[Row]]:
        """Fresh rows, n for each request."""
        rows = []
        for place, (request, shown) in enumerate(zip(requests, pictures, strict=True)):
            seed = request.seed if request.seed is not None else request_seed(self._seed, self._calls, place)
            budget = request.token_budget(sampling, self._max_model_len)
            rows.append(
                [
                    Row(place, index, request.prompt_token_ids, budget, UniformStream(sample_seed(seed, index)), shown)
                    for index in range(sampling.n)
                ]
            )
        self._calls += 1
        return rows

    def _generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, max_steps: int | None
    ) -> list[Generation]:
        from rft_engines.hf.decoding import Decoder, decode_wave

        preparer = PicturePreparer(self._model, self._image_processor)
        prepared = [preparer.prepare(request) for request in requests]
        requests = [request for request, _ in prepared]
        # Widened placeholders count.
        check_requests(requests, vocab_size=self._vocab_size, max_model_len=self._max_model_len)
        stops = StopRules(sampling, eos_token_ids=self._eos, tokenizer=self._tokenizer)
        rows = self._rows(requests, [pictures for _, pictures in prepared], sampling)
        waves = plan_waves(
            [len(request.prompt_token_ids) for request in requests],
            [request_rows[0].budget for request_rows in rows],
            samples=sampling.n,
            max_rows=self._max_rows,
            max_tokens=self._max_tokens,
        )
        budget = StepBudget(max_steps, self._aborted.is_set)
        with inference(self._model), grouped_decode(self._model):
            decoder = Decoder(self._model, prefill_tokens=self._prefill_tokens)
            for wave in waves:
                wave_rows = [row for place in wave.places for row in rows[place]]
                decode_wave(decoder, wave, wave_rows, sampling=sampling, stops=stops, budget=budget)
                self._largest_cache = max(self._largest_cache, decoder.largest_cache)
        return [
            row.generation(sample_id(request, row.place), sampling, self.weights_version)
            for request, own in zip(requests, rows, strict=True)
            for row in own
        ]

    def _release(self, level: SleepLevel) -> None:
        self._storage.release(keep=level is SleepLevel.KEEP_WEIGHTS)

    def _restore(self, tags: Sequence[str]) -> None:
        if "weights" in tags:
            self._storage.restore()

    def _held(self) -> Mapping[str, int]:
        largest, self._largest_cache = self._largest_cache, 0
        return {WEIGHTS: self._storage.resident_bytes(), KV_CACHE: largest}

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
