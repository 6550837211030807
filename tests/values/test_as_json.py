"""Names of code in JSON: the same whenever the code is made again, different where the code is."""

import dataclasses
import functools
import re
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

from jaxscale.values import to_json


@dataclasses.dataclass(frozen=True)
class Act:
    """A function that is a value."""

    slope: float = 0.1
    inner: Any = None

    def __call__(self, x: float) -> float:
        return self.slope * x


def make() -> dict[str, Any]:
    """Functions and classes made anew by each call."""

    def plain(x, act=None, **more):
        return x

    class Local:
        def method(self):
            return self

    partial = functools.partial
    return {
        "lambda": lambda x: x,
        "local function": plain,
        "local class": Local,
        "of a function": partial(plain, act=lambda x: -x),
        "of a class": partial(plain, Local, object(), act=Local()),
        "of a partial": partial(partial(plain, act=plain), act=partial(plain, 1)),
        "in containers": partial(plain, [plain, (Local,)], act={"a": plain}, kinds={"x", "y", "z"}),
        "of a value": partial(plain, act=Act(inner=plain)),
        "of a method": partial(plain, act=Local().method),
        "of arrays": partial(plain, act=np.arange(3), dtype=np.float32, of=np.dtype("int8")),
        "ufunc": np.tanh,
    }


@pytest.mark.parametrize("name", make())
def test_code_made_twice_has_one_name_without_addresses(name):
    first, second = to_json(make()[name]), to_json(make()[name])
    assert first == second
    assert set(first) == {"callable"}
    assert not re.search(r"0x[0-9a-f]{4}", str(first))


def test_different_code_has_different_names():
    names = [to_json(code)["callable"] for code in make().values()]
    assert len(set(names)) == len(names)
    partial = functools.partial
    assert to_json(partial(len, Act(0.1))) != to_json(partial(len, Act(0.2)))
    assert to_json(partial(len, act=len)) == {"callable": "builtins:len(act=builtins:len)"}
    assert to_json(np.tanh) != to_json(np.exp)


def test_names_are_those_of_the_next_process():
    code = """
        import functools
        from jaxscale.values import to_json
        print(to_json(functools.partial(print, {"b", "a", "c"}, key=lambda x: x, sep=object())))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    said = {
        subprocess.run(command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
        for seed in "123"
    }
    assert said == {"{'callable': \"builtins:print({'a', 'b', 'c'}, key=__main__:<lambda>, sep=builtins:object)\"}\n"}
