"""The embedded engine on a tiny vision-language model against transformers' own generation."""

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from rft_engines import (
    GenerationRequest,
    HFEngine,
    InvalidRequestError,
    PromptTooLongError,
    SamplingParams,
    UnsupportedCombinationError,
)

IMAGE, START, STOP = 90, 91, 92


@pytest.fixture(scope="module")
def seeing_model():
    torch.manual_seed(0)
    text = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None,
        "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
        "patch_size": 14, "spatial_merge_size": 2, "window_size": 56, "fullatt_block_indexes": [1],
        "initializer_range": 0.2,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=93, vision_start_token_id=START,
        vision_end_token_id=STOP,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def patches(images, return_tensors):
    """Each picture is (seed, height, width) in patches of 14 pixels."""
    assert return_tensors == "pt"
    rows = [
        torch.randn(height * width, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(seed))
        for seed, height, width in images
    ]
    return {"pixel_values": torch.cat(rows), "image_grid_thw": torch.tensor([[1, h, w] for _, h, w in images])}


REQUESTS = [
    GenerationRequest((5, START, IMAGE, STOP, 7, 8), images=((1, 4, 6),)),
    GenerationRequest((9, 10, 11)),
    GenerationRequest((START, IMAGE, STOP, 6, START, IMAGE, STOP), images=((2, 2, 2), (3, 4, 4))),
]


def reference(model, request, count):
    made = patches(request.images, "pt") if request.images else {}
    sizes = iter(int(grid.prod()) // 4 for grid in made.get("image_grid_thw", ()))
    ids = [part for token in request.prompt_token_ids for part in [token] * (next(sizes) if token == IMAGE else 1)]
    input_ids = torch.tensor([ids])
    types = {"mm_token_type_ids": (input_ids == IMAGE).int()} if made else {}
    output = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=count, do_sample=False, pad_token_id=0,
        **made, **types,
    )  # fmt: skip
    return tuple(ids), tuple(output[0, len(ids) :].tolist())


def test_text_and_pictures_in_one_batch_equal_model_generate(seeing_model):
    engine = HFEngine(seeing_model, image_processor=patches)
    samples = engine.generate(REQUESTS, SamplingParams(n=2, temperature=0, max_new_tokens=12))
    for request, first, second in zip(REQUESTS, samples[::2], samples[1::2], strict=True):
        assert (first.prompt_token_ids, first.token_ids) == reference(seeing_model, request, 12)
        assert second.token_ids == first.token_ids
    assert [len(sample.prompt_token_ids) for sample in samples[::2]] == [11, 3, 10]


def test_the_picture_decides(seeing_model):
    engine = HFEngine(seeing_model, image_processor=patches)
    other = GenerationRequest(REQUESTS[0].prompt_token_ids, images=((8, 4, 6),))
    sampling = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    one, two = engine.generate([REQUESTS[0], other], sampling)
    assert one.log_probs != pytest.approx(two.log_probs, abs=1e-4)
    widened = GenerationRequest(one.prompt_token_ids, images=REQUESTS[0].images)
    assert engine.generate([widened], sampling)[0].token_ids == one.token_ids


def test_what_cannot_be_seen_is_refused(seeing_model, model):
    sampling = SamplingParams()
    with pytest.raises(UnsupportedCombinationError, match="image processor"):
        HFEngine(seeing_model).generate(REQUESTS, sampling)
    with pytest.raises(UnsupportedCombinationError, match="LlamaForCausalLM"):
        HFEngine(model, image_processor=patches).generate(REQUESTS, sampling)
    wrong = GenerationRequest((IMAGE,), images=REQUESTS[2].images)
    with pytest.raises(InvalidRequestError, match="2 images and 1 placeholder"):
        HFEngine(seeing_model, image_processor=patches).generate([wrong], sampling)
    with pytest.raises(PromptTooLongError):
        HFEngine(seeing_model, image_processor=patches, max_model_len=10).generate(REQUESTS[:1], sampling)
