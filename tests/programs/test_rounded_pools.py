"""Which pools of waiting values a TPU keeps in bfloat16 follows from the readers of their slots."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxscale.planning.fusion import Arrays, Compiler
from jaxscale.programs.flat import flatten
from jaxscale.programs.placements import place
from jaxscale.programs.rounded_pools import with_rounded_pools

SIZE = 256
SLOTS = 2
SLOT_BYTES = SIZE * SIZE * 4


def write(x, total, pool, turn):
    """Compute a value in a nested branch, and write it to a slot."""
    value = jax.lax.cond(turn > 4, lambda: x @ x, lambda: jnp.sin(x))
    return x, total, jax.lax.dynamic_update_index_in_dim(pool, value, turn % SLOTS, 0)


def multiply(x, total, pool, turn):
    """Read a slot by a product alone."""
    return x, total + x @ jax.lax.dynamic_index_in_dim(pool, turn % SLOTS, keepdims=False), pool


def add(x, total, pool, turn):
    """Read a slot by an addition."""
    return x, total + jax.lax.dynamic_index_in_dim(pool, turn % SLOTS, keepdims=False), pool


def multiply_in_full_precision(x, total, pool, turn):
    """Read a slot by a product that does not round."""
    slot = jax.lax.dynamic_index_in_dim(pool, turn % SLOTS, keepdims=False)
    return x, total + jnp.matmul(x, slot, precision="highest"), pool


def empty(x, total, pool, turn):
    """Replace the pool."""
    return x, total, 0.0 * pool


def wait(x, total, pool, turn):
    """Return everything unchanged."""
    return x, total, pool


def write_twice(x, total, pool, turn):
    """Compute a value in a nested branch, write it to a slot, and add it."""
    value, other = jax.lax.cond(turn > 4, lambda: (y := x @ x, y), lambda: (jnp.sin(x), jnp.cos(x)))
    return x, total + other, jax.lax.dynamic_update_index_in_dim(pool, value, turn % SLOTS, 0)


def program_of(branches, dtype="float32", returns_pool=False, starts_as="zeros"):
    """The program of ticks that run these branches in turns."""

    def run(x, argument):
        def tick(state, turn):
            functions = [lambda *state, branch=branch: branch(*state, turn) for branch in branches]
            return jax.lax.switch(turn % len(branches), functions, *state), None

        pool = argument if starts_as == "argument" else jnp.zeros((SLOTS, SIZE, SIZE), dtype)
        start = pool.sum() if starts_as == "read" else 0.0
        _, total, pool = jax.lax.scan(tick, (x, jnp.zeros_like(x), pool), jnp.arange(6))[0]
        return (total, pool) if returns_pool else total + start

    mesh = AbstractMesh((2,), ("pipe",), axis_types=(AxisType.Auto,))
    none = PartitionSpec()
    run = jax.shard_map(run, mesh=mesh, in_specs=none, out_specs=none, axis_names={"pipe"}, check_vma=False)
    argument_shape = (SLOTS, SIZE, SIZE) if starts_as == "argument" else (1,)
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((SIZE, SIZE), argument_shape)]
    return flatten(jax.make_jaxpr(run)(*arguments))


def pool_types(program):
    """The types of all arrays with the shape of the pool, in all parts of the program."""
    types = {str(aval.dtype) for aval in program.avals.values() if getattr(aval, "shape", ()) == (SLOTS, SIZE, SIZE)}
    for operation in program.operations:
        for part in (*operation.branches, *([] if operation.loop_body is None else [operation.loop_body])):
            types |= pool_types(part)
    return types


@pytest.mark.parametrize(
    ("branches", "dtype"),
    [
        ([write, multiply, wait], "bfloat16"),
        ([multiply, wait, write], "bfloat16"),
        ([write, multiply, add], "float32"),
        ([write, multiply_in_full_precision], "float32"),
        ([write, multiply, empty], "float32"),
    ],
)
def test_a_pool_is_rounded_if_only_products_of_the_default_precision_read_its_slots(branches, dtype):
    program = program_of(branches)
    assert pool_types(program) == {"float32"}
    assert pool_types(with_rounded_pools(program)) == {dtype}


def test_a_pool_that_is_returned_or_has_other_types_stays():
    program = program_of([write, multiply], returns_pool=True)
    assert with_rounded_pools(program) is program
    program = program_of([write, multiply], "bfloat16")
    assert with_rounded_pools(program) is program


@pytest.mark.parametrize("starts_as", ["argument", "read"])
def test_a_pool_whose_start_is_an_argument_or_is_read_stays(starts_as):
    program = program_of([write, multiply], starts_as=starts_as)
    assert with_rounded_pools(program) is program


def test_what_is_written_to_a_rounded_pool_takes_half_where_it_is_computed():
    sizes = []
    for branches in ([write, multiply], [write, add], [write_twice, multiply]):
        program = with_rounded_pools(program_of(branches))
        (tick_loop,) = (operation for operation in program.operations if operation.loop_body is not None)
        (switch,) = (operation for operation in tick_loop.loop_body.operations if operation.branches)
        branch = switch.branches[0]
        (cond,) = (operation for operation in branch.operations if operation.branches)
        compiler = Compiler("all", rounds_operands=True)
        arrays = Arrays(branch, place(branch, [], {"pipe": 2}), compiler)
        value = cond.outputs[0]
        inner_types = [str(part.avals[part.outputs[0]].dtype) for part in cond.branches]
        sizes.append((arrays.array_bytes[value], inner_types))
    assert sizes == [
        (SLOT_BYTES // 2, ["bfloat16", "bfloat16"]),
        (SLOT_BYTES, ["float32", "float32"]),
        (SLOT_BYTES // 2, ["bfloat16", "float32"]),  # the second branch, `x @ x`, returns the same array in float32
    ]
