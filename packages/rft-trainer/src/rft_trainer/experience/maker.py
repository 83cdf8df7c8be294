"""From prompts to experiences, role by role: rollout, rewards, actor, reference, critic, teacher, advantages."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from rft_dist import Mean, Sum
from rft_engines import Generation, GenerationRequest, SamplingParams, request_seed
from rft_rewards import RewardComputationEngine
from rft_trainer.data import EncodedPrompt
from rft_trainer.experience.credit import CreditAssigner
from rft_trainer.experience.experience import Collator, Experience, placeholder, reward_sample
from rft_trainer.experience.micro_batches import MicroBatchPlanner
from rft_trainer.experience.partial import PartialRollouts
from rft_trainer.models.padding import on_host
from rft_trainer.strategy.protocols import RolloutRuntime


class PhaseTimer(Protocol):
    """Context manager that adds the time inside to the named phase."""

    def __call__(self, name: str) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The models of one step, as their backend wraps them; None: the run has no such role."""

    actor: nn.Module
    reference: nn.Module | None = None
    critic: nn.Module | None = None
    teacher: nn.Module | None = None


class FastExperienceMaker:
    """Runs each role over the whole rollout before the next one starts.

    Args:
        runtime: generates with weights of a known version.
        rewards: scores responses.
        decode: token ids to text without special tokens, what rewards see.
        credit: from scores to advantages.
        planner: micro-batches agreed over ranks.
        collator: batches of experiences for the models.
        score_with_actor: compute the actor's log-probabilities now; off when the only update of a rollout uses its own
            forward for them.
        count_experts: count the choices of a mixture of experts in the same pass.
        base_seed: seed of the run; each sample's seed derives from (seed, step, prompt, sample).
    """

    def __init__(
        self,
        *,
        runtime: RolloutRuntime,
        rewards: RewardComputationEngine,
        decode: Callable[[Sequence[int]], str],
        credit: CreditAssigner,
        planner: MicroBatchPlanner,
        collator: Collator,
        score_with_actor: bool,
        count_experts: bool = False,
        base_seed: int,
    ) -> None:
        self._runtime = runtime
        self._rewards = rewards
        self._decode = decode
        self._credit = credit
        self._planner = planner
        self._collate = collator
        self._score_with_actor = score_with_actor
        self._count_experts = count_experts
        self._seed = base_seed
        self._made: list[ref[Experience]] = []

    def learnable(self, experiences: Sequence[Experience], roles: Roles, timer: PhaseTimer) -> dict[str, Mean]:
        """Scored responses become what the update learns from: columns of the roles, reward, advantages.

        Metrics that still want their reduction. Collective over the world.
        """
        if self._score_with_actor:
            with timer("actor_log_probs"):
                self._score(roles.actor, experiences, "old_log_probs", counts_experts=self._count_experts)
        if roles.reference is not None:
            with timer("reference"):
                self._score(roles.reference, experiences, "ref_log_probs")
        if roles.critic is not None:
            with timer("critic_values"):
                self._score(roles.critic, experiences, "values")
        if roles.teacher is not None:
            with timer("teacher"):
                self._score(roles.teacher, experiences, "teacher_log_probs")
        with timer("advantages"):
            return self._credit(experiences)

    def requests(
        self, items: Sequence[int], prompts: Sequence[EncodedPrompt], *, step: int, number: int = 0
    ) -> list[GenerationRequest]:
        """One request per prompt.

        `items` number the prompts within their data set: they enter the seeds, so that a prompt draws the same samples
        however the prompts are spread over ranks. `number` counts the rounds of a step.
        """
        base = self._seed if number == 0 else request_seed(self._seed, step, number)
        return [
            GenerationRequest(prompt.token_ids, seed=request_seed(base, step, item), request_id=f"{step}-{item}")
            for item, prompt in zip(items, prompts, strict=True)
        ]

    def rollout(
        self,
        items: Sequence[int],
        prompts: Sequence[EncodedPrompt],
        sampling: SamplingParams,
        *,
        step: int,
        number: int = 0,
    ) -> list[Experience]:
        """Generate only: n responses for each item, side by side. Collective over the rollout TP group."""
        with self._runtime.awake():
            generations = self._runtime.generate(self.requests(items, prompts, step=step, number=number), sampling)
        return [
            self._experience(generation, prompts[index // sampling.n], items[index // sampling.n])
            for index, generation in enumerate(generations)
        ]

    def partial_rollout(
        self,
        partial: PartialRollouts,
        items: Sequence[int],
        prompts: Sequence[EncodedPrompt],
        sampling: SamplingParams,
        *,
        step: int,
    ) -> list[Experience]:
        """Groups that were finished in this step, whenever they began; `prompts` are all of the data set.

        Collective over the rollout TP group.
        """
        requests = self.requests(items, [prompts[item] for item in items], step=step)
        with self._runtime.awake():
            groups = partial.step(items, requests, sampling, version=self._runtime.weights_version)
        experiences = []
        for group in groups:
            for generation, sample in zip(group.generations(sampling), group.samples, strict=True):
                experience = self._experience(generation, prompts[group.item], group.item)
                experience.token_versions = torch.tensor(sample.versions, dtype=torch.long)
                experiences.append(experience)
        return experiences

    def _experience(self, generation: Generation, prompt: EncodedPrompt, group: int) -> Experience:
        response_ids = torch.tensor(generation.token_ids, dtype=torch.long)
        made = Experience(
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
            token_versions=torch.full((len(response_ids),), generation.weights_version),
        )
        self._made.append(ref(made))
        return made

    def tensors(self) -> Iterator[Tensor]:
        """The tensors of all experiences made here that somebody still holds."""
        alive = [(known, made) for known in self._made if (made := known()) is not None]
        self._made = [known for known, _ in alive]
        for _, experience in alive:
            yield from (value for value in vars(experience).values() if isinstance(value, Tensor))

    def take_reward_counts(self) -> dict[str, Sum]:
        """Events that the reward functions counted since the last call, such as time-outs and missing answers."""
        return {name: Sum(float(count)) for name, count in self._rewards.take_counters().items()}

    def reward(self, experiences: Sequence[Experience]) -> None:
        """Fill `score`, `scores` and `step_rewards`; `reward` is the score until it is shaped."""
        results = self._rewards.compute([reward_sample(e) for e in experiences])
        for experience, result in zip(experiences, results, strict=True):
            experience.score = experience.reward = result.total
            experience.scores = dict(result.scores)
            experience.step_rewards = result.step_rewards or ()

    def state_dict(self) -> dict[str, Any]:
        """What the rewards of the next step depend on."""
        return self._credit.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._credit.load_state_dict(state)

    @torch.no_grad()
    def _score(
        self, model: nn.Module, experiences: Sequence[Experience], column: str, *, counts_experts: bool = False
    ) -> None:
        """Fill a column in eval mode; the model's mode is restored. Collective over the world."""
        training, options = model.training, {"with_experts": True} if counts_experts else {}
        # On the device until all are there: a copy in between would make the host wait for each forward.
        scored: list[tuple[Experience, Tensor, Tensor | None]] = []
        model.eval()
        try:
            for indices in self._planner.plan(experiences):
                rows = [experiences[i] for i in indices] or [placeholder(experiences)]
                output = model(self._collate(rows).layout, **options)
                for row, index in enumerate(indices):
                    one = experiences[index]
                    counts = output.expert_counts[row] if counts_experts else None
                    # The first output is the one per token: log-probabilities or values.
                    scored.append((one, output[0][row, : len(one.response_ids)], counts))
        finally:
            model.train(training)
        per_token = on_host([numbers for _, numbers, _ in scored])
        for (experience, _, counts), numbers in zip(scored, per_token, strict=True):
            setattr(experience, column, numbers)
            if counts is not None:
                experience.expert_counts = counts.cpu()
