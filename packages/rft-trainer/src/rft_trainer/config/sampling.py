"""Which prompts and responses a step trains on."""

from dataclasses import dataclass

from rft_trainer.config.ranges import below


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Which prompts and responses a step trains on."""

    dynamic_sampling: bool = False
    """Train on groups with different scores only; sample more prompts until there are rollout_batch_size of them. With
    enable_engine_sleep the engine stays awake while responses are scored, unless there is one round only."""
    dynamic_sampling_rounds: int = 8
    """Most rounds of sampling in one step; with 1, groups that teach nothing are left out and not replaced."""
    lowest_group_score: float | None = None
    """Groups with a lower mean score are too hard and left out; none: no bound."""
    highest_group_score: float | None = None
    """Groups with a higher mean score are too easy and left out; none: no bound."""
    reference_max_len: int | None = None
    """Sample for problems alone whose gold answer has at most so many tokens: where it is worked out, short ones are
    easy ones. A warm start still takes all. None: all."""
    first_token_temperature: float | None = None
    """Sampling temperature of each response's first token (FIRE); none: temperature."""
    partial_rollout_tokens: int | None = None
    """Tokens that a response may grow in one step; a longer one goes on in the next step. None: whole responses."""
    partial_rollout_staleness: int = 1
    """Weight updates by which the oldest token of a response may be behind; then it is finished at once."""

    def _sampling_problems(self) -> list[str]:
        problems = below(self, 1, "dynamic_sampling_rounds", "partial_rollout_tokens", "partial_rollout_staleness")
        problems += below(self, 1, "reference_max_len")
        for name in ("lowest_group_score", "highest_group_score"):
            if getattr(self, name) is not None and not self.dynamic_sampling:
                problems.append(
                    f"{name} {getattr(self, name)} and dynamic_sampling off: groups are filtered with it only"
                )
        low, high = self.lowest_group_score, self.highest_group_score
        if low is not None and high is not None and low > high:
            problems.append(f"lowest_group_score is {low} and highest_group_score is {high}: nothing lies between them")
        if self.dynamic_sampling and self.partial_rollout_tokens is not None:
            problems.append(
                f"dynamic_sampling and partial_rollout_tokens {self.partial_rollout_tokens}: groups that are not "
                "finished cannot be judged; leave one of them out"
            )
        if self.first_token_temperature is not None and self.partial_rollout_tokens is not None:
            problems.append(
                f"first_token_temperature {self.first_token_temperature} and partial_rollout_tokens "
                f"{self.partial_rollout_tokens}: a continuation has no first token; leave one of them out"
            )
        if self.first_token_temperature is not None and self.first_token_temperature <= 0:
            problems.append(f"first_token_temperature is {self.first_token_temperature}: give a number above 0")
        return problems
