import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from rft_rewards import GraderError, RewardFunctionError, RewardSample, WorkerPool, time_limited


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def _gone(process_id):
    for _ in range(100):
        try:
            state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_outcomes_keep_the_order_through_time_outs_deaths_and_failures():
    pool = WorkerPool("sample_functions:misbehave", workers=2, timeout_seconds=2.0)
    outcomes = pool.map(["a", "sleep", "b", "busy in C", "die", "c", "raise", "unpicklable", "d"])
    states = [outcome.state for outcome in outcomes]
    assert states == ["value", "timed out", "value", "timed out", "failed", "value", "failed", "failed", "value"]
    assert [outcomes[index].value[0]["read"] for index in (0, 2, 5, 8)] == ["a", "b", "c", "d"]
    assert "KeyError" in outcomes[6].value
    assert "pickled" in outcomes[7].value
    processes = pool.process_ids()
    pool.close()
    assert processes  # one of the two was killed last and waits for its next task to start again
    assert all(map(_gone, processes))


def test_a_worker_that_died_idle_costs_no_task():
    pool = WorkerPool("sample_functions:double", workers=1)
    pool.map([1])
    (process,) = pool.process_ids()
    os.kill(process, signal.SIGKILL)
    assert _gone(process)
    assert [outcome.value for outcome in pool.map([1, 2, 3])] == [2, 4, 6]
    pool.close()


def test_many_tasks_over_many_chunks():
    pool = WorkerPool("sample_functions:double", workers=3)
    assert [outcome.value for outcome in pool.map(list(range(500)))] == list(range(0, 1000, 2))
    assert pool.map([]) == []
    first = pool.process_ids()
    assert [outcome.value for outcome in pool.map([1])] == [2]
    assert pool.process_ids() == first
    pool.close()
    assert [outcome.value for outcome in pool.map([4])] == [8]
    pool.close()


def test_a_pool_that_is_dropped_ends_its_processes():
    pool = WorkerPool("sample_functions:double", workers=1)
    pool.map([1])
    (process,) = pool.process_ids()
    del pool
    assert _gone(process)


def test_workers_end_with_a_parent_that_is_killed():
    program = textwrap.dedent("""
        import sys, threading, time
        from rft_rewards import WorkerPool
        pool = WorkerPool("sample_functions:misbehave", workers=2, timeout_seconds=3)
        pool.map(["a", "b"])
        print(*pool.process_ids(), flush=True)
        threading.Thread(target=pool.map, args=(["busy in C"],), daemon=True).start()
        time.sleep(60)
    """)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as parent:
        workers = [int(part) for part in parent.stdout.readline().split()]
        time.sleep(0.5)
        parent.kill()
        parent.wait(timeout=10)
    deadline = time.monotonic() + 300  # one of them ends when it has used up six seconds of processor time
    while time.monotonic() < deadline and not all(map(_gone, workers)):
        pass
    assert len(workers) == 2
    assert all(map(_gone, workers))


def test_a_forked_child_starts_workers_of_its_own():
    pool = WorkerPool("sample_functions:double", workers=1)
    pool.map([1])
    program = textwrap.dedent("""
        import os, sys, warnings
        warnings.simplefilter("ignore")
        from rft_rewards import WorkerPool
        pool = WorkerPool("sample_functions:double", workers=1)
        pool.map([1])
        child = os.fork()
        if child == 0:
            os._exit(0 if pool.map([21])[0].value == 42 else 1)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or pool.map([3])[0].value != 6)
    """)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=60).returncode == 0
    pool.close()


def test_a_target_that_cannot_be_imported_is_named():
    pool = WorkerPool("sample_functions:absent", workers=1)
    with pytest.raises(GraderError, match=r"sample_functions:absent.*AttributeError"):
        pool.map([1])
    pool.close()


def test_eight_threads_with_hard_expressions_and_a_sleeper():
    pytest.importorskip("math_verify")
    from rft_rewards import Grader

    grader = Grader(workers=2, timeout_seconds=2.0)
    sleeper = time_limited("sample_functions:behave", timeout_seconds=2.0, workers=8)
    grader.grade([("x+1", "1+x")] * 2)
    sleeper([RewardSample("x")] * 8)  # workers are up before the clock starts
    results = {}

    def grade(index):
        verdicts = grader.grade([("9^(9^(9^9))", "1"), ("1/3", "1/3")])
        (score,) = sleeper([RewardSample("sleep")])
        results[index] = ([float(verdict.equal) for verdict in verdicts], score.value, score.counts["timeouts"])

    threads = [threading.Thread(target=grade, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    processes = sleeper._pool.process_ids()
    sleeper.close()
    grader.close()
    assert results == {index: ([0.0, 1.0], 0.0, 1) for index in range(8)}
    assert all(map(_gone, processes))


def test_time_limited_functions_report_time_outs_and_name_failures():
    function = time_limited("sample_functions:behave", timeout_seconds=2.0, timeout_score=-1.0)
    scores = function([RewardSample("fine"), RewardSample("sleep")])
    assert [score.value for score in scores] == [0.5, -1.0]
    assert [score.counts["timeouts"] for score in scores] == [0, 1]
    assert scores[0].diagnostics == {"read": "fine"}
    assert scores[1].diagnostics == {"timed_out": True}
    with pytest.raises(RewardFunctionError, match="sample 1 of its batch: KeyError"):
        function([RewardSample("fine"), RewardSample("raise")])
    function.close()
