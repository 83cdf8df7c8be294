"""Which experiences share one forward: the same number of micro-batches on every rank."""

from collections.abc import Sequence

from rft_trainer.experience.experience import Experience
from rft_trainer.strategy.protocols import DataParallel


class MicroBatchPlanner:
    """Plans by a number of responses, or by a token budget when one is given.

    keep_order: responses stay side by side as they are, so that those to one prompt can share its tokens.
    """

    def __init__(
        self, data: DataParallel, *, responses: int, max_tokens: int | None = None, keep_order: bool = False
    ) -> None:
        self._data = data
        self._keep_order = keep_order
        self._responses = responses
        self._max_tokens = max_tokens

    def plan(self, experiences: Sequence[Experience]) -> list[list[int]]:
        """Indices by micro-batch; an empty one keeps this rank in step with the others. Collective over the world."""
        lengths = [e.length for e in experiences]
        if self._max_tokens is not None:
            return self._data.micro_batches(lengths, self._max_tokens)
        order = list(range(len(lengths)))
        if not self._keep_order:
            # Rows of like length share a batch, so little of it is padding.
            order.sort(key=lambda i: (lengths[i], i))
        batches = [order[i : i + self._responses] for i in range(0, len(order), self._responses)]
        return batches + [[] for _ in range(self._data.most(len(batches)) - len(batches))]
