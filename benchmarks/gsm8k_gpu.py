"""The GSM8K result on one GPU, seed by seed: base, warm start and reinforcement, and the control beside them.

    python benchmarks/gsm8k_gpu.py --train gsm8k/train.jsonl --test gsm8k/test.jsonl --seeds 1 \\
        [--stages base reinforcement control] [--at_once 3] [--output runs/gsm8k] [--limit_seconds 560]
        [-- flags of apps/gsm8k]

Each stage is one run of apps/gsm8k with a limit on its wall clock, in OUTPUT/base or OUTPUT/seed_N/STAGE. `base`
evaluates the model as it comes, once; `reinforcement` is the recipe smollm2-gsm8k; `control` trains on gold answers for
as many seconds as the reinforcement of that seed took, from the same warm start. Choose settings with
`--validation N`, which takes the last N train problems out of training and evaluates on them, not on the test file.

`--at_once N` runs N seeds of a stage side by side on the device, so that each has its share of it: a rollout of a small
model keeps one core of the host busy and the device hardly. A run's output is OUTPUT/logs/NAME.log.

OUTPUT/packed has one archive for each run with all but weights, checkpoints and rollouts. Unpacked side by side they
are what `python apps/gsm8k/card.py OUTPUT --section NAME` makes the card of.
"""

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "apps" / "gsm8k"))
STAGES = ("base", "reinforcement", "control")
AFTER_LAST_STEP_SECONDS = 45.0
"""Of the limit: what lies before the app's own clock begins, and the checkpoint and model written at the end."""
END_SECONDS = 35.0
"""torchrun hands the signal on and ends a rank that does not obey within 30 s."""
HEAVY = {"warm_start", "model", "checkpoints", "rollouts", "tensorboard"}


def command(stage: str, seed: int, arguments: argparse.Namespace) -> list[str]:
    """The command of a stage."""
    from gsm8k_app.run_records import reinforcement_seconds

    folder = stage_folder(arguments.output, stage, seed)
    train, test = arguments.data
    # Of a flag that is given twice the last one counts, so further flags win.
    flags = ["--recipe", "smollm2-gsm8k", "--dataset", str(train), "--eval_dataset", str(test), "--seed", str(seed)]
    if arguments.model is not None and stage != "control":
        flags += ["--pretrain", arguments.model]
    if stage == "base":
        flags += ["--warm_start_epochs", "0", "--max_steps", "0"]
    elif stage == "reinforcement":
        flags += ["--max_seconds", f"{max(1.0, arguments.limit_seconds - AFTER_LAST_STEP_SECONDS):g}"]
    else:
        run = stage_folder(arguments.output, "reinforcement", seed)
        flags[1] = "smollm2-gsm8k-control"
        flags += ["--pretrain", str(run / "warm_start")]
        flags += ["--warm_start_seconds", f"{reinforcement_seconds(run):.1f}"]
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(arguments.ranks)]
    app = [str(ROOT / "apps" / "gsm8k"), *flags, "--output_dir", str(folder), "--overwrite"]
    return [sys.executable, "-m", *launcher, *app, *arguments.further]


def stage_folder(output: Path, stage: str, seed: int) -> Path:
    """Where a stage's run lies."""
    return output / "base" if stage == "base" else output / f"seed_{seed}" / stage


def run(stage: str, seed: int, arguments: argparse.Namespace) -> bool:
    """Run a stage within its limit; whether it ended well."""
    from rft_trainer.errors import ConfigurationError

    try:
        words = command(stage, seed, arguments)
    except ConfigurationError as missing:
        print(f"{stage}, seed {seed}: not run, {missing}", flush=True)
        return False
    print("+", " ".join(words), flush=True)
    folder = stage_folder(arguments.output, stage, seed)
    name = "-".join(folder.relative_to(arguments.output).parts)
    log = arguments.output / "logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    # vLLM's compiled graphs: one that is being written is no good to another run that starts.
    place = {"VLLM_CACHE_ROOT": str(arguments.output / "vllm" / str(seed))} if arguments.at_once > 1 else {}
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **place})
        try:
            code = process.wait(timeout=arguments.limit_seconds)
        except subprocess.TimeoutExpired:
            code = stop(process)
    print(f"{stage}, seed {seed}: exit code {code} after {time.monotonic() - start:.0f} s, {log}", flush=True)
    pack(folder, name, arguments.output)
    return code == 0


