"""Reward functions that tests name as `sample_functions:name`; worker processes import them too."""

import os
import time


def ones(samples):
    return [1.0 for _ in samples]


def lengths(samples):
    return [float(len(sample.response)) for sample in samples]


def behave(samples):
    """Does what the response asks for, one sample at a time."""
    (sample,) = samples
    if sample.response == "sleep":
        time.sleep(100)
    if sample.response == "busy in C":
        return [float(9**9**9)]
    if sample.response == "die":
        os._exit(3)
    if sample.response == "raise":
        raise KeyError("asked for")
    print("noise on standard output")
    return [{"score": 0.5, "read": sample.response}]


def double(number):
    return number * 2


def misbehave(what):
    if what == "unpicklable":
        return lambda: None
    return behave([type("Sample", (), {"response": what})()])


class Holder:
    @staticmethod
    def twos(samples):
        return [2.0 for _ in samples]


not_callable = 3
