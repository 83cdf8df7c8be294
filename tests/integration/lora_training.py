"""Rows and a loss that the LoRA tests share."""

import torch

from rft_trainer.models import padded_layout

ROWS, LENGTH, PROMPT = 8, 12, 4


def prompts_and_responses(rows=slice(None)):
    """Eight random rows in one layout."""
    ids = torch.randint(0, 256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(7))[rows]
    return padded_layout(list(ids[:, :PROMPT]), list(ids[:, PROMPT:]), pad_token_id=0)


def weighted_loss(module, rows):
    """These rows' share of the weighted mean over all response tokens of all rows."""
    weights = torch.randn(ROWS, generator=torch.Generator().manual_seed(8))[rows]
    scores = module(prompts_and_responses(rows))
    return -(scores.log_probs * weights[:, None]).sum() / (ROWS * (LENGTH - PROMPT))
