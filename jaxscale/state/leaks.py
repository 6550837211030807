"""Errors of a compiled step: an array of one trace that another reads, and a state that an earlier step has used up."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from jaxscale.blocks import Model
from jaxscale.errors import UserError
from jaxscale.values.user_frames import place_of

P = ParamSpec("P")
R = TypeVar("R")


def explaining_leaks(run: Callable[P, R], model: Model) -> Callable[P, R]:
    """Return a compiled function whose errors about its arrays say what to change.

    JAX turns an array of another trace into one more input of the program, which nobody passes. A donated state is
    deleted.

    Args:
        run: the compiled function.
        model: the model, whose code is the likely place.
    """

    def explained_run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return run(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            if "donated" not in str(error) or "delete" not in str(error):
                raise
            raise UserError(
                "the state was donated to an earlier step, which deletes its arrays: pass the state that this step "
                "returned, as in state, metrics = step(state, batch)",
                page="start/own_loop",
            ) from error
        except TypeError as error:
            if "Computation compiled for" not in str(error):
                raise
            raise UserError(
                f"{place_of(getattr(model, 'score', None))}the model or its score keeps an array of one trace, in a "
                "list, a global or an attribute of a class, and reads it in another: return the array, or keep it in a "
                "variable of the module, such as nnx.BatchStat"
            ) from error

    return explained_run
