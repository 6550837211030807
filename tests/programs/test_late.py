"""Which arrays are finished late follows from the flat program alone."""

import jax
import jax.numpy as jnp
import pytest

from jaxscale.programs.flat import FlatProgram, flatten
from jaxscale.programs.late import late_arrays

ARRAYS = ("dot_general", "scan", "reduce_sum")


@pytest.fixture
def program() -> FlatProgram:
    """Two blocks in a loop, a head in the compute type, and a loss."""

    def loss(blocks: jax.Array, head: jax.Array, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, block: (jnp.tanh(x @ block), None), x, blocks)
        return jnp.sum(jnp.exp((2 * x) @ head))

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 4, 4), (4, 32), (8, 4))]
    return flatten(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*shapes))


def test_a_heads_gradient_keeps_logits_and_hidden_states_until_the_blocks_are_done(program: FlatProgram) -> None:
    backward = [at for at, one in enumerate(program.operations) if one.kind == "dot_general" and one.is_backward]
    head = next(at for at in backward if 32 in program.avals[program.operations[at].outputs[0]].shape)
    late = late_arrays(program, [head], lambda one: one.kind in ARRAYS)
    assert sorted(program.avals[value].shape for value in late) == [(8, 4), (8, 32)]
    (end,) = set(late.values())
    assert program.operations[end].kind == "scan"
    assert program.operations[end].params["reverse"]


def test_nothing_is_late_without_a_ring_or_of_the_forward_pass(program: FlatProgram) -> None:
    forward = next(at for at, one in enumerate(program.operations) if one.kind == "dot_general")
    for rings in ([], [forward]):
        assert late_arrays(program, rings, lambda one: one.kind in ARRAYS) == {}


def test_without_a_loop_of_blocks_nothing_waits() -> None:
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 4), (4, 32))]
    program = flatten(jax.make_jaxpr(jax.grad(lambda x, head: jnp.sum(jnp.exp(x @ head)), (0, 1)))(*shapes))
    rings = range(len(program.operations))
    assert late_arrays(program, rings, lambda one: one.kind in ARRAYS) == {}
