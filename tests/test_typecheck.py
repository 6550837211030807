"""The tests' own check of annotations: what it finds, and that it finds it in functions of every kind."""

import importlib
import sys

import jax.numpy as jnp
import pytest
import typecheck
from beartype.roar import BeartypeCallHintViolation

MODULE = """
from collections.abc import Iterator

from jaxscale.typing import Array, Float


def scaled(x: Float[Array, "B D"], by: Float[Array, "D"], times: "int" = 1) -> Float[Array, "B D"]:
    return x * by[None] if times else x[:, 0]


def maker(value):
    def made(x: int) -> str:
        return value * x

    return made


def counted(last: int) -> Iterator[int]:
    yield from range(last)


class Thing:
    @classmethod
    def named(cls, name: str) -> "Thing":
        return cls()

    @property
    def width(self) -> int:
        return "wide"
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checked")
    (folder / "checked_module.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(sys, "meta_path", list(sys.meta_path))
        typecheck.install("checked_module")
        yield importlib.import_module("checked_module")
    del sys.modules["checked_module"]


x, by = jnp.ones((2, 3)), jnp.ones(3)


def test_what_fits_passes(module):
    assert module.scaled(x, by).shape == (2, 3)
    assert module.maker("ab")(2) == "abab"
    assert list(module.counted(3)) == [0, 1, 2]
    assert isinstance(module.Thing.named("a"), module.Thing)
    assert module.scaled(x[:, :2], by[:2]).shape == (2, 2), "dims hold for one call"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda m: m.scaled(x, by[:2]),  # D is two things
        lambda m: m.scaled(x, by.astype(int)),
        lambda m: m.scaled(x, by, times=0),  # the result lacks a dim
        lambda m: m.scaled(x, by, times="1"),
        lambda m: m.maker("ab")("2"),
        lambda m: m.maker(2)(2),  # the same code, closed over another value
        lambda m: list(m.counted("3")),  # when it begins
        lambda m: m.Thing.named(3),
        lambda m: m.Thing().width,
    ],
)
def test_what_does_not_is_found(module, wrong):
    with pytest.raises(BeartypeCallHintViolation):
        wrong(module)


def test_a_function_keeps_its_name_and_its_place(module):
    assert module.scaled.__name__ == "scaled"
    assert module.scaled.__wrapped__.__code__.co_firstlineno == MODULE[: MODULE.index("def scaled")].count("\n") + 1
