"""Placements carried through a program: against what is worked out by hand, and against the compiler."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.programs.dims import part_counts
from jaxscale.programs.inline import inline
from jaxscale.programs.spread import propagate
from jaxscale.sharding.partition import dim_axes

SIZES = {"data": 2, "tensor": 4}


def spread_of(fn, *shapes, given):
    """The spread of the (one) result of `fn`, and of every input."""
    program = inline(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)))
    known = {program.inputs[index]: dim_axes(spec, len(shapes[index])) for index, spec in given.items()}
    spreads = propagate(program, known, SIZES)
    return spreads[program.outputs[0]], [spreads[number] for number in program.inputs]


@pytest.mark.parametrize(
    ("fn", "shapes", "given", "expected"),
    [
        (lambda x: jnp.tanh(x) + 1, [(4, 8)], {0: P("data")}, P("data")),
        (lambda x, w: x @ w, [(4, 8), (8, 16)], {0: P("data"), 1: P(None, "tensor")}, P("data", "tensor")),
        (lambda x, w: x @ w, [(4, 8), (8, 16)], {0: P(None, "tensor"), 1: P("tensor")}, P()),
        (lambda x: x.reshape(4, 8, 2), [(4, 16)], {0: P("data", "tensor")}, P("data", "tensor")),
        (lambda x: x.reshape(4, 16), [(4, 8, 2)], {0: P("data", "tensor")}, P("data", "tensor")),
        (lambda x: x.reshape(2, 2, 8), [(4, 8)], {0: P("data", "tensor")}, P("data", None, "tensor")),
        (lambda x: x.T, [(4, 8)], {0: P("data", "tensor")}, P("tensor", "data")),
        (lambda x: x.sum(0), [(4, 8)], {0: P("data", "tensor")}, P("tensor")),
        (lambda x: jnp.broadcast_to(x[None], (3, 4, 8)), [(4, 8)], {0: P("data")}, P(None, "data")),
        (
            lambda x: jnp.einsum("bthd,bshd->bhts", x, x),
            [(2, 3, 4, 5)],
            {0: P("data", None, "tensor")},
            P("data", "tensor"),
        ),
        (lambda x: jnp.concatenate([x, x], 1), [(4, 8)], {0: P("data")}, P("data")),
        (lambda x: jax.nn.relu(x), [(4, 8)], {0: P("data", "tensor")}, P("data", "tensor")),
    ],
)
def test_a_result_lies_where_its_operands_do(fn, shapes, given, expected):
    made, _ = spread_of(fn, *shapes, given=given)
    assert made == dim_axes(expected, len(made))


def test_an_axis_lies_along_one_dim_and_no_dim_is_cut_finer_than_it_is_long():
    made, _ = spread_of(lambda x, w: x @ w, (4, 8), (8, 4), given={0: P("tensor"), 1: P(None, "tensor")})
    assert sorted(map(len, made)) == [0, 1]
    made, _ = spread_of(lambda x: x[:, :2] * 1, (4, 2), given={0: P(None, "tensor")})
    assert part_counts(made, SIZES) == (1, 1)


def constrain(x, spec):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def test_a_constraint_holds_forwards_and_backwards_and_a_gather_stops_it():
    def fn(x, w):
        y = constrain(x @ w, P("data", "tensor"))
        return constrain(y, P("data", None)) * 2

    made, (x, w) = spread_of(fn, (4, 8), (8, 16), given={})
    assert made == (("data",), ())
    assert x == (("data",), ())
    assert w == ((), ("tensor",))


def test_a_result_of_lower_precision_lies_where_its_operand_does():
    made, _ = spread_of(lambda x: jax.lax.reduce_precision(x, 8, 7), (4, 8), given={0: P("data", "tensor")})
    assert made == (("data",), ("tensor",))
