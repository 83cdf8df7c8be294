"""From prompts to experiences, role by role: rollout, actor, reference, rewards, advantages."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rft_dist import Sum
from rft_engines import Generation, GenerationRequest, SamplingParams, request_seed
from rft_rewards import RewardComputationEngine, RewardSample
from rft_trainer.algorithms import AdvantageEstimator, AdvantageInputs, Moments, whiten
from rft_trainer.data import EncodedPrompt
from rft_trainer.experience.experience import Collator, Experience
from rft_trainer.experience.micro_batches import MicroBatchPlanner
from rft_trainer.models.padding import right_pad
from rft_trainer.strategy.protocols import DataParallel, RolloutRuntime


class PhaseTimer(Protocol):
    """Context manager that adds the time inside to the named phase."""

    def __call__(self, name: str) -> Any: ...


class FastExperienceMaker:
    """Runs each role over the whole rollout before the next one starts.

    Args:
        runtime: generates with weights of a known version.
        rewards: scores responses.
        decode: token ids to text without special tokens, what rewards see.
        estimator: entry of `AdvantageEstimator`.
        data: collectives over the data ranks.
        planner: micro-batches agreed over ranks.
        collator: batches of experiences for the models.
        score_with_actor: compute the actor's log-probabilities now; off when the only update of a rollout uses its own
            forward for them.
        base_seed: seed of the run; each sample's seed derives from (seed, step, prompt, sample).
    """

    def __init__(
        self,
        *,
        runtime: RolloutRuntime,
        rewards: RewardComputationEngine,
        decode: Callable[[Sequence[int]], str],
        estimator: str,
        data: DataParallel,
        planner: MicroBatchPlanner,
        collator: Collator,
        score_with_actor: bool,
        base_seed: int,
    ) -> None:
        self._runtime = runtime
        self._rewards = rewards
        self._decode = decode
        self._estimator = AdvantageEstimator.get(estimator)
        self._data = data
        self._planner = planner
        self._collate = collator
        self._score_with_actor = score_with_actor
        self._seed = base_seed

    def make(
        self,
        items: Sequence[int],
        prompts: Sequence[EncodedPrompt],
        sampling: SamplingParams,
        *,
        step: int,
        actor: nn.Module,
        reference: nn.Module | None,
        timer: PhaseTimer,
    ) -> list[Experience]:
        """This rank's experiences, n per prompt, groups side by side.

        Collective over the rollout group (generation) and the world (roles of sharded models).
        """
        with timer("generate"):
            experiences = self.rollout(items, prompts, sampling, step=step)
        if self._score_with_actor:
            with timer("actor_log_probs"):
                self._score(actor, experiences, "old_log_probs")
        if reference is not None:
            with timer("reference"):
                self._score(reference, experiences, "ref_log_probs")
        with timer("rewards"):
            self.reward(experiences)
            self._advantages(experiences, sampling.n)
        return experiences

    def rollout(
        self, items: Sequence[int], prompts: Sequence[EncodedPrompt], sampling: SamplingParams, *, step: int
    ) -> list[Experience]:
        """Generate only. Collective over the rollout TP group.

        `items` number the prompts within their data set: they enter the seeds, so that a prompt draws the same samples
        however the prompts are spread over ranks.
        """
        requests = [
            GenerationRequest(prompt.token_ids, seed=request_seed(self._seed, step, item), request_id=f"{step}-{item}")
            for item, prompt in zip(items, prompts, strict=True)
        ]
        with self._runtime.awake():
            generations = self._runtime.generate(requests, sampling)
        return [
            self._experience(generation, prompts[index // sampling.n], items[index // sampling.n])
            for index, generation in enumerate(generations)
        ]

    def _experience(self, generation: Generation, prompt: EncodedPrompt, group: int) -> Experience:
        response_ids = torch.tensor(generation.token_ids, dtype=torch.long)
        return Experience(
            group=group,
            prompt_ids=torch.tensor(generation.prompt_token_ids, dtype=torch.long),
            response_ids=response_ids,
            response_mask=torch.ones(len(response_ids), dtype=torch.bool),
            engine_log_probs=torch.tensor(generation.log_probs, dtype=torch.float32),
            weights_version=generation.weights_version,
            truncated=generation.truncated,
            prompt_id=prompt.record.id,
            prompt=prompt.text,
            response=self._decode(generation.token_ids),
            reference=prompt.record.reference,
            label=prompt.record.label,
        )

    def take_reward_counts(self) -> dict[str, Sum]:
        """Events that the reward functions counted since the last call, such as time-outs and missing answers."""
        return {name: Sum(float(count)) for name, count in self._rewards.take_counters().items()}

    def reward(self, experiences: Sequence[Experience]) -> None:
        """Fill `reward` and `scores`."""
        results = self._rewards.compute([reward_sample(e) for e in experiences])
        for experience, result in zip(experiences, results, strict=True):
            experience.reward = result.total
            experience.scores = dict(result.scores)

    def _advantages(self, experiences: Sequence[Experience], group_size: int) -> None:
        """Fill `advantages`; whitened over all ranks where the paper says so. Collective over the world."""
        mask = torch.zeros(0, 0, dtype=torch.bool)
        advantages = torch.zeros(0, 0)
        if experiences:
            mask = right_pad([e.response_mask for e in experiences], 0)[0]
            rewards = torch.tensor([e.reward for e in experiences])
            inputs = AdvantageInputs(rewards=rewards, mask=mask, group_size=group_size)
            advantages = self._estimator(inputs).advantages
        if self._estimator.whitens:
            # A rank without responses joins with zeros.
            moments = Moments(self._data.sum(Moments.of(advantages, mask).sums))
            advantages = whiten(advantages, mask, moments=moments)
        for row, experience in enumerate(experiences):
            experience.advantages = advantages[row, : len(experience.response_ids)]

    @torch.no_grad()
    def _score(self, model: nn.Module, experiences: Sequence[Experience], name: str) -> None:
        """Fill one log-probability column in eval mode; the model's mode is restored. Collective over the world."""
        training = model.training
        model.eval()
        try:
            for indices in self._planner.plan(experiences):
                rows = [experiences[i] for i in indices] or [placeholder(experiences)]
                scores: Tensor = model(self._collate(rows).layout).log_probs.cpu()
                for row, index in enumerate(indices):
                    setattr(experiences[index], name, scores[row, : len(experiences[index].response_ids)].clone())
        finally:
            model.train(training)


def reward_sample(experience: Experience) -> RewardSample:
    """What reward functions may look at."""
    return RewardSample(
        response=experience.response,
        response_ids=tuple(experience.response_ids.tolist()),
        prompt=experience.prompt,
        reference=experience.reference,
        label=experience.label,
        truncated=experience.truncated,
    )


def placeholder(experiences: Sequence[Experience]) -> Experience:
    """A two-token row that keeps a rank in step with the others' forwards; it must carry zero weight."""
    token = experiences[0].prompt_ids[:1] if experiences else torch.zeros(1, dtype=torch.long)
    return Experience(
        group=-1,
        prompt_ids=token,
        response_ids=token.clone(),
        response_mask=torch.zeros(1, dtype=torch.bool),
        engine_log_probs=torch.zeros(1),
        weights_version=0,
        truncated=False,
        old_log_probs=torch.zeros(1),
        ref_log_probs=torch.zeros(1),
        advantages=torch.zeros(1),
    )
