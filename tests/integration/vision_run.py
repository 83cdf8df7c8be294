"""Run by test_vision_engines.py: `vision_run.py ENGINE OUTPUT.json`. A tiny model of text and pictures, for real.

The engine (vllm or sglang, on the CPU) answers requests with pictures as the embedded engine does, before and after an
update of all weights. SGLang spawns processes that import this file.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from rft_engines import EngineConfig, GenerationRequest, HFEngine, SamplingParams, create_engine
from rft_sync import BroadcastConfig, BroadcastManager

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
# Ids 0 to 255 are bytes.
END, START, STOP, IMAGE, VIDEO = 258, 259, 260, 262, 263
GREEDY = SamplingParams(n=2, temperature=0, max_new_tokens=12, ignore_eos=True)
SGLANG = {
    "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none",
    "mm_attention_backend": "sdpa", "disable_cuda_graph": True, "disable_overlap_schedule": True,
    "max_total_tokens": 4096,
}  # fmt: skip


def build():
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    text = {
        "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None,
        "eos_token_id": END, "pad_token_id": 256, "initializer_range": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128,
        "patch_size": 14, "spatial_merge_size": 2, "window_size": 56, "fullatt_block_indexes": [1],
        "initializer_range": 0.1,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START,
        vision_end_token_id=STOP, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def save(model, folder):
    """Model, byte-level tokenizer and picture processor, as a checkpoint has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    pictures = Qwen2VLImageProcessor(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 64)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    Qwen2_5_VLProcessor(
        image_processor=pictures, tokenizer=fast, video_processor=Qwen2VLVideoProcessor(), chat_template=template
    ).save_pretrained(folder)
    model.save_pretrained(folder)
    return pictures


def picture(seed, height, width):
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def requests():
    return [
        GenerationRequest((5, START, IMAGE, STOP, 7, 8), images=(picture(1, 112, 168),)),
        GenerationRequest((9, 10, 11)),
        GenerationRequest(
            (START, IMAGE, STOP, 6, START, IMAGE, STOP), images=(picture(2, 56, 56), picture(3, 112, 112))
        ),
        # The first prompt with another picture: only that can tell their answers apart.
        GenerationRequest((5, START, IMAGE, STOP, 7, 8), images=(picture(4, 112, 168),)),
    ]


def start(kind, folder):
    options = SGLANG if kind == "sglang" else {"limit_mm_per_prompt": {"image": 2, "video": 0}}
    memory = {"memory_utilization": 0.3} if kind == "sglang" else {"kv_cache_bytes": 64 << 20, "max_rows": 8}
    return create_engine(
        EngineConfig(kind=kind, model_path=folder, dtype="float32", max_model_len=256, options=options, **memory)
    )


def compared(engine, model, processor):
    """[prompt length, embedded engine's, same tokens, largest gap of the log-probabilities] of each sample."""
    wanted = HFEngine(model, image_processor=processor).generate(requests(), GREEDY)
    return [
        [
            len(ours.prompt_token_ids),
            len(theirs.prompt_token_ids),
            ours.token_ids == theirs.token_ids,
            max(abs(a - b) for a, b in zip(ours.log_probs, theirs.log_probs, strict=True)),
            list(ours.token_ids),
        ]
        for ours, theirs in zip(engine.generate(requests(), GREEDY), wanted, strict=True)
    ]


def main(kind, output):
    torch.set_num_threads(1)
    os.environ["SGLANG_NCCL_SO_PATH"] = "nowhere"
    model = build()
    with tempfile.TemporaryDirectory() as folder:
        processor = save(model, folder)
        engine = start(kind, folder)
    try:
        found = {"start": compared(engine, model, processor)}
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.03)
        report = BroadcastManager.connect(model, engine, BroadcastConfig(bucket_bytes=200_000)).broadcast_to_engine()
        found["updated"] = compared(engine, model, processor)
        found["tensors"] = [report.tensors_loaded, len(model.state_dict())]
    finally:
        engine.close()
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
