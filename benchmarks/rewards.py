"""Quality and speed of answer verification: this package, math-verify alone, and the common regular expressions.

    python benchmarks/rewards.py                     all sets; the hand-labelled pairs without the held-out quarter
    python benchmarks/rewards.py --held-out          the held-out quarter as well
    python benchmarks/rewards.py --sets pairs        one set

Sets: `gsm8k`, all gold answers of GSM8K, each in 20 spellings of the same value and 10 of another one, as responses;
`math500`, the gold answers of MATH-500 likewise, as bare answers; `pairs`, the pairs of `data/hard_pairs.md`; `speed`.
The two data sets are looked for as `shared/data/gsm8k` and `shared/data/eval` in the folders above this one.
"""

import argparse
import json
import logging
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from answer_rewrites import gsm8k_changes, gsm8k_spellings, math_changes, math_spellings

from rft_rewards import Grader, extract_gsm8k

HERE = Path(__file__).resolve().parent


class Case(NamedTuple):
    """`answer` is a whole response in the set `gsm8k`, else a bare answer."""

    answer: str
    gold: str
    equal: bool
    kind: str


class Count(NamedTuple):
    equal: int
    unequal: int
    false_negatives: int
    false_positives: int
    seconds: float


Verifier = Callable[[Sequence[Case]], list[bool]]


def shared_data(name: str) -> Path:
    for folder in HERE.parents:
        if (found := folder / "shared" / "data" / name).is_dir():
            return found
    raise SystemExit(f"no shared/data/{name} in a folder above {HERE}")


