"""A made-up run for tests and the benchmark of the report."""

import random

from rft_trainer.report import JsonlLogger, Rollout, RolloutWriter

WORDS = ("the", "sum", "of", "apples", "is", "then", "so", "we", "add", "take", "times", "3", "4", "7", "=", "####")
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> & {{rows}}"


def rollout(group, sample, draw, length, response=None):
    tokens = [f"{draw.choice(WORDS)} " for _ in range(length)] if response is None else list(response)
    reward = float(draw.random() < 0.2 + 0.1 * (group % 5)) if group % 7 else 1.0
    engine = tuple(-draw.expovariate(1.5) for _ in tokens)
    return Rollout(
        group=group,
        prompt_id=f"train.jsonl:{group + 1}",
        prompt=f"<|im_start|>user\nTom has {group} apples and gets {sample_word(group)}. How many?<|im_end|>",
        response="".join(tokens),
        reference=str(group),
        reward=reward,
        scores={"accuracy": reward, "format": 0.5},
        length=len(tokens),
        truncated=sample == 3,
        advantage=reward - 0.5,
        token_ids=tuple(range(100, 100 + len(tokens))),
        tokens=tuple(tokens),
        engine_log_probs=engine,
        trainer_log_probs=tuple(value + draw.gauss(0, 0.02) for value in engine),
        ratios=tuple(draw.lognormvariate(0, 0.05) for _ in tokens),
        advantages=(reward - 0.5,) * len(tokens),
        entropies=tuple(draw.expovariate(1) for _ in tokens),
        mask=tuple(int(i % 9 != 0) for i in range(len(tokens))) if sample == 1 else (),
        weights_version=1,
    )


def sample_word(group):
    return ("four", "five more", "none")[group % 3]


def make_run(folder, *, steps=3, groups=4, samples=4, length=20, hostile=True):
    """A run whose group 0 comes again at every step; at step 1 its first response is hostile."""
    draw = random.Random(0)
    writer = RolloutWriter(folder / "rollouts", max_step_bytes=2**28, max_total_bytes=2**30, name="rank0")
    with JsonlLogger(folder / "metrics.jsonl") as logger:
        logger.log(0, {"eval/accuracy": 0.25, "eval/accuracy_low": 0.1})
        for step in range(1, steps + 1):
            numbers = [0, *range(1 + (step - 1) * (groups - 1), 1 + step * (groups - 1))]
            made = [
                rollout(n, s, draw, length, HOSTILE if hostile and (step, n, s) == (1, 0, 0) else None)
                for n in numbers
                for s in range(samples)
            ]
            writer.write(step, made, count=len(made))
            logger.log(step, {"rollout/reward": 0.3 + 0.1 * step, "train/kl": float("nan") if step == 2 else 0.01})
    return folder
