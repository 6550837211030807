"""Which frames are the user's, and what to change after an error."""

import functools

import pytest

from jaxscale.errors import UserError
from jaxscale.recipe.plan import Plan
from jaxscale.values import user_frames
from jaxscale.values.user_frames import add_place, advice_on, frames_and_lines_of, place_in, place_of


class Caller:
    def __call__(self, x):
        return x

    def method(self):
        return None


def failing(name):
    rows = {"x": 1}
    return rows[name]


def test_the_place_of_a_function_is_its_first_line():
    line = failing.__code__.co_firstlineno
    for function in (failing, functools.partial(failing, "x"), functools.partial(functools.partial(failing), "x")):
        assert place_of(function).endswith(f"test_user_frames.py:{line}: ")
    assert place_of(Caller()).endswith(f":{Caller.__call__.__code__.co_firstlineno}: ")
    assert place_of(Caller().method).endswith(f":{Caller.method.__code__.co_firstlineno}: ")
    for other in (len, Plan.__init__, functools.partial(print), 3, None):
        assert place_of(other) == ""


def test_an_error_has_the_innermost_line_of_the_user():
    with pytest.raises(KeyError) as caught:
        failing("y")
    assert len(frames_and_lines_of(caught.value.__traceback__)) == 2
    assert place_in(caught.value).endswith(f"test_user_frames.py:{failing.__code__.co_firstlineno + 2}: ")
    with pytest.raises(UserError) as refused:
        Plan(zero=7)
    assert place_in(refused.value).endswith(f":{frames_and_lines_of(refused.value.__traceback__)[-1][1]}: ")
    add_place(caught.value)
    assert caught.value.__notes__ == [f"in your code: {place_in(caught.value)}KeyError"]


def test_a_cell_of_a_notebook_is_the_users(tmp_path, monkeypatch):
    file = str(tmp_path / "ipykernel_12" / "345.py")  # it does not exist: ipykernel keeps the lines in linecache
    monkeypatch.setitem(user_frames.linecache.cache, file, (1, None, ["1 / 0\n"], file))
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("\n1 / 0", file, "exec"))
    assert place_in(caught.value) == "a cell of the notebook:2: "


def test_nothing_is_advised_where_nothing_is_known():
    assert advice_on(ValueError("no good")) == ""
    assert advice_on(TypeError("Nothing.__init__() got an unexpected keyword argument 'a'")) == ""
    assert advice_on(ModuleNotFoundError("No module named 'optaxx'")).startswith("; install it")
