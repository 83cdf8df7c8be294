"""Engine and sampling of the rollouts."""

import json
from dataclasses import dataclass
from typing import Literal

from rft_trainer.config.ranges import below

EngineType = Literal["hf", "vllm", "sglang"]


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Engine and sampling of the rollouts."""

    engine_type: EngineType = "hf"
    """Rollout engine: hf is embedded and needs no extra."""
    engine_tp_size: int = 1
    """Ranks that share one rollout engine."""
    engine_mem_util: float = 0.5
    """Share of the device that vLLM or SGLang may take."""
    engine_kv_gib: float | None = None
    """GiB of the engine's KV cache on each device, in place of engine_mem_util (hf and vllm); None: by that share."""
    engine_options: str | None = None
    """Further arguments of vLLM or SGLang by their own names, a JSON object: '{"max_num_seqs": 512}'."""
    enable_engine_sleep: bool = False
    """Let the engine sleep while the actor trains."""
    share_engine_weights: bool = False
    """Train in the engine's own memory, so that an update copies nothing: FSDP2 on one rank, one dtype, no sleep."""
    rollout_batch_size: int = 8
    """Prompts per step, over all ranks."""
    n_samples_per_prompt: int = 8
    """Responses per prompt: one group."""
    generate_max_len: int = 256
    """Longest response in tokens."""
    temperature: float = 1.0
    """Sampling temperature of training rollouts."""
    top_p: float = 1.0
    """Nucleus of training rollouts; 1 is off."""
    top_k: int = 0
    """Largest number of candidate tokens; 0 is off."""
    max_weight_lag: int = 0
    """Updates by which a rollout may be older than the actor."""

    def _rollout_problems(self) -> list[str]:
        problems = below(
            self, 1, "engine_tp_size", "rollout_batch_size", "n_samples_per_prompt", "generate_max_len"
        ) + below(self, 0, "max_weight_lag")
        if self.temperature < 0:
            problems.append(f"temperature is {self.temperature}: give 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p is {self.top_p}: give a number in (0, 1]")
        if self.top_k < 0:
            problems.append(f"top_k is {self.top_k}: give 0 (off) or more")
        if self.share_engine_weights and self.enable_engine_sleep:
            problems.append(
                "share_engine_weights and enable_engine_sleep: a sleeping engine drops or moves the memory in which "
                "the actor would train; leave one of them out"
            )
        if self.share_engine_weights and self.engine_type == "sglang":
            problems.append(
                "share_engine_weights and engine_type sglang: its weights are in processes of its own; use hf or vllm"
            )
        if not 0 < self.engine_mem_util < 1:
            problems.append(f"engine_mem_util is {self.engine_mem_util}: give a share between 0 and 1")
        return problems + self._engine_argument_problems()

    def _engine_argument_problems(self) -> list[str]:
        problems = []
        if self.engine_kv_gib is not None and self.engine_kv_gib <= 0:
            problems.append(f"engine_kv_gib is {self.engine_kv_gib}: give GiB above 0")
        if self.engine_kv_gib is not None and self.engine_type == "sglang":
            problems.append(
                f"engine_kv_gib is {self.engine_kv_gib} and engine_type is sglang, which counts tokens: leave it out "
                "and give --engine_options '{\"max_total_tokens\": ...}' or --engine_mem_util"
            )
        if self.engine_options is None:
            return problems
        if self.engine_type == "hf":
            problems.append("engine_options is for vllm and sglang, and engine_type is hf: leave it out")
        try:
            read = json.loads(self.engine_options)
        except ValueError as error:
            read = error
        if not isinstance(read, dict):
            problems.append(
                f"engine_options is {self.engine_options!r} ({read!r}): give a JSON object, such as "
                "'{\"max_num_seqs\": 512}'"
            )
        return problems

    @property
    def engine_kv_bytes(self) -> int | None:
        """`engine_kv_gib` in bytes."""
        return None if self.engine_kv_gib is None else int(self.engine_kv_gib * 2**30)

    @property
    def samples_per_step(self) -> int:
        """Responses of one rollout over all ranks."""
        return self.rollout_batch_size * self.n_samples_per_prompt