def gsm8k_cases(every: int) -> Iterator[Case]:
    rows = [
        json.loads(line)["answer"]
        for split in ("train", "test")
        for line in (shared_data("gsm8k") / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    for row in rows[::every]:
        solution, _, gold = row.rpartition("####")
        number = int(gold.strip().replace(",", ""))
        yield Case(row, str(number), True, "as in the data")
        for kind, spelling in gsm8k_spellings(number):
            yield Case(solution + spelling, str(number), True, kind)
        for kind, spelling in gsm8k_changes(number):
            yield Case(solution + spelling, str(number), False, kind)


def math_cases() -> Iterator[Case]:
    for line in (shared_data("eval") / "math500.jsonl").read_text(encoding="utf-8").splitlines():
        gold = json.loads(line)["answer"]
        yield Case(gold, gold, True, "as in the data")
        yield from (Case(spelling, gold, True, kind) for kind, spelling in math_spellings(gold))
        yield from (Case(change, gold, False, kind) for kind, change in math_changes(gold))


def pair_cases(split: str) -> Iterator[Case]:
    for line in (HERE / "data" / "hard_pairs.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["split"] == split:
            yield Case(row["answer"], row["gold"], row["equal"], row["kind"])


def ours_on_responses(cases: Sequence[Case]) -> list[bool]:
    pairs = [(extract_gsm8k(case.answer, "strict"), case.gold) for case in cases]
    return [verdict.equal for verdict in Grader(workers=2).grade(pairs)]


def ours_on_answers(cases: Sequence[Case]) -> list[bool]:
    grader = Grader(workers=2)
    verdicts = grader.grade([(case.answer, case.gold) for case in cases])
    grader.close()
    return [verdict.equal for verdict in verdicts]


def _math_verify_one(pair: tuple[str, str]) -> bool:
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    answer, gold = pair
    return bool(verify(parse(f"${gold}$"), parse(answer)))


def math_verify_on_responses(cases: Sequence[Case]) -> list[bool]:
    return _math_verify([(case.answer, case.gold) for case in cases])


def math_verify_on_answers(cases: Sequence[Case]) -> list[bool]:
    # A bare answer is given as mathematics, the form that math-verify expects, unless it says so itself.
    wrapped = (case.answer if re.search(r"\$|\\\(|\\boxed", case.answer) else f"${case.answer}$" for case in cases)
    return _math_verify(list(zip(wrapped, (case.gold for case in cases), strict=True)))


def _math_verify(pairs: list[tuple[str, str]]) -> list[bool]:
    distinct = list(dict.fromkeys(pairs))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        verdicts = dict(zip(distinct, pool.map(_math_verify_one, distinct, chunksize=64), strict=True))
    return [verdicts[pair] for pair in pairs]


def strict_expression(cases: Sequence[Case]) -> list[bool]:
    """The usual strict rule: digits, points and commas behind the last `#### `, commas dropped, compared as text."""
    found = [re.findall(r"#### (\-?[0-9\.\,]+)", case.answer) for case in cases]
    return [
        bool(answers) and answers[-1].replace(",", "").replace("$", "") == case.gold
        for answers, case in zip(found, cases, strict=True)
    ]


def flexible_expression(cases: Sequence[Case]) -> list[bool]:
    """The usual flexible rule: the last thing like a number; commas, dollars and a final full stop dropped."""
    found = [re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", case.answer) for case in cases]
    return [
        bool(answers) and re.sub(r"[,$]|\.$", "", answers[-1]) == case.gold
        for answers, case in zip(found, cases, strict=True)
    ]


def boxed_expression(cases: Sequence[Case]) -> list[bool]:
    """The usual rule for boxes: what stands in the last `\\boxed{}`, up to the first closing brace, spaces dropped."""
    verdicts = []
    for case in cases:
        boxes = re.findall(
            r"\\boxed\{(.*?)\}", case.answer if "\\boxed" in case.answer else f"\\boxed{{{case.answer}}}"
        )
        verdicts.append(bool(boxes) and boxes[-1].replace(" ", "") == case.gold.replace(" ", ""))
    return verdicts


def measure(verifier: Verifier, cases: Sequence[Case], wrong: list[tuple[Case, bool]]) -> Count:
    start = time.perf_counter()
    verdicts = verifier(cases)
    seconds = time.perf_counter() - start
    mistakes = [(case, verdict) for case, verdict in zip(cases, verdicts, strict=True) if verdict != case.equal]
    wrong += mistakes
    positives = sum(verdict for _, verdict in mistakes)
    equal = sum(case.equal for case in cases)
    return Count(equal, len(cases) - equal, len(mistakes) - positives, positives, seconds)


def quality(title: str, cases: Sequence[Case], verifiers: dict[str, Verifier], show: int) -> None:
    for name, verifier in verifiers.items():
        wrong: list[tuple[Case, bool]] = []
        count = measure(verifier, cases, wrong)
        print(
            f"{title:20} {name:24} false negatives {count.false_negatives:6} of {count.equal:6} "
            f"({100 * count.false_negatives / count.equal:6.2f} %)   false positives {count.false_positives:5} of "
            f"{count.unequal:6} ({100 * count.false_positives / count.unequal:6.2f} %)   {count.seconds:7.1f} s",
            flush=True,
        )
        if name == "rft-rewards":
            for case, verdict in wrong[:show]:
                print(f"    {'FP' if verdict else 'FN'} [{case.kind}] {case.answer[-120:]!r} against {case.gold!r}")


def speed(only: Sequence[str] | None) -> None:
    """Throughput. CPU seconds are the ones to compare on a machine that does other work too."""
    rows = [case for case in gsm8k_cases(1) if case.kind == "as in the data"]
    marked = [row.answer for row in rows]
    for policy, texts in (("strict", marked), ("flexible", [text.rpartition("####")[0] for text in marked])):
        grader = Grader(symbolic="off")
        start, cpu = time.perf_counter(), time.process_time()
        grader.grade([(extract_gsm8k(text, policy), row.gold) for text, row in zip(texts, rows, strict=True)])
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        rates = f"{len(rows) / cpu:.0f} answers a CPU second, {len(rows) / seconds:.0f} a second"
        print(f"GSM8K, {policy}, one process: {rates}")
    batch = list(math_cases())
    batch = batch[:: len(batch) // 4096][:4096]
    for name, verifier in {"rft-rewards": ours_on_answers, "math-verify alone": math_verify_on_answers}.items():
        if only and name not in only:
            continue
        start, cpu = time.perf_counter(), _cpu_seconds()
        verifier(batch)
        seconds, cpu = time.perf_counter() - start, _cpu_seconds() - cpu
        print(f"MATH-500, {len(batch)} pairs, {name}, two processes and their start: {seconds:.1f} s, {cpu:.1f} CPU s")


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def check_labels(cases: Sequence[Case]) -> None:
    """The labels of rewritten plain numbers, checked with the standard library alone."""
    for case in cases:
        if re.fullmatch(r"-?\d+(\.\d+)?(/\d+)?", case.answer) and re.fullmatch(r"-?\d+(\.\d+)?(/\d+)?", case.gold):
            assert (Fraction(case.answer) == Fraction(case.gold)) == case.equal, case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["gsm8k", "math500", "pairs", "speed"])
    parser.add_argument("--held-out", action="store_true", help="also score the held-out quarter of the pairs")
    parser.add_argument("--only", nargs="+", help="names of the verifiers to run")
    parser.add_argument("--every", type=int, default=1, help="take every n-th GSM8K row")
    parser.add_argument(
        "--show", type=int, default=20, help="mistakes of rft-rewards to print, never of the held-out quarter"
    )
    options = parser.parse_args()
    answers = {
        "rft-rewards": ours_on_answers,
        "math-verify alone": math_verify_on_answers,
        "box, compared as text": boxed_expression,
    }
    responses = {
        "rft-rewards": ours_on_responses,
        "strict expression": strict_expression,
        "flexible expression": flexible_expression,
        "math-verify alone": math_verify_on_responses,
    }
    if options.only:
        answers = {name: answers[name] for name in answers if name in options.only}
        responses = {name: responses[name] for name in responses if name in options.only}
    if "pairs" in options.sets:
        quality("pairs, tuning", list(pair_cases("tuning")), answers, options.show)
    if options.held_out:
        quality("pairs, held out", list(pair_cases("held-out")), answers, 0)
    if "math500" in options.sets:
        cases = list(math_cases())
        check_labels(cases)
        quality("MATH-500", cases, answers, options.show)
    if "gsm8k" in options.sets:
        quality("GSM8K", list(gsm8k_cases(options.every)), responses, options.show)
    if "speed" in options.sets:
        speed(options.only)


if __name__ == "__main__":
    main()
