"""A stand-in for `sglang.Engine`: the real one's signatures and refusals, scripted logits for its answers."""

import asyncio
import multiprocessing
import os
import pickle
import time

import torch

from rft_engines import SamplingParams
from rft_engines.hf.sampler import choose_tokens
from rft_engines.seeds import UniformStream

VOCABULARY = 97
POSITIONS = 128
TAGS = ("kv_cache", "weights", "cuda_graph")


def logits(prompt, tokens):
    base = sum(prompt) + 7 * len(tokens) + 3 * sum(tokens)
    return [((base + 31 * token) % VOCABULARY) / 40 for token in range(VOCABULARY)]


class Success:
    def __init__(self, success):
        self.success = success


class TokenizerManager:
    def __init__(self, context_length):
        self.aborted = False
        self.max_req_input_len = context_length - 6

    def abort_request(self, rid="", abort_all=False):
        self.aborted = abort_all


class Engine:
    """`arguments`, `environment` and `calls` show what the adapter did."""

    fail_to_start = False

    def __init__(self, **kwargs):
        if self.fail_to_start:
            raise RuntimeError("not enough memory")
        multiprocessing.set_start_method("spawn", force=True)
        # They travel to the schedulers' processes.
        pickle.dumps(kwargs)
        torch.rand(3)
        self.arguments = kwargs
        self.environment = dict(os.environ)
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = TokenizerManager(kwargs.get("context_length", POSITIONS))
        self.last_batch = False
        self.released = set()
        self.running = False
        self.closing = False
        self.calls = []
        self.seconds_per_step = 0.0005
        self.child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
        self.child.start()

    def get_all_child_pids(self):
        return [self.child.pid]

    def generate(
        self, prompt=None, sampling_params=None, input_ids=None, image_data=None, audio_data=None, video_data=None,
        mm_hashes=None, mm_content_hashes=None, return_logprob=False, logprob_start_len=None, top_logprobs_num=None,
        token_ids_logprob=None, lora_path=None, custom_logit_processor=None, require_reasoning=False,
        return_hidden_states=False, return_routed_experts=False, routed_experts_start_len=0, stream=False,
        bootstrap_host=None, bootstrap_port=None, bootstrap_room=None, routed_dp_rank=None,
        disagg_prefill_dp_rank=None, kv_hints=None, data_parallel_rank=None, external_trace_header=None, rid=None,
        session_params=None, priority=None, session_id=None, *, cache_salt=None,
    ):  # fmt: skip
        assert not self.released, f"generate with {self.released} released"
        longest = max(len(prompt) for prompt in input_ids)
        if longest >= self.tokenizer_manager.max_req_input_len:
            raise ValueError(f"Input length ({longest} tokens) exceeds the maximum allowed length")
        self.last_batch = True
        self.calls.append({"input_ids": input_ids, "image_data": image_data, "sampling_params": sampling_params})
        self.running = True
        try:
            return self.loop.run_until_complete(self._answers(input_ids, sampling_params))
        finally:
            self.running = False

    async def _answers(self, prompts, parameters):
        self.tokenizer_manager.aborted = False
        answers = [{"meta_info": {"output_token_logprobs": [], "finish_reason": None}} for _ in prompts]
        while any(answer["meta_info"]["finish_reason"] is None for answer in answers):
            await self._pause()
            for prompt, wanted, answer in zip(prompts, parameters, answers, strict=True):
                if answer["meta_info"]["finish_reason"] is None:
                    self._step(prompt, wanted, answer["meta_info"])
        return answers

    async def _pause(self):
        left = self.seconds_per_step
        while left > 0 and not self.closing:
            await asyncio.sleep(min(left, 0.05))
            left -= 0.05
        if self.closing:
            raise RuntimeError("the scheduler has gone")

    def _step(self, prompt, wanted, meta):
        if self.tokenizer_manager.aborted:
            meta["finish_reason"] = {"type": "abort", "message": "Abort by request"}
            return
        tokens = [step[1] for step in meta["output_token_logprobs"]]
        uniform = UniformStream(wanted["sampling_seed"]).at(len(tokens))
        token, log_prob = choose_tokens(
            torch.tensor([logits(prompt, tokens)]),
            torch.tensor([uniform], dtype=torch.float64),
            SamplingParams(temperature=wanted["temperature"]),
        )
        meta["output_token_logprobs"].append((float(log_prob[0]), int(token[0]), None))
        if not wanted["ignore_eos"] and int(token[0]) in (wanted["stop_token_ids"] or ()):
            meta["finish_reason"] = {"type": "stop", "matched": int(token[0])}
        elif len(tokens) + 1 >= wanted["max_new_tokens"]:
            meta["finish_reason"] = {"type": "length", "length": len(tokens) + 1}

    def flush_cache(self):
        if "kv_cache" in self.released:
            raise RuntimeError("flush with released memory crashes the scheduler")
        # The first answer after a generation may come before the scheduler has put its last batch away.
        busy, self.last_batch = self.running or self.last_batch, False
        return Success(not busy)

    def release_memory_occupation(self, tags=None):
        busy = self.running or self.last_batch
        assert not busy, "release asserts an idle scheduler"
        self.released.update(TAGS if tags is None else tags)

    def resume_memory_occupation(self, tags=None):
        for tag in TAGS if tags is None else tags:
            self.released.remove(tag)

    def begin_weight_update(self, selector="all"):
        pass

    def end_weight_update(self):
        pass

    def shutdown(self):
        self.closing = True
        while self.running:
            time.sleep(0.01)
        self.loop.close()
        self.child.kill()
        self.child.join(10)
        self.child.close()
