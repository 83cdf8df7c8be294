"""What the update computed for each response, for rollout files."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rft_trainer.experience.experience import Experience
from rft_trainer.models.padding import on_host


class KeptScores:
    """The last log-probabilities and entropies of each response, on the device until `settle` copies all of them."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[Experience, Tensor]] = {}

    def note(self, rows: Sequence[Experience], log_probs: Tensor, entropies: Tensor) -> None:
        """Both [B, T], of `rows` [B]."""
        kept = torch.stack((log_probs.detach(), entropies.detach()))
        for index, row in enumerate(rows):
            self._latest[id(row)] = (row, kept[:, index, : len(row.response_ids)])

    def settle(self) -> None:
        """Write them into the responses, on the host, and forget them."""
        numbers = on_host([kept for _, kept in self._latest.values()])
        for (row, _), (log_probs, entropies) in zip(self._latest.values(), numbers, strict=True):
            row.update_log_probs, row.update_entropies = log_probs, entropies
        self._latest.clear()
