"""Errors of a compiled step: wrong arguments, an array of an earlier trace, a state donated to an earlier step."""

from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from jaxscale.errors import UserError
from jaxscale.recipe.experiment import Experiment
from jaxscale.state.train_state import TrainState
from jaxscale.typing import PyTree
from jaxscale.values.user_frames import place_of

P = ParamSpec("P")
R = TypeVar("R")


def check_arguments(state: PyTree, batch: PyTree, name: str = "step") -> None:
    """Raise UserError unless a function of a step is called with a state and a dict of arrays, in this order.

    Args:
        state: the first argument.
        batch: the second argument.
        name: name of the function.
    """
    if isinstance(state, TrainState) and isinstance(batch, Mapping):
        return
    call_text = "state, metrics = step(state, batch)" if name == "step" else f"{name}(state, batch)"
    if isinstance(batch, TrainState):
        reason_text = f"got the state as the second argument, expected it as the first: {call_text}"
    elif isinstance(state, tuple) and any(isinstance(item, TrainState) for item in state):
        reason_text = (
            "got a pair as the state, since a step returns the state and its metrics: write "
            "state, metrics = step(state, batch)"
        )
    elif not isinstance(state, TrainState):
        reason_text = (
            f"got a {type(state).__name__} as the state, expected the one of step.init() or of the step before"
        )
    else:
        reason_text = (
            f"got a {type(batch).__name__} as the batch, expected a dict of arrays, such as {{'x': x, 'y': y}}, "
            "with the names that the score reads"
        )
    raise UserError(f"{name}(state, batch): {reason_text}", page="start/own_loop")


def with_explained_errors(run: Callable[P, R], experiment: Experiment) -> Callable[P, R]:
    """Return a function like `run` whose errors about its arrays explain what the user should change.

    An array that leaked from another trace is an additional input of the program, which no caller passes. The arrays of
    a donated state are deleted, so no later step can read them.

    Args:
        run: the compiled function.
        experiment: the experiment. Errors report its number of rows in a batch, and the place of its model's score.
    """

    def explained_run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return run(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            _explain_row_count(error, experiment, args[-1])
            if "donated" not in str(error) or "delete" not in str(error):
                raise
            raise UserError(
                "the state was donated to an earlier step, which deletes its arrays: pass the state that this step "
                "returned, as in state, metrics = step(state, batch)",
                page="start/own_loop",
            ) from error
        except TypeError as error:
            _explain_row_count(error, experiment, args[-1])
            if "Computation compiled for" not in str(error):
                raise
            raise UserError(
                f"{place_of(getattr(experiment.model, 'score', None))}the model or its score keeps an array of one "
                "trace, in a list, a global or an attribute of a class, and reads it in another: return the array, or "
                "keep it in a variable of the module, such as nnx.BatchStat"
            ) from error

    return explained_run


def _explain_row_count(error: Exception, experiment: Experiment, batch: PyTree) -> None:
    """Raise UserError in place of `error` if the batch does not have the experiment's number of rows."""
    arrays = list(batch.values()) if isinstance(batch, Mapping) else []
    row_count = next((array.shape[0] for array in arrays if getattr(array, "shape", ())), experiment.batch)
    if row_count != experiment.batch and not isinstance(error, UserError):
        raise UserError(
            f"batch: got {row_count} rows, but the experiment's batch is {experiment.batch}: set batch={row_count} "
            f"in the Experiment, or give {experiment.batch} rows in each batch",
            page="start/own_loop",
        ) from error
