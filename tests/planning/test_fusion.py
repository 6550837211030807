"""Which values are arrays, and how many bytes they take."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from jaxscale.planning import program
from jaxscale.planning.fusion import Arrays, Compiler, has_rings
from jaxscale.planning.timeline import timeline
from jaxscale.platforms.platform import Platform
from jaxscale.programs.flat import flatten
from jaxscale.programs.placements import place
from jaxscale.recipe.plan import Plan

KB = 1024 * 4
X = jax.ShapeDtypeStruct((32, 32), jnp.float32)  # 4 KB


def arrays_of(fn, *args, fuses="no"):
    program = flatten(jax.make_jaxpr(fn)(*args))
    return Arrays(program, place(program, [((),) * len(arg.shape) for arg in args], {}), Compiler(fuses))


def peak(fn, *args, fuses="no"):
    arrays = arrays_of(fn, *args, fuses=fuses)
    return timeline(arrays.program, arrays.placements, arrays.compiler)


def test_an_expression_is_computed_from_arrays():
    arrays = arrays_of(lambda x: (jnp.sin(x @ x) * (x.T @ x)) + x, X, fuses="all")
    kinds = {value: operation.kind for operation in arrays.program.operations for value in operation.outputs}
    assert [kinds[value] for value in arrays.array_bytes] == ["dot_general", "dot_general"]
    assert arrays.sources_of(arrays.program.outputs) == set(arrays.array_bytes)
    assert all(arrays.sources_by_value[value] == {value} for value in arrays.array_bytes)


@pytest.mark.parametrize(("fuses", "products"), [("no", 1), ("all", 0)])
def test_what_two_products_read_is_an_array_where_nothing_is_fused(fuses, products):
    def fn(x):
        both = jnp.sin(x)
        return (both @ x) + (x @ both)

    arrays = arrays_of(fn, X, fuses=fuses)
    assert len(arrays.array_bytes) == 2 + products


def test_a_loop_s_stack_belongs_to_the_caller():
    def fn(x, w):
        return jax.lax.scan(lambda x, w: (jnp.sin(x) @ w, x @ w), x, w)

    arrays = arrays_of(fn, X, jax.ShapeDtypeStruct((5, 32, 32), jnp.float32), fuses="all")
    (loop,) = [i for i, operation in enumerate(arrays.program.operations) if operation.loop_body is not None]
    assert sorted(arrays.array_bytes.values()) == [KB, 5 * KB]
    assert sorted(arrays.loop_arrays(loop).array_bytes.values()) == [0, KB]


def overwriting(operand):
    """Return the result of a kernel that is written into the memory of its operand."""
    return pl.pallas_call(
        lambda read, written: None, jax.ShapeDtypeStruct(operand.shape, operand.dtype), input_output_aliases={0: 0}
    )(operand)


@pytest.mark.parametrize(
    ("fn", "kernel_bytes"),
    [
        (overwriting, [0]),
        (lambda x: overwriting(x.reshape(4, 8, 32)).reshape(32, 32), [0]),
        (lambda x: (jnp.sum(x * x), overwriting(x)), [0]),
        (lambda x: (overwriting(x), jnp.sin(x) @ x), [KB]),
        (lambda x: (overwriting(x), x), [KB]),
        (lambda x: (overwriting(x), overwriting(x)), [KB, 0]),
        (lambda x: overwriting(jnp.sin(x)), [KB]),
    ],
    ids=["input", "reshaped", "read before", "read after", "returned", "twice", "computed"],
)
def test_a_kernel_writes_into_an_input_that_nothing_needs_later(fn, kernel_bytes):
    arrays = arrays_of(fn, X, fuses="all")
    kernels = [operation for operation in arrays.program.operations if operation.kind == "pallas_call"]
    assert [arrays.array_bytes.get(kernel.outputs[0], 0) for kernel in kernels] == kernel_bytes


def test_a_broadcast_literal_that_a_loop_reads_whole_is_no_array():
    def fn(x, w, as_state):
        ones = jnp.ones((32, 32))
        state = (x, ones) if as_state else (x, x)
        step = lambda state, w: ((state[0] @ w + (0.0 if as_state else ones), state[1] * 2.0), None)  # noqa: E731
        return jax.lax.scan(step, state, w)[0]

    stack = jax.ShapeDtypeStruct((5, 32, 32), jnp.float32)
    for as_state, has_array in ((False, False), (True, True)):
        arrays = arrays_of(lambda x, w, as_state=as_state: fn(x, w, as_state), X, stack)
        kinds = {value: operation.kind for operation in arrays.program.operations for value in operation.outputs}
        assert ("broadcast_in_dim" in {kinds[value] for value in arrays.array_bytes}) == has_array


@pytest.mark.parametrize(("fuses", "stored"), [("all", "add"), ("no", "max")])
def test_a_residual_stream_that_a_convolution_reads_is_an_array(fuses, stored):
    def conv(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def fn(x, kernel):
        y = conv(x, kernel)
        y = y + conv(jnp.maximum(y, 1.0), kernel)  # `y + ...` is a sum of two arrays, and the maximum is not
        return y, conv(y, kernel)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 8, 8, 32), (3, 3, 32, 32))]
    arrays = arrays_of(fn, *shapes, fuses=fuses)
    kinds = {value: operation.kind for operation in arrays.program.operations for value in operation.outputs}
    array_kinds = [kinds[value] for value in arrays.array_bytes]
    assert array_kinds.count("conv_general_dilated") == 3
    assert ("add" in array_kinds, "max" in array_kinds) == (True, stored == "max")


def test_a_residual_stream_is_an_array_beside_its_kept_sum():
    def conv(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def fn(x, kernel, keeps_sum):
        y = conv(x, kernel)
        y = y + conv(jnp.maximum(y, 1.0), kernel)
        y = jax.lax.reduce_precision(y, 8, 23) if keeps_sum else y
        return y, conv(jnp.maximum(y, 0.0), kernel)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 8, 8, 32), (3, 3, 32, 32))]
    for keeps_sum in (False, True):
        arrays = arrays_of(lambda x, kernel, keeps=keeps_sum: fn(x, kernel, keeps), *shapes, fuses="all")
        last_product = [op for op in arrays.program.operations if op.kind == "conv_general_dilated"][-1]
        assert last_product.inputs[0] in arrays.array_bytes


def backward_sums(fn, *args):
    """Kinds of the operations of the backward pass whose sums are stored."""
    arrays = arrays_of(jax.grad(fn), *args, fuses="all")
    return [
        operation.kind
        for operation in arrays.program.operations
        if operation.is_backward
        and operation.kind in ("add_any", "select_n")
        and operation.outputs[0] in arrays.array_bytes
    ]


@pytest.mark.parametrize(("layers", "stored"), [(1, 0), (2, 1), (4, 2), (6, 3)])
def test_the_gradient_of_a_residual_stream_is_stored_where_three_arrays_are_summed(layers, stored):
    def fn(x, w):
        for _ in range(layers):
            x = x + jnp.sin(x @ w)
        return jnp.sum((x @ w) * x)

    assert backward_sums(fn, X, X) == ["add_any"] * stored


def test_a_masked_sum_of_gradients_is_stored_once():
    def fn(x, w):
        for _ in range(4):
            x = jax.nn.relu(x @ w + x)
        return jnp.sum(x @ w)

    assert backward_sums(fn, X, X).count("select_n") == 4


@pytest.mark.parametrize(("stores", "stored"), [(True, ["sub"]), (False, [])])
def test_log_probabilities_from_which_a_gather_picks_are_an_array_without_sparse_cores(stores, stored):
    def fn(x, w, targets):
        scores = jax.nn.log_softmax(x @ w)
        return jnp.take_along_axis(scores, targets[:, None], axis=-1)

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((512, 64), (64, 512))]
    targets = jax.ShapeDtypeStruct((512,), "int32")
    program = flatten(jax.make_jaxpr(fn)(*shapes, targets))
    placements = place(program, [((), ()), ((), ()), ((),)], {})
    arrays = Arrays(program, placements, Compiler("all", stores_gathered_expressions=stores))
    kinds = {value: operation.kind for operation in program.operations for value in operation.outputs}
    assert [kinds[value] for value in arrays.array_bytes if kinds[value] == "sub"] == stored


@pytest.mark.parametrize(
    ("dtype", "axis", "products", "stored"),
    [
        ("bfloat16", "tensor", 2, 1),
        ("bfloat16", "fsdp", 2, 0),
        ("float32", "tensor", 2, 0),
        ("bfloat16", "tensor", 1, 0),
    ],
)
def test_a_narrow_value_split_over_tensor_that_two_products_read_is_an_array_on_a_7x(dtype, axis, products, stored):
    def fn(x, w):
        wide = jnp.sin(x)
        return wide @ w if products == 1 else (wide @ w, wide.T @ wide)

    shapes = [jax.ShapeDtypeStruct((64, 64), dtype)] * 2
    program = flatten(jax.make_jaxpr(fn)(*shapes))
    placements = place(program, [((), (axis,)), ((axis,), ())], {"tensor": 2, "fsdp": 2})
    arrays = Arrays(program, placements, Compiler("all", stores_split_operands=True))
    kinds = {value: operation.kind for operation in program.operations for value in operation.outputs}
    assert [kinds[value] for value in arrays.array_bytes].count("sin") == stored


def weighted_rows(weigh, q, k, v):
    return jnp.einsum("bts,bsd->btd", weigh(jnp.einsum("btd,bsd->bts", q, k)).astype("bfloat16"), v)


def weighted_table(q, k, v):  # no batch dims
    return jax.nn.softmax(q[0] @ k[0].T).astype("bfloat16") @ v[0]


@pytest.mark.parametrize(
    ("fn", "stores", "stored"),
    [
        (partial(weighted_rows, jax.nn.softmax), True, ["convert_element_type"]),
        (partial(weighted_rows, jax.nn.softmax), False, []),
        (partial(weighted_rows, jnp.tanh), True, []),
        (weighted_table, True, []),
        (partial(weighted_rows, lambda scores: scores * jnp.exp(scores[:, :1, :1])), True, []),
    ],
    ids=["v5p", "v6e", "without an exponential", "without batch dims", "a small exponential"],
)
def test_probabilities_that_a_batched_product_reads_are_an_array_on_a_v5p(fn, stores, stored):
    program = flatten(jax.make_jaxpr(fn)(*[jax.ShapeDtypeStruct((2, 64, 64), "float32")] * 3))
    arrays = Arrays(program, place(program, [((),) * 3] * 3, {}), Compiler("all", stores_exponentials=stores))
    kinds = {value: operation.kind for operation in program.operations for value in operation.outputs}
    assert [kind for value in arrays.array_bytes if (kind := kinds[value]) in ("convert_element_type", "div")] == stored


@pytest.mark.parametrize(
    ("place", "stored"),
    [
        ("tpu 7x:2x2x1", "split_operands"),
        ("tpu v5e:2x2", "gathered_expressions"),
        ("tpu v5p:2x2x1", "exponentials"),
        ("tpu v4:2x2x1", "exponentials"),
        ("tpu v6e:2x2", ""),
        ("gpu h100", "stacks_early"),
        ("gpu a100-80", ""),
    ],
)
def test_rules_of_one_chip_are_of_that_chip(place, stored):
    compiler = program._compiler(Platform.parse(place), Plan())
    rules = ("split_operands", "gathered_expressions", "exponentials")
    found_rules = [rule for rule in rules if getattr(compiler, f"stores_{rule}")]
    assert found_rules + ["stacks_early"] * compiler.zeroes_stacks_early == stored.split()


@pytest.mark.parametrize(
    ("sizes", "rings"),
    [({"fsdp": 4}, True), ({"fsdp": 2}, False), ({"data": 2, "fsdp": 4}, False), ({"replica": 2, "fsdp": 4}, False)],
)
def test_products_run_around_a_ring_if_fsdp_alone_splits_the_batch(sizes, rings):
    assert has_rings(sizes) == rings


def test_what_is_computed_from_literals_alone_is_no_array():
    def fn(x, w):
        halves = jnp.full((32, 32), 0.5) * jnp.full((32, 32), 3.0)
        return jax.lax.scan(lambda x, w: (jnp.sin(x) @ w + halves, None), x, w)[0]

    arrays = arrays_of(fn, X, jax.ShapeDtypeStruct((5, 32, 32), jnp.float32), fuses="all")
    assert sorted(arrays.array_bytes.values()) == [KB]  # the loop's state


def loop_bytes(step):
    """Bytes of the arrays of a loop's body with a state of 4 KB."""
    arrays = arrays_of(lambda x, w: jax.lax.scan(step, x, w)[0], X, jax.ShapeDtypeStruct((5, 32, 32), jnp.float32))
    (loop,) = [i for i, operation in enumerate(arrays.program.operations) if operation.loop_body is not None]
    return sorted(arrays.loop_arrays(loop).array_bytes.values())


