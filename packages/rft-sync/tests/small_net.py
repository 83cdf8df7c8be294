"""A model that several tests on ranks send: it runs, and q and k are a fused group."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 6)
        self.q_proj, self.k_proj = nn.Linear(6, 6), nn.Linear(6, 3)
        self.lm_head = nn.Linear(6, 5, bias=False)

    def forward(self, ids):
        hidden = self.embed(ids)
        return self.lm_head(torch.tanh(self.q_proj(hidden)) + self.k_proj(hidden).sum(-1, keepdim=True))
