"""Signals: the first is noted, its echo is the same one, the next has its usual effect."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from rft_trainer.trainer import stop_signals
from rft_trainer.trainer.stop_signals import StopSignals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_its_echo_is_the_same(number):
    said = []
    before = signal.getsignal(number)
    with StopSignals(said.append) as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert stop.requested
    assert len(said) == 1
    assert signal.Signals(number).name in said[0]
    assert signal.getsignal(number) == before


def test_another_thread_changes_nothing():
    seen = []

    def inside():
        with StopSignals(seen.append) as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [False]


def test_a_second_signal_ends_the_process_at_once():
    program = f"""
import os, signal, time
from rft_trainer.trainer import stop_signals
with stop_signals.StopSignals(lambda text: None):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep({stop_signals.SAME_SIGNAL_SECONDS} + 0.2)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=120, check=False)
    assert done.returncode == -signal.SIGINT