def test_a_sum_over_trips_is_written_over_itself():
    assert loop_bytes(lambda total, w: (total + w @ w, None)) == [0, KB]  # the sum, and the product
    assert loop_bytes(lambda total, w: (total + w @ w, total[0])) == [KB, KB]  # the slice is read after it


def test_a_state_that_is_read_later_is_not_written_over():
    def step(total, w):
        next_total = total + w
        return next_total, (next_total @ w) @ total

    assert loop_bytes(step) == [0, KB, KB]  # the stacked product, the next sum, and the product of it
    assert loop_bytes(lambda total, w: (total @ w, None)) == [KB]  # a product reads its operand until it is computed


@pytest.mark.parametrize(("fuses", "stored"), [("all", [KB, KB]), ("no", [KB, KB, 2 * KB, 2 * KB])])
def test_gradients_of_a_cycle_s_layers_are_written_into_their_sum_on_a_tpu(fuses, stored):
    """Each of the two layers of a cycle slices its weight from the cycle's stack."""

    def sum_of_gradients(x):
        zeros = jnp.zeros((2, 32, 32))
        first, second = (
            jax.lax.dynamic_update_slice(zeros, (x @ x)[None], (layer, 0, 0)) for layer in (jnp.int32(0), jnp.int32(1))
        )
        return first + second

    assert sorted(arrays_of(sum_of_gradients, X, fuses=fuses).array_bytes.values()) == stored


