"""Copies of weights that a TPU 7x makes in tiles of 16 x 128 elements."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxscale.planning.fusion import Compiler
from jaxscale.planning.timeline import timeline
from jaxscale.programs.flat import flatten
from jaxscale.programs.placements import place
from jaxscale.programs.retiled import with_retiled_pools, with_retiled_weights

LAYERS, WIDTH = 3, 512
STACK_BYTES = LAYERS * WIDTH * WIDTH * 2


@pytest.mark.parametrize(("dtype", "copies"), [("bfloat16", 1), ("float32", 0)])
def test_two_byte_weights_are_copied_once_before_the_products_and_loops_that_read_them(dtype, copies):
    def fn(x, weights):
        x = jax.lax.scan(lambda x, weight: (x @ weight, None), x, weights)[0]
        return x @ weights[0], weights + 1

    shapes = ((8, 256), (3, 256, 256))
    program = flatten(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)))
    retiled = with_retiled_weights(program)
    kinds = [operation.kind for operation in retiled.operations]
    assert kinds.count("retile") == copies
    if copies:
        copied = retiled.operations[kinds.index("retile")].outputs[0]
        assert copied in retiled.operations[kinds.index("scan")].inputs
        assert program.inputs[1] in retiled.operations[kinds.index("add")].inputs


def gathered_step(batches, gathers=True, dim=1):
    """A program that gathers weights, if asked, and computes a gradient, in a loop if there are several batches.

    `dim` is the dim that the shards split.
    """
    mesh = Mesh(jax.devices(), "fsdp")

    def gather(weights):
        if not gathers:
            return weights
        shards = jax.lax.with_sharding_constraint(weights, NamedSharding(mesh, PartitionSpec(*[None] * dim, "fsdp")))
        return jax.lax.with_sharding_constraint(
            jax.lax.optimization_barrier(shards), NamedSharding(mesh, PartitionSpec())
        )

    def loss(weights, x):
        layer = jax.checkpoint(lambda x, weight: (jnp.sin(x @ weight), None))
        return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32))

    def step(weights, xs):
        copies = gather(weights)
        if batches == 1:
            return jax.grad(loss)(copies, xs[0])

        def add(total, x):
            return total + jax.grad(loss)(copies, x), None

        return jax.lax.scan(add, jnp.zeros_like(weights), xs)[0]

    shapes = (LAYERS, WIDTH, WIDTH), (batches, 8, WIDTH)
    program = flatten(jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)))
    placements = [tuple(("fsdp",) if gathers and index == dim else () for index in range(3)), ((), (), ())]
    return program, placements


def copy_bytes(program, placements):
    """Bytes of the copies of the weights at each moment."""
    moments = timeline(program, place(program, placements, {"fsdp": 8}), Compiler("all")).moments
    return [
        sum(item.bytes for item in moment.items if item.kind == "compute copy" and item.bytes == STACK_BYTES)
        for moment in moments
    ]


def test_each_pass_reads_a_copy_of_gathered_weights_and_all_stay_through_the_forward_pass():
    program, placements = gathered_step(batches=1)
    assert max(copy_bytes(program, placements)) == STACK_BYTES
    retiled = with_retiled_weights(program)
    loops = [operation for operation in retiled.operations if operation.loop_body is not None]
    copies = [operation.outputs[0] for operation in retiled.operations if operation.kind == "retile"]
    forward_copy, backward_copy, _ = copies
    assert forward_copy in loops[0].inputs
    assert backward_copy in loops[1].inputs
    weights_bytes = copy_bytes(retiled, placements)
    assert max(weights_bytes) == 3 * STACK_BYTES
    assert weights_bytes[-1] == STACK_BYTES


def test_weights_that_are_gathered_in_another_layout_do_not_stay_beside_their_copies():
    program, placements = gathered_step(batches=1, dim=2)  # 64 columns of a device pad to 128, and its 512 rows do not
    weights_bytes = copy_bytes(with_retiled_weights(program), placements)
    assert max(weights_bytes) == 2 * STACK_BYTES
    assert weights_bytes[-1] == STACK_BYTES


def test_a_loop_over_microbatches_reads_one_copy_of_gathered_weights():
    program, placements = gathered_step(batches=2)
    retiled = with_retiled_weights(program)
    (loop,) = (operation for operation in retiled.operations if operation.loop_body is not None)
    (copy,) = (operation for operation in retiled.operations if operation.kind == "retile")
    assert copy.outputs[0] in loop.inputs
    assert copy_bytes(retiled, placements)[-1] == STACK_BYTES


def test_weights_that_are_whole_are_copied_once_for_both_passes():
    program, _ = gathered_step(batches=1, gathers=False)
    retiled = with_retiled_weights(program)
    loops = [operation for operation in retiled.operations if operation.loop_body is not None]
    (copy,) = (operation.outputs[0] for operation in retiled.operations if operation.kind == "retile")
    assert all(copy in loop.inputs for loop in loops)


@pytest.mark.parametrize(
    ("shape", "dtype", "retiles_weights", "copies"),
    [
        ((4, 16, 197, 256), "bfloat16", False, 1),  # tiles along the rows need no padding, and tokens do
        ((4, 16, 192, 256), "bfloat16", False, 0),
        ((4, 16, 192, 256), "bfloat16", True, 1),
        ((4, 16, 192, 256), "float32", True, 0),
        ((4, 2, 3), "float32", False, 0),  # small
    ],
)
def test_the_ticks_of_a_pipeline_copy_arguments_whose_layout_is_not_row_major(shape, dtype, retiles_weights, copies):
    def body(pool, x):
        def tick(state, turn):
            branches = [lambda pool, x: (pool, x), lambda pool, x: (pool.at[turn % 4].set(x), x + 1)]
            return jax.lax.switch(turn % 2, branches, *state), None

        fresh_pool = jnp.zeros_like(pool[0])  # computed, not an argument
        (pool, _), _ = jax.lax.scan(tick, (pool[0], x), jnp.arange(4))
        (other_pool, _), _ = jax.lax.scan(tick, (fresh_pool, x), jnp.arange(4))
        return pool[None], other_pool[None]

    mesh = AbstractMesh((2,), ("pipe",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("pipe")
    run = jax.shard_map(
        body, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, axis_names={"pipe"}, check_vma=False
    )
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((2, *shape), shape[1:])]
    program = flatten(jax.make_jaxpr(run)(*arguments))
    retiled = with_retiled_pools(program, retiles_weights=retiles_weights)
    all_copies = [operation for operation in retiled.operations if operation.kind == "retile"]
    loops = [operation for operation in retiled.operations if operation.loop_body is not None]
    pools = [operation for operation in all_copies if retiled.avals[operation.outputs[0]].shape == shape]
    assert len(pools) == copies
    assert all(operation.outputs[0] in loops[0].inputs for operation in pools)
    assert (retiled is program) == (not all_copies)
