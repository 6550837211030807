"""Wrong arguments of a step in a loop of one's own, each with what to write instead."""

import inspect

import numpy as np
import pytest
from flax import nnx

import jaxscale as jx
from jaxscale.errors import UserError
from jaxscale.state.batches import check_rows

ROWS = np.ones((4, 3), np.float32)


def loss(module, batch):
    return (module(batch["x"])[:, 0] - batch["y"]) ** 2


def step_of(**plan):
    model = jx.models.ForeignModel(lambda rngs: nnx.Linear(3, 1, rngs=rngs), loss)
    return jx.build(jx.Experiment("own", model, None, batch=4), jx.Plan(**plan))


@pytest.fixture(scope="module")
def step():
    return step_of(mesh="1")


@pytest.fixture(scope="module")
def state(step):
    return step.init()


def batch_of(rows, width=3):
    return {"x": np.ones((rows, width), np.float32), "y": np.ones(rows, np.float32)}


def test_a_step_with_wrong_arguments_is_refused(step, state):
    batch = step.place(batch_of(4))
    wrong = {
        "got the state as the second argument, expected it as the first: state, metrics = step": (batch, state),
        "got a pair as the state, since a step returns the state and its metrics": ((state, {}), batch),
        "got a NoneType as the state, expected the one of step.init": (None, batch),
        "got a tuple as the batch, expected a dict of arrays": (state, (ROWS, ROWS)),
    }
    for message, arguments in wrong.items():
        with pytest.raises(UserError, match=message):
            inspect.unwrap(type(step).__call__)(step, *arguments)  # as without run-time type checks
    with pytest.raises(UserError, match=r"step.evaluate\(state, batch\): got the state as the second argument"):
        inspect.unwrap(type(step).evaluate)(step, batch, state)
    with pytest.raises(UserError, match="init: got a Rngs, expected nothing, or a dict of arrays by name"):
        inspect.unwrap(type(step).init)(step, nnx.Rngs(0))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((ROWS, ROWS), "batch: got a tuple, expected a dict of arrays"),
        ({"x": np.array(["a", "b"])}, r"batch: x is <U1\[2\], expected an array of numbers"),
        ({"x": ROWS.tolist()}, r"batch: x is a list, expected an array, such as np.asarray\(x\)"),
    ],
)
def test_a_batch_that_cannot_be_placed_is_refused(batch, message):
    with pytest.raises(UserError, match=message):
        inspect.unwrap(check_rows)(batch)


def test_other_numbers_of_rows_are_named_where_they_do_not_fit(step, state):
    with pytest.raises(
        UserError, match="got 6 rows, which 4 devices cannot share evenly: give a multiple of 4, such as 8"
    ):
        step_of(mesh="data:4").place(batch_of(6))
    parts = step_of(mesh="1", microbatches=4)
    message = "batch: got 6 rows, but the experiment's batch is 4: set batch=6 in the Experiment, or give 4 rows"
    with pytest.raises(UserError, match=message):
        parts(state, parts.place(batch_of(6)))
