"""Which values of float32 a TPU keeps in bfloat16 follows from their readers."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxscale.planning.fusion import Arrays, Compiler
from jaxscale.programs.flat import flatten
from jaxscale.programs.placements import place
from jaxscale.programs.rounded import is_rounded, with_entered_copies, with_rounded_copies

X = jnp.zeros((32, 32))
KB = 32 * 32 * 4


def flat(fn, *args):
    return flatten(jax.make_jaxpr(fn)(*args))


@pytest.mark.parametrize(
    ("fn", "rounded"),
    [
        (lambda y, x: y @ x, True),
        (lambda y, x: (y.T.reshape(1, 32, 32)[0] @ x, x @ y), True),  # transposes and reshapes lead to products
        (
            lambda y, x: jax.lax.dynamic_index_in_dim(y.reshape(2, 16, 32), x[0, 0].astype(int), keepdims=False) @ x,
            True,
        ),
        (lambda y, x: jax.lax.optimization_barrier((x, y))[1] @ x, True),
        (lambda y, x: jnp.broadcast_to(y, (1, 32, 32)) @ x, True),
        (lambda y, x: jnp.broadcast_to(y, (4, 32, 32)) @ x, False),  # a larger array, which is computed in float32
        (lambda y, x: (pair := jax.lax.optimization_barrier((x, y)), pair[0] @ x, pair[1])[1:], False),
        (lambda y, x: jnp.matmul(y, x, precision="highest"), False),  # three passes have all bits
        (lambda y, x: y @ x + y, False),
        (lambda y, x: jnp.sin(y) @ x, False),  # computed in float32 inside the product
        (lambda y, x: jax.lax.scan(lambda total, _: (total + y @ x, None), x, length=3)[0], True),
        (lambda y, x: jax.lax.scan(lambda y, _: (y @ x, None), y, length=3)[0], False),  # a state that changes
    ],
)
def test_a_value_is_rounded_if_only_products_of_the_default_precision_read_it(fn, rounded):
    program = flat(lambda x: fn(2.0 * x, x), X)
    assert is_rounded(program.operations[0].outputs[0], program) == rounded


def test_a_result_and_a_value_in_bfloat16_are_not_rounded():
    program = flat(lambda x: (y := 2.0 * x, y @ x), X)
    assert not is_rounded(program.operations[0].outputs[0], program)
    program = flat(lambda x: (2 * x) @ x, X.astype(jnp.bfloat16))
    assert not is_rounded(program.operations[0].outputs[0], program)


def test_what_a_loop_keeps_for_the_gradients_of_weights_takes_half_on_a_tpu():
    def loss(x, weights):
        def block(x, weight):
            return jnp.sin(x) @ weight, None

        return jax.lax.scan(block, x, weights)[0].sum()

    program = flat(jax.grad(loss, argnums=1), X, jnp.zeros((5, 32, 32)))
    for rounds, share in ((False, 1.0), (True, 0.5)):
        placements = place(program, [((),) * 2, ((),) * 3], {})
        arrays = Arrays(program, placements, Compiler("all", rounds_operands=rounds))
        forward_loop = next(operation for operation in program.operations if operation.loop_body is not None)
        stack_bytes = [arrays.array_bytes[value] for value in forward_loop.outputs[1:]]
        # the sine of each block's input, which the gradient of its weight reads, and the cosine, which it does not
        assert sorted(stack_bytes) == [5 * KB * share, 5 * KB]


def accumulated(weight, xs):
    gradient = jax.grad(lambda weight, x: jnp.sum(jnp.sin(x @ weight)))
    return weight - jax.lax.scan(lambda total, x: (total + gradient(weight, x), None), jnp.zeros_like(weight), xs)[0]


@pytest.mark.parametrize(("size", "copies"), [(256, 1), (16, 0)])
def test_a_loop_over_microbatches_reads_large_weights_in_bfloat16(size, copies):
    program = flat(accumulated, jnp.zeros((size, size)), jnp.zeros((2, 8, size)))
    changed = with_rounded_copies(program)
    kinds = [operation.kind for operation in changed.operations]
    assert kinds.count("retile") == copies
    if copies:
        copy = changed.operations[kinds.index("retile")]
        assert copy.inputs == (program.inputs[0],)
        assert changed.avals[copy.outputs[0]].dtype == jnp.bfloat16
        assert copy.outputs[0] in changed.operations[kinds.index("scan")].inputs
        assert program.inputs[0] in changed.operations[kinds.index("sub")].inputs


@pytest.mark.parametrize(("dtype", "bytes_per_element"), [("bfloat16", 2), (None, 6)])
def test_the_ticks_of_a_pipeline_read_copies_of_weights_that_only_products_read(dtype, bytes_per_element):
    def body(x, weights, table):
        def tick(x, turn):
            branches = [lambda x: x, lambda x: x @ weights[0] + table]
            return jax.lax.switch(turn % 2, branches, x), None

        return jax.lax.scan(tick, x, jnp.arange(4))[0]

    mesh = AbstractMesh((2,), ("pipe",), axis_types=(AxisType.Auto,))
    specs, out_specs = (PartitionSpec(), PartitionSpec("pipe"), PartitionSpec()), PartitionSpec()
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out_specs, axis_names={"pipe"}, check_vma=False)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 256), (2, 256, 256), (256, 256))]
    program = with_entered_copies(flat(run, *arguments), dtype)
    copies = [operation.outputs[0] for operation in program.operations if operation.kind == "retile"]
    assert len(copies) == 1  # the table is added, not multiplied
    arrays = Arrays(program, place(program, [], {"pipe": 2}), Compiler("all", rounds_operands=True))
    assert arrays.array_bytes[copies[0]] == 256 * 256 * bytes_per_element