def test_only_updates_of_zeros_are_written_into_their_sum():
    def sum_of_updates(x, fill):
        first, second = (
            jax.lax.dynamic_update_slice(jnp.full((2, 32, 32), fill), (x @ x)[None], (layer, 0, 0)) for layer in (0, 1)
        )
        return first + second

    stored = {
        fill: sum(arrays_of(lambda x, fill=fill: sum_of_updates(x, fill), X, fuses="all").array_bytes.values())
        for fill in (0.0, 1.0, -jnp.inf)
    }
    assert stored[0.0] < stored[1.0] == stored[-jnp.inf]


def test_a_scatter_of_one_element_a_row_is_an_expression():
    def loss(x, index):
        return jnp.take_along_axis(jax.nn.log_softmax(x @ x), index[:, None], 1).sum()

    index = jax.ShapeDtypeStruct((32,), jnp.int32)
    assert peak(jax.grad(loss), X, index, fuses="all").peak_bytes < 3.1 * KB  # logits and two products


def test_a_product_that_all_readers_narrow_is_narrow():
    def fn(x):
        y = jax.lax.dot_general(x, x, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return jax.lax.scan(lambda c, _: (c * 2, None), y.astype(jnp.bfloat16), None, length=2)[0]

    assert peak(fn, jax.ShapeDtypeStruct((32, 32), jnp.bfloat16), fuses="all").peak_items[0].bytes == KB // 2


def sum_bytes(fn, adds_in_place=True):
    """Bytes of the arrays of a program of three matrices of 4 KB and one of 32 x 2."""
    args = (X, X, jax.ShapeDtypeStruct((32, 2), jnp.float32))
    program = flatten(jax.make_jaxpr(fn)(*args))
    compiler = Compiler("all", adds_in_place=adds_in_place)
    return sorted(Arrays(program, place(program, [((), ())] * 3, {}), compiler).array_bytes.values())


def test_an_adapter_is_added_to_the_product_of_its_layer_in_place():
    def layer(x, w, a):
        return jnp.tanh(x @ w + 0.5 * ((x @ a) @ a.T).astype(x.dtype))

    narrow = 32 * 2 * 4
    assert sum_bytes(layer, adds_in_place=False) == [narrow, KB, KB]
    assert sum_bytes(layer) == [0, narrow, KB]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, a: ((y := (x @ a) @ a.T) + x @ w) * y,  # read again
        lambda x, w, a: (x @ w) * ((x @ a) @ a.T),  # no sum
        lambda x, w, a: x + (x @ a) @ a.T,  # a sum with what is no product
        lambda x, w, a: ((y := x @ w) + (x @ a) @ a.T) * y,  # the other is read again
        lambda x, w, a: x @ w + (y := (x @ a) @ a.T) * (y.T @ y),  # a factor that is an array
    ],
)
def test_other_products_keep_arrays_of_their_own(fn):
    assert sum_bytes(fn) == sum_bytes(fn, adds_in_place=False)
