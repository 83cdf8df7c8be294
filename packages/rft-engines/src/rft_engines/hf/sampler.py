"""Choosing the next token: pure functions on logits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rft_engines.sampling import SamplingParams

_BLOCK = 128
_FIRST_CANDIDATES = 1024


def choose_tokens(logits: Tensor, uniforms: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Next token [B] and its log-probability [B] (fp32) from logits [B, V] and uniform numbers [B] (float64).

    The log-probability is that of the distribution sampled from; greedy reports the untempered full one.
    """
    if sampling.greedy:
        scores = logits.float()
        tokens = scores.argmax(dim=-1)
        return tokens, chosen_log_probs(scores, tokens)
    scores = logits.float() if sampling.temperature == 1 else logits.float() / sampling.temperature
    if sampling.top_k == 0 and sampling.top_p == 1:
        return invert_cdf(scores, uniforms)
    kept_scores, kept_ids = truncate(scores, sampling.top_k, sampling.top_p)
    places, log_probs = invert_cdf(kept_scores, uniforms)
    return kept_ids.gather(1, places[:, None])[:, 0], log_probs


def chosen_log_probs(scores: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(scores)[token], [B], without a [B, V] result."""
    return scores.gather(1, tokens[:, None])[:, 0] - torch.logsumexp(scores, dim=-1)


def invert_cdf(scores: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Index [B] where the cumulative softmax of scores [B, V] passes uniforms [B], and its log-probability [B].

    Two levels: the block of 128 entries first, then the entry in it, both cumulated in float64. One pass over the
    vocabulary, and a difference of matmul rounding moves the choice only when the uniform number falls within that
    rounding of a boundary, where perturbed scores compared with noise (Gumbel) would flip far more often.
    """
    rows, vocabulary = scores.shape
    peak = scores.amax(dim=-1, keepdim=True)
    mass = (scores - peak).exp_()
    padding = -vocabulary % _BLOCK
    blocks = (F.pad(mass, (0, padding)) if padding else mass).view(rows, -1, _BLOCK)
    block_mass = blocks.sum(dim=-1).double()
    cumulated = block_mass.cumsum(dim=-1)
    total = cumulated[:, -1:]
    # Strictly below the total, which the last entry that has mass reaches.
    target = uniforms[:, None].clamp(max=1 - 1e-12) * total
    block = torch.searchsorted(cumulated, target, right=True).clamp_(max=blocks.shape[1] - 1)
    below = cumulated.gather(1, block) - block_mass.gather(1, block)
    # The share of the way through the block, in [0, 1): kept a hair below 1, or rounding could pick an entry of mass 0.
    share = ((target - below) / block_mass.gather(1, block)).clamp_(0, 1 - 1e-12)
    entries = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(dim=-1)
    entry = torch.searchsorted(entries, share * entries[:, -1:], right=True).clamp_(max=_BLOCK - 1)
    index = (block * _BLOCK + entry)[:, 0]
    log_probs = scores.gather(1, index[:, None])[:, 0] - peak[:, 0] - total[:, 0].log().float()
    return index, log_probs


def truncate(scores: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Scores and ids [B, C] of the tokens that `top_k`, then `top_p`, keep; others at -inf. Ids ascend in each row.

    `top_p` keeps a token when the mass of the likelier ones is below `top_p`, so at least one stays.
    """
    vocabulary = scores.shape[-1]
    if top_k:
        kept, ids = scores.topk(min(top_k, vocabulary), dim=-1)
        normaliser = torch.logsumexp(kept, dim=-1, keepdim=True)
    else:
        # Sorting the whole vocabulary is the dear part; the few likeliest tokens hold top_p of the mass nearly always.
        normaliser = torch.logsumexp(scores, dim=-1, keepdim=True)
        kept, ids = scores.topk(min(_FIRST_CANDIDATES, vocabulary), dim=-1)
        if bool(((kept - normaliser).exp().sum(dim=-1) < top_p).any()):
            kept, ids = scores.sort(dim=-1, descending=True)
    if top_p < 1:
        mass = (kept - normaliser).exp()
        kept = kept.masked_fill(mass.cumsum(dim=-1) - mass >= top_p, float("-inf"))
    ids, order = ids.sort(dim=-1)
    return kept.gather(1, order), ids
