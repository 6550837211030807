"""Random numbers of NumPy and Python in a user's score: found by the states of generators, without false alarms."""

import random
import sys
import types

import numpy as np
import pytest

from jaxscale.values.host_random import warning_of_host_random

RNG = np.random.default_rng(0)
OLD = np.random.RandomState(0)
OWN = random.Random(0)


def model_of(score):
    return types.SimpleNamespace(score=score)


def score_of_closure():
    rng = np.random.default_rng(1)
    return lambda: rng.normal()


@pytest.mark.parametrize(
    ("score", "name"),
    [
        (lambda: np.random.rand(3), "np.random"),
        (lambda: random.random(), "Python's random"),
        (lambda: RNG.normal(), "the generator RNG"),
        (lambda: OLD.normal(), "the generator OLD"),
        (lambda: OWN.random(), "the generator OWN"),
        (score_of_closure(), "the generator rng"),
    ],
    ids=["numpy", "python", "generator", "state", "own", "closure"],
)
def test_a_draw_is_a_warning_that_names_the_generator_and_the_line(score, name, monkeypatch):
    monkeypatch.delitem(sys.modules, "beartype", raising=False)  # which draws from Python's generator
    line = score.__code__.co_firstlineno
    with (
        pytest.warns(
            UserWarning, match=rf"test_host_random.py:{line}: the score .* draws .* from {name}\. The step is"
        ),
        warning_of_host_random(model_of(score)),
    ):
        score()


def test_no_draw_is_no_warning():
    with warning_of_host_random(model_of(score_of_closure())):
        np.random.default_rng(3).normal()
    with warning_of_host_random(object()):
        pass
