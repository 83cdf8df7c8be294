"""A frozen model in bfloat16: its weights are cast, and its rotary frequencies stay what the engine has."""

import torch

from rft_trainer.models import Actor, load_causal_model, padded_layout
from rft_trainer.strategy import DeepspeedBackend
from rft_trainer.testing import tiny_model_folder


def test_buffers_of_a_frozen_model_keep_their_precision(tmp_path):
    folder = str(tiny_model_folder(tmp_path / "tiny"))
    fresh = load_causal_model(folder)
    backend = DeepspeedBackend(torch.device("cpu"), stage=2, bf16=True)
    frozen = backend.prepare_frozen(Actor(load_causal_model(folder)))
    assert {parameter.dtype for parameter in frozen.parameters()} == {torch.bfloat16}
    expected = dict(fresh.named_buffers())
    kept = {name.removeprefix("model."): buffer for name, buffer in frozen.named_buffers()}
    assert "model.rotary_emb.inv_freq" in kept
    for name, buffer in kept.items():
        assert buffer.equal(expected[name]), name
    # head and embedding are one parameter still
    assert frozen.model.get_input_embeddings().weight is frozen.model.get_output_embeddings().weight
    layout = padded_layout([torch.arange(3)], [torch.arange(4)], 0)
    assert frozen(layout).log_probs.isfinite().all()
