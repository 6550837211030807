"""A warning about random numbers of NumPy or Python in a model or a score. A compiled step would repeat them forever.

Such numbers are drawn while the step is traced, so they become constants of the compiled step. Drawing changes the
state of a generator, so the states before and after a trace are compared. The compared generators are NumPy's global
generator, and the generators among the globals of the model's and score's files and among their functions' closure
variables. Python's global generator is compared only if such a file imports `random`, and if beartype, which draws
from it, is not loaded. A generator that the function itself creates, such as `np.random.default_rng()`, is not found.
"""

import contextlib
import functools
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxscale.values.user_frames import place_of


@contextlib.contextmanager
def warning_of_host_random(model: Any) -> Iterator[None]:
    """Return a context in which a model's loss is traced. It warns if a random generator of the host draws meanwhile.

    Args:
        model: the model, whose `make` and `score` are the user's functions.
    """
    score, make = getattr(model, "score", None), getattr(model, "make", None)
    earlier_state_by_name = _generator_states(score, make)
    yield
    generator_names = [
        name
        for name, state in _generator_states(score, make).items()
        if state != earlier_state_by_name.get(name, state)
    ]
    if generator_names:
        warnings.warn(
            f"{place_of(score)}the score or its model draws random numbers from {' and '.join(generator_names)}. The "
            "step is traced once, so they are constants, the same in every step: keep keys in the module (self.rngs = "
            "rngs), and draw with jax.random from the key self.rngs.dropout(), which is another one in every step",
            stacklevel=2,
        )


def _generator_states(*functions: Any) -> dict[str, str]:
    """Return the state of each random generator that the functions may use, as text, by the generator's name."""
    state_by_name = {"np.random": repr(np.random.get_state(legacy=False))}
    for function in functions:
        for name, generator in _variables_of(function).items():
            if generator is random and "beartype" not in sys.modules:
                state_by_name["Python's random"] = repr(random.getstate())
            elif isinstance(generator, np.random.Generator):
                state_by_name[f"the generator {name}"] = repr(generator.bit_generator.state)
            elif isinstance(generator, np.random.RandomState):
                state_by_name[f"the generator {name}"] = repr(generator.get_state(legacy=False))
            elif isinstance(generator, random.Random):
                state_by_name[f"the generator {name}"] = repr(generator.getstate())
    return state_by_name


def _variables_of(function: Any) -> Mapping[str, Any]:
    """Return the globals of a function's file and the function's closure variables, by name."""
    while isinstance(function, functools.partial):
        function = function.func
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    value_by_name = dict(getattr(function, "__globals__", None) or getattr(module, "__dict__", {}))
    cells = getattr(function, "__closure__", None) or ()
    variable_names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(variable_names, cells, strict=False):
        with contextlib.suppress(ValueError):  # the variable is not set yet
            value_by_name[name] = cell.cell_contents
    return value_by_name