def stop(process: subprocess.Popen[bytes]) -> int:
    """End a run that is over its limit through torchrun, whose ranks are in sessions of their own."""
    print(f"over its limit: pid {process.pid} is ended", flush=True)
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def pack(folder: Path, name: str, output: Path) -> None:
    """Everything of a run that is small, in one archive with its place below `output`."""
    if not folder.is_dir():
        return
    place = folder.relative_to(output)
    archive = output / "packed" / f"{name}.tar.gz"
    archive.parent.mkdir(exist_ok=True)
    with tarfile.open(archive, "w:gz") as packed:
        for file in sorted(file for file in folder.rglob("*") if file.is_file()):
            if file.relative_to(folder).parts[0] not in HEAVY:
                packed.add(file, str(place / file.relative_to(folder)))
    print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB", flush=True)


def cut_data(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """The files to train and to evaluate on: as given, or parts of them."""
    if not arguments.validation and not arguments.rows:
        return arguments.train.resolve(), arguments.test.resolve()
    train = arguments.train.read_text(encoding="utf-8").splitlines(keepends=True)
    test = arguments.test.read_text(encoding="utf-8").splitlines(keepends=True)
    if arguments.validation:
        train, test = train[: -arguments.validation], train[-arguments.validation :]
    parts = []
    for name, rows in (("train", train), ("validation" if arguments.validation else "test", test)):
        file = arguments.output / "data" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(rows[: arguments.rows or None]), encoding="utf-8")
        parts.append(file.resolve())
    return parts[0], parts[1]


def show(arguments: argparse.Namespace) -> None:
    """The accuracies of all runs that are there, strict extraction."""
    from gsm8k_app.run_records import read_run

    for folder in [arguments.output / "base", *sorted(arguments.output.glob("seed_*/*"))]:
        if not (folder / "summary.json").is_file():
            continue
        for step, scored in read_run(folder).accuracies.items():
            figures = {"greedy": scored.greedy, "sampled": scored.sampled, "pass@8": scored.best}
            text = "  ".join(
                f"{name} {'-' if by['strict'] is None else format(by['strict'], '.1%')}" for name, by in figures.items()
            )
            print(f"{folder.relative_to(arguments.output)!s:24} step {step:3}: {text}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--test", type=Path, required=True, help="GSM8K's test.jsonl")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=["reinforcement", "control"])
    parser.add_argument("--at_once", type=int, default=1, help="seeds of a stage that run side by side")
    parser.add_argument("--output", type=Path, default=Path("runs/gsm8k"))
    parser.add_argument("--limit_seconds", type=float, default=560.0, help="wall clock of each stage")
    parser.add_argument("--validation", type=int, default=0, help="train problems to evaluate on instead of the test")
    parser.add_argument("--rows", type=int, default=0, help="use the first rows of each file only, for a rehearsal")
    parser.add_argument("--model", help="another model than the recipe's, as --pretrain takes it")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("further", nargs="*", help="flags of apps/gsm8k for every stage, after --")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    arguments.output.mkdir(parents=True, exist_ok=True)
    arguments.data = cut_data(arguments)
    done = []
    for stage in (stage for stage in STAGES if stage in arguments.stages):
        # The base model is the same for every seed.
        seeds = arguments.seeds[:1] if stage == "base" else arguments.seeds
        with ThreadPoolExecutor(arguments.at_once) as workers:
            done += workers.map(lambda seed, stage=stage: run(stage, seed, arguments), seeds)
    show(arguments)
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
