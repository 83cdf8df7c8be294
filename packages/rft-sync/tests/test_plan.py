"""Plans, names and fingerprints: pure functions."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rft_sync
from rft_sync import (
    Bucket,
    IncompleteGroup,
    Manifest,
    ParamMeta,
    PrefixMap,
    ShapeMismatch,
    UnknownTensor,
    WeightSyncError,
    build_manifest,
    fingerprint,
    fused_groups,
    plan_buckets,
)
from rft_sync.verification import rotating_sample


def _meta(name, *shape, dtype=torch.float32, **options):
    return ParamMeta(name=name, shape=shape, dtype=dtype, **options)


def test_buckets_keep_order_and_limit():
    metadata = [_meta(f"w{i}", 4) for i in range(5)]  # 16 bytes each
    assert [b.names for b in plan_buckets(metadata, 32)] == [("w0", "w1"), ("w2", "w3"), ("w4",)]
    assert [b.nbytes for b in plan_buckets(metadata, 32)] == [32, 32, 16]


def test_a_fused_group_is_never_split_and_may_be_oversize():
    names = ["a.q_proj.weight", "a.norm", "a.k_proj.weight", "a.v_proj.weight", "z"]
    metadata = [_meta(name, 4) for name in names]
    buckets = plan_buckets(metadata, 20, fused_groups(names))
    assert [b.names for b in buckets] == [
        ("a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight"),
        ("a.norm",),
        ("z",),
    ]


def test_tied_names_travel_together_with_their_bytes_once():
    # the head and the embedding of a 0.5B model: 151,936 x 896 in bf16 are 259.7 MiB
    metadata = [
        _meta("embed", 151936, 896, dtype=torch.bfloat16),
        _meta("norm", 896, dtype=torch.bfloat16),
        _meta("lm_head", 151936, 896, dtype=torch.bfloat16, alias_of="embed"),
    ]
    first, second = plan_buckets(metadata, 1 << 20)
    assert first.names == ("embed", "lm_head")
    assert second.names == ("norm",)
    assert round(first.nbytes / 2**20, 1) == 259.7  # 272,269,312 bytes
    assert [entry.offset for entry in first.entries] == [0, 0]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([torch.float32, torch.bfloat16, torch.uint8])), max_size=12),
    st.integers(1, 200),
    st.randoms(use_true_random=False),
)
def test_every_tensor_is_sent_once_and_survives_packing(sizes, bucket_bytes, random):
    metadata = [_meta(f"t{i}", size, 3, dtype=dtype) for i, (size, dtype) in enumerate(sizes)]
    groups = [[f"t{i}" for i in random.sample(range(len(sizes)), 2)]] if len(sizes) > 1 else []
    buckets = plan_buckets(metadata, bucket_bytes, groups)
    assert sorted(name for bucket in buckets for name in bucket.names) == sorted(m.name for m in metadata)
    for bucket in buckets:
        tensors = {m.name: torch.full(m.shape, index, dtype=m.dtype) for index, m in enumerate(bucket.metadata)}
        flat = torch.full((max(1, bucket.nbytes),), 255, dtype=torch.uint8)
        bucket.filled(tensors).pack(flat)
        for name, tensor in bucket.unpacked(flat):
            assert torch.equal(tensor, tensors[name])
        limit_holds = bucket.nbytes <= bucket_bytes
        assert limit_holds or len(bucket) == 1 or any(set(bucket.names) == set(group) for group in groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_contiguous_tensors_are_packed_in_logical_order(dtype):
    transposed = torch.arange(6, dtype=dtype).view(2, 3).t()  # shape (3, 2)
    bucket = plan_buckets([_meta("w", 3, 2, dtype=dtype)], 64)[0].filled({"w": transposed})
    flat = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    bucket.pack(flat)
    assert bucket.unpacked(flat).tensors["w"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="bucket_bytes is 0"):
        plan_buckets([_meta("w", 1)], 0)
    with pytest.raises(ValueError, match="twice"):
        plan_buckets([_meta("w", 1), _meta("w", 1)], 8)
    with pytest.raises(IncompleteGroup, match="absent"):
        plan_buckets([_meta("w", 1)], 8, [("w", "absent")])
    with pytest.raises(UnknownTensor, match="alias"):
        plan_buckets([_meta("w", 1, alias_of="v")], 8)
    with pytest.raises(ShapeMismatch, match=r"\(2,\)"):
        plan_buckets([_meta("w", 1)], 8)[0].filled({"w": torch.zeros(2)})
    with pytest.raises(UnknownTensor):
        plan_buckets([_meta("w", 1)], 8)[0].filled({})
    with pytest.raises(ValueError, match="empty"):
        _meta("", 1)
    assert list(Bucket(index=0, metadata=())) == []


def test_fused_groups_of_names():
    names = [
        "l.0.self_attn.q_proj.weight",
        "l.0.self_attn.q_proj.bias",
        "l.0.self_attn.k_proj.weight",
        "l.0.self_attn.v_proj.weight",
        "l.0.self_attn.o_proj.weight",
        "l.0.mlp.gate_proj.weight",
        "l.0.mlp.up_proj.weight",
        "l.1.mlp.experts.0.gate_proj.weight",
        "l.1.mlp.experts.1.down_proj.weight",
        "l.1.mlp.shared_expert.gate_proj.weight",
    ]
    assert fused_groups(names) == [tuple(names[:4]), tuple(names[5:7]), tuple(names[7:9])]


def test_digest_sees_every_difference():
    metadata = [_meta("a", 2), _meta("b", 2)]
    digest = build_manifest(metadata, bucket_bytes=64).digest
    others = [
        build_manifest(metadata[::-1], bucket_bytes=64),
        build_manifest(metadata, bucket_bytes=65),
        build_manifest([_meta("a", 2), _meta("b", 3)], bucket_bytes=64),
        build_manifest([_meta("a", 2), _meta("b", 2, dtype=torch.float16)], bucket_bytes=64),
        build_manifest([_meta("a", 2), _meta("b", 2, alias_of="a")], bucket_bytes=64),
        Manifest(metadata=tuple(metadata), bucket_bytes=64, kind="adapter"),
    ]
    assert len({digest, *(other.digest for other in others)}) == 7


def test_both_name_styles_of_vision_models_reach_the_engine():
    to_engine = PrefixMap(
        {
            "model.language_model.": "language_model.model.",
            "model.visual.": "visual.",
            "lm_head.": "language_model.lm_head.",
            "model.": "language_model.model.",
        }
    )
    newer = ["model.language_model.layers.0.x", "model.visual.y", "lm_head.z"]
    older = ["model.layers.0.x", "visual.y", "lm_head.z"]
    engine = ["language_model.model.layers.0.x", "visual.y", "language_model.lm_head.z"]
    assert [to_engine(name) for name in newer] == engine
    assert [to_engine(name) for name in older] == engine


def test_fingerprint_sees_what_a_norm_misses():
    torch.manual_seed(0)
    tensor = torch.randn(37, 5)
    seen = {fingerprint(tensor)}
    for bit in (0, 9, 22, 31):
        flipped = tensor.clone()
        flipped.view(-1).view(torch.int32)[77] ^= -(2**31) if bit == 31 else 2**bit
        seen.add(fingerprint(flipped))
    permuted = tensor.clone()
    permuted[[3, 4]] = tensor[[4, 3]]
    seen.update([fingerprint(permuted), fingerprint(tensor.flip(0)), fingerprint(tensor.T.contiguous())])
    assert len(seen) == 8
    assert fingerprint(tensor.T.contiguous().T) == fingerprint(tensor)  # layout in memory does not count


def test_fingerprint_by_hand_and_over_chunks():
    words = torch.tensor([1, 0, 0, 0, 2, 0, 0, 0], dtype=torch.uint8)
    one, two = (fingerprint(words[:4]), fingerprint(torch.cat([words[:4] * 0, words[4:] // 2])))
    total = (one + 2 * two + 2**63) % 2**64 - 2**63
    assert fingerprint(words) == total  # a weighted sum modulo 2**64
    large = torch.zeros((1 << 20) + 3, dtype=torch.int32)
    moved = large.clone()
    large[5], moved[(1 << 20) + 2] = 1, 1
    assert fingerprint(large) != fingerprint(moved)
    for dtype in (torch.bool, torch.bfloat16, torch.uint8, torch.float64):
        assert fingerprint(torch.ones(3, dtype=dtype)) != fingerprint(torch.zeros(3, dtype=dtype))
    assert fingerprint(torch.ones(0)) == 0


def test_rotating_sample_goes_round():
    names = list("abcde")
    assert rotating_sample(names, 0, 2) == tuple("abcde")
    assert [rotating_sample(names, update, 2) for update in (1, 2, 3)] == [("a", "b"), ("c", "d"), ("e", "a")]


def test_errors_cross_processes_and_keep_their_bases():
    for name in rft_sync.__all__:
        kind = getattr(rft_sync, name)
        if isinstance(kind, type) and issubclass(kind, Exception):
            error = pickle.loads(pickle.dumps(kind("what to do", ["w"])))
            assert (type(error), str(error), error.names) == (kind, "what to do", ("w",))
            assert issubclass(kind, WeightSyncError)
            assert kind is WeightSyncError or kind.__mro__[2] is not Exception
    assert rft_sync.__all__ == sorted(rft_sync.__all__)
