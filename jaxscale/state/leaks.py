"""The error of a step whose model keeps an array of one trace and reads it in another."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from jaxscale.blocks import Model
from jaxscale.errors import UserError
from jaxscale.values.user_frames import place_of

P = ParamSpec("P")
R = TypeVar("R")


def explaining_leaks(run: Callable[P, R], model: Model) -> Callable[P, R]:
    """Return a compiled function whose error about a kept array of a trace says what to change.

    JAX turns such an array into one more input of the program, which nobody passes.

    Args:
        run: the compiled function.
        model: the model, whose code is the likely place.
    """

    def explained_run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return run(*args, **kwargs)
        except TypeError as error:
            if "Computation compiled for" not in str(error):
                raise
            raise UserError(
                f"{place_of(getattr(model, 'score', None))}the model or its score keeps an array of one trace, in a "
                "list, a global or an attribute of a class, and reads it in another: return the array, or keep it in a "
                "variable of the module, such as nnx.BatchStat"
            ) from error

    return explained_run
