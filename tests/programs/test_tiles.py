import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxscale.programs.flat import flatten
from jaxscale.programs.placements import place
from jaxscale.programs.tiles import prescribed_tiles

WIDE = 2 * 12 * 512 * 64 * 4  # bytes of the array in the tests, of which half the lanes are empty


def copy(x_ref, y_ref):
    y_ref[...] = x_ref[...]


def kernel(x):
    return pl.pallas_call(copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def placed(function, *shapes):
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    program = flatten(jaxpr)
    unsharded = [((),) * len(shape) for shape in shapes]
    return program, place(program, unsharded, {}, tiles=prescribed_tiles(program))


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


def test_a_product_before_a_kernel_keeps_its_layout_and_what_is_rotated_does_not():
    def products(x, w, b):
        return kernel((x @ w + b).reshape(8, 512, 12, 64).transpose(0, 2, 1, 3))

    def rotated(x, w, b):
        first, second = jnp.split((x @ w + b).reshape(8, 512, 12, 64), 2, axis=-1)
        return kernel(jnp.concatenate([second, first], axis=-1).transpose(0, 2, 1, 3))

    shapes = (8, 512, 64), (64, 768), (1, 1, 768)
    for fn, factor in ((products, 1.0), (rotated, 2.0)):
        program, placements = placed(fn, *shapes)
        operand = next(op for op in program.operations if op.kind == "transpose").inputs[0]
        assert placements.value_bytes(operand) == factor * 8 * 512 * 768 * 4


def test_padding_for_a_kernel_does_not_change_the_layout():
    def fn(x):
        padded = jnp.pad(x * 2.0, ((0, 0), (0, 0), (0, 0), (0, 48)))
        return kernel(padded)[..., :80]

    program, placements = placed(fn, (2, 12, 512, 80))
    multiply, result = program.operations[0].outputs[0], program.outputs[0]
    assert placements.value_bytes(multiply) == placements.value_bytes(result) == 2 * 12 * 512 * 128 * 4


@pytest.mark.parametrize(
    ("batch", "features", "factor"),
    [(64, 256, 1.0), (64, 64, 2.0), (128, 64, 1.0), (8, 64, 2.0), (2, 128, 1.0), (3, 128, 4 / 3)],
)
def test_a_convolutions_activations_are_tiled_along_batch_and_features(batch, features, factor):
    def fn(x, weight):
        def conv(x):
            return jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

        return conv(jnp.maximum(conv(x), 0.0))

    program, placements = placed(fn, (batch, 56, 56, features), (1, 1, features, features))
    results = [value for operation in program.operations for value in operation.outputs]
    activations = [value for value in results if program.avals[value].shape == (batch, 56, 56, features)]
    assert len(activations) >= 3  # two convolutions, and the maximum between them
    assert {placements.value_bytes(value) for value in activations} == {factor * batch * 56 * 56 * features * 4}


def test_the_images_of_a_loop_over_microbatches_are_copied_into_a_convolutions_layout():
    def fn(images, weight):
        dims = ("NHWC", "HWIO", "NHWC")

        def step(total, images):
            return total + jax.lax.conv_general_dilated(images, weight, (2, 2), "SAME", dimension_numbers=dims), None

        return jax.lax.scan(step, jnp.zeros((8, 32, 32, 64)), images * 2.0)[0]

    program, placements = placed(fn, (4, 8, 64, 64, 3), (3, 3, 3, 64))
    scaled = next(operation for operation in program.operations if operation.kind == "mul").outputs[0]
    assert placements.value_bytes(scaled) < 2.1 * 4 * 8 * 64 * 64 * 3 * 4  # not 128 lanes for 3 features


@pytest.mark.parametrize("rows", [8, 128])
def test_scores_of_attention_are_tiled_along_queries_and_keys(rows):
    """A product with batch dims has tiles along the others, also as a loop's stack and where the batch would fit."""

    def loop(queries, keys):
        def layer(queries, _):
            scores = jnp.exp(jnp.einsum("bnth,bnsh->bnts", queries, keys))
            return queries + scores.sum(-1, keepdims=True), scores

        return jax.lax.scan(layer, queries, length=3)

    program, placements = placed(loop, (rows, 8, 257, 64), (rows, 8, 257, 64))
    scan = next(operation for operation in program.operations if operation.kind == "scan")
    assert placements.value_bytes(scan.outputs[1]) == pytest.approx(3 * rows * 8 * 264 * 384 * 4, rel=1e-6)


def test_a_barrier_passes_tiles_on_place_by_place():
    """Of two operands of a barrier with one shape, the batched product's result keeps its tiles, the other has none."""

    def fn(x, queries, keys):
        scores = jnp.einsum("bnth,bnsh->bnts", queries, keys)
        return jax.lax.optimization_barrier((x, scores))

    program, placements = placed(fn, (128, 8, 257, 257), (128, 8, 257, 64), (128, 8, 257, 64))
    other, scores = map(placements.value_bytes, program.outputs)
    assert other == 128 * 8 * 257 * 257 * 4
    assert scores == pytest.approx(128 * 8 * 264 * 384 * 4, rel=1e-6)


@pytest.mark.parametrize("is_read", [True, False])
def test_what_waits_in_a_pipeline_for_a_kernel_has_the_kernels_tiles(is_read):
    """The slots take the layout of the branch that reads them with a kernel, although products computed them."""
    mesh = AbstractMesh((2, 2), ("pipe", "data"), axis_types=(AxisType.Auto, AxisType.Auto))
    rows = PartitionSpec("data")
    run_kernel = jax.shard_map(kernel, in_specs=rows, out_specs=rows, axis_names={"data"}, check_vma=False)

    def ticks(x, w):
        def write(pool):
            heads = (x @ w).reshape(4, 512, 12, 64).transpose(0, 2, 1, 3)
            return jax.lax.dynamic_update_index_in_dim(pool, heads, 1, 0), x

        def read(pool):
            waiting = jax.lax.dynamic_index_in_dim(pool, 1, 0, keepdims=False)
            heads = run_kernel(waiting) if is_read else waiting * 2.0
            return pool, heads.transpose(0, 2, 1, 3).reshape(4, 512, 768)

        def tick(pool, turn):
            return jax.lax.switch(turn % 2, [write, read], pool)

        return jax.lax.scan(tick, jnp.zeros((3, 4, 12, 512, 64)), jnp.arange(4))[1]

    spec = PartitionSpec("pipe")
    run = jax.shard_map(
        ticks, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, axis_names={"pipe"}, check_vma=False
    )
    program, placements = placed(run, (8, 512, 768), (768, 768))
    loop_index = next(index for index, operation in enumerate(program.operations) if operation.kind == "scan")
    pool = program.operations[loop_index].outputs[0]
    assert placements.value_bytes(pool) == (2 if is_read else 1) * 3 * 4 * 12 * 512 * 64 * 4
    body = placements.loop_placements[loop_index]
    cond = next(operation for operation in body.program.operations if operation.kind == "cond")
    assert body.value_bytes(cond.outputs[0]) == placements.value_bytes(pool)


@pytest.mark.parametrize("is_region", [True, False])
def test_a_function_with_a_constant_within_a_region_or_a_branch(is_region):
    """Constants of calls follow the arguments among a program's inputs."""
    table = jnp.ones((4, 12, 512, 64))

    @jax.jit
    def scaled(x):
        return kernel(x * table)

    mesh = AbstractMesh((2, 2), ("pipe", "data"), axis_types=(AxisType.Auto, AxisType.Auto))
    rows = PartitionSpec("data")

    def in_region(x):
        return jax.shard_map(scaled, in_specs=rows, out_specs=rows, axis_names={"data"}, check_vma=False)(x * 2.0)

    def in_branch(x):
        return jax.lax.cond(x.sum() > 0, scaled, lambda x: x, x * 2.0)

    spec = PartitionSpec("pipe")
    fn = in_region if is_region else in_branch
    run = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"pipe"}, check_vma=False)
    program, placements = placed(run, (8, 12, 512, 64) if not is_region else (16, 12, 512, 64))
    doubled = next(operation for operation in program.operations if operation.kind == "mul").outputs[0]
    assert placements.value_bytes(doubled) >= 4 * 12 * 512 * 64 * 4


def test_a_product_from_which_a_kernel_reads_an_entry_keeps_its_layout():
    def fn(x, w):
        return kernel(jax.lax.dynamic_index_in_dim((x @ w).reshape(3, 12, 512, 64), 1, 0, keepdims=False))

    program, placements = placed(fn, (3 * 12 * 512, 64), (64, 64))
    reshaped = next(operation for operation in program.operations if operation.kind == "reshape").outputs[0]
    assert placements.value_bytes(reshaped) == 3 * 12 * 512 * 64 * 4
