import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from jaxscale.programs.flat import flatten
from jaxscale.programs.placements import place
from jaxscale.programs.tiles import kernel_tiles, with_retiled_inputs

WIDE = 2 * 12 * 512 * 64 * 4  # bytes of the array in the tests, of which half the lanes are empty


def copy(x_ref, y_ref):
    y_ref[...] = x_ref[...]


def kernel(x):
    return pl.pallas_call(copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def placed(function, *shapes):
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    program = flatten(jaxpr)
    unsharded = [((),) * len(shape) for shape in shapes]
    return program, place(program, unsharded, {}, tiles=kernel_tiles(program))


def test_operands_and_results_of_a_kernel_are_tiled_along_their_last_two_dims():
    program, placements = placed(lambda x: kernel(x * 2.0) + 1.0, (2, 12, 512, 64))
    multiply, call, add = (operation.outputs[0] for operation in program.operations)
    assert [placements.value_bytes(value) / WIDE for value in (multiply, call)] == [2.0, 2.0]
    assert placements.value_bytes(add) == WIDE  # XLA chooses the layout


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 0, 1, 3)])
def test_a_transpose_before_or_after_a_kernel_costs_nothing(order):
    inverse = tuple(order.index(dim) for dim in range(4))
    shape = tuple((2, 12, 512, 64)[dim] for dim in inverse)
    program, placements = placed(lambda x: kernel((x * 2.0).transpose(order)).transpose(inverse), shape)
    assert {placements.value_bytes(operation.outputs[0]) for operation in program.operations} == {2 * WIDE}


def test_what_a_loop_keeps_for_a_kernel_has_the_kernels_tiles():
    def loop(x):
        total, kept = jax.lax.scan(lambda carry, _: (carry + 1.0, kernel(carry)), x, length=3)
        return jax.lax.scan(lambda carry, row: (carry + kernel(row), None), total, kept)[0]

    program, placements = placed(loop, (2, 12, 512, 64))
    first_loop = next(operation for operation in program.operations if operation.kind == "scan")
    state, stack = first_loop.outputs
    assert placements.value_bytes(stack) == 3 * 2 * WIDE
    assert placements.value_bytes(state) == WIDE


@pytest.mark.parametrize(("dtype", "copies"), [("bfloat16", 1), ("float32", 0)])
def test_two_byte_weights_are_copied_once_before_the_products_and_loops_that_read_them(dtype, copies):
    def fn(x, weights):
        x = jax.lax.scan(lambda x, weight: (x @ weight, None), x, weights)[0]
        return x @ weights[0], weights + 1

    shapes = ((8, 256), (3, 256, 256))
    program = flatten(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)))
    retiled = with_retiled_inputs(program)
    kinds = [operation.kind for operation in retiled.operations]
    assert kinds.count("retile") == copies
    if copies:
        copied = retiled.operations[kinds.index("retile")].outputs[0]
        assert copied in retiled.operations[kinds.index("scan")].inputs
        assert program.inputs[1] in retiled.operations[kinds.index("add")].inputs
