"""Which arrays are finished late follows from the flat program alone."""

import jax
import jax.numpy as jnp
import pytest

from jaxscale.programs.flat import FlatProgram, flatten
from jaxscale.programs.late import gradient_product_indices, late_arrays, with_late_gradients

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


def test_the_gradient_of_a_head_is_a_product_that_the_blocks_do_not_need(program: FlatProgram) -> None:
    (index,) = gradient_product_indices(program)
    assert sorted(program.avals[program.operations[index].outputs[0]].shape) == [4, 32]
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 4), (4, 32))]
    assert gradient_product_indices(flatten(jax.make_jaxpr(lambda x, head: x @ head)(*shapes))) == []  # no blocks


def blocks(x, weights):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x.sum()


def layer_loop(x, weights):
    return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0].sum()


def flat_gradients(loss, microbatches=1):
    def fn(x, weights):
        def add(total, rows):
            return total + jax.grad(loss, argnums=1)(rows, weights), None

        return jax.lax.scan(add, jnp.zeros_like(weights), x)[0] if microbatches > 1 else add(0.0, x)[0]

    shape = (4, 16, 32) if microbatches > 1 else (16, 32)
    return flatten(jax.make_jaxpr(fn)(jnp.zeros(shape), jnp.zeros((3, 32, 32))))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradients_of_weights_come_after_the_products_that_need_none_of_them(microbatches):
    program = flat_gradients(blocks, microbatches)
    late_program = with_late_gradients(program)
    if microbatches > 1:
        program, late_program = (
            next(op.loop_body for op in p.operations if op.loop_body) for p in (program, late_program)
        )
    assert sorted(map(id, late_program.operations)) == sorted(map(id, program.operations))
    known_values = {None, *late_program.inputs}
    shapes = []
    for operation in late_program.operations:
        assert known_values >= set(operation.inputs)
        known_values.update(operation.outputs)
        if operation.is_backward and operation.kind == "dot_general":
            shapes.append(late_program.avals[operation.outputs[0]].shape)
    assert shapes == [(16, 32)] * 2 + [(32, 32)] * 3  # of activations, then of weights


def test_a_loop_over_layers_keeps_its_order():
    program = flat_gradients(layer_loop)
    late_program = with_late_gradients(program)
    assert [op.outputs for op in late_program.operations] == [op.outputs for op in program.operations]


@pytest.mark.parametrize("in_layers", [False, True])
def test_gradients_of_a_layers_weights_come_last_in_its_backward_pass(in_layers):
    """Of a layer's two weights, the second has its gradient after that of the activations between them."""

    def loss(x, weights):
        def layer(x, pair):
            return jnp.tanh(jnp.tanh(x @ pair[0]) @ pair[1]), None

        return jax.lax.scan(jax.checkpoint(layer), x, weights)[0].sum()

    arguments = jnp.zeros((16, 32)), jnp.zeros((3, 2, 32, 32))
    program = flatten(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*arguments))
    late_program = with_late_gradients(program, in_layers=in_layers)
    (body,) = (op.loop_body for op in late_program.operations if op.params.get("reverse"))
    (original_body,) = (op.loop_body for op in program.operations if op.params.get("reverse"))
    assert sorted(map(id, body.operations)) == sorted(map(id, original_body.operations))
    shapes = [body.avals[op.outputs[0]].shape for op in body.operations if op.kind == "dot_general"]
    activations, weights = (16, 32), (32, 32)
    ordered = [activations, weights, weights] if in_layers else [weights, activations, weights]
    assert shapes == [activations, activations, *ordered, activations]  # after a recomputed product, before the carry's
    known_values = {None, *body.inputs}
    for operation in body.operations:
        assert known_values >= set(operation.inputs)
        known_values.update(operation.outputs)


def test_a_sum_over_rows_for_a_bias_is_computed_with_the_gradient_that_it_reads():
    def loss(weights, biases, x):
        for weight, bias in zip(weights, biases, strict=True):
            x = jnp.tanh(x @ weight + bias)
        return x.sum()

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((3, 32, 32), (3, 1, 32), (16, 32))]
    program = with_late_gradients(flatten(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*shapes)))
    backward = [operation for operation in program.operations if operation.is_backward]
    kinds = [op.kind for op in backward if op.kind in ("dot_general", "reduce_sum")]
    late_products = kinds[-3:]
    assert late_products == ["dot_general"] * 3  # the gradients of the weights
    assert "reduce_sum" in kinds[:3]  # the first bias, before the first product


def test_only_the_products_of_the_named_kinds_run_late():
    """The gradient of a last convolution's weight stays where it is if only matrix products run late."""

    def loss(weights, kernel, x):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.sum(jnp.sin(jax.lax.conv(x.reshape(4, 1, 2, 2), kernel, (1, 1), "SAME")))

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((3, 4, 4), (1, 1, 1, 1), (4, 4))]
    program = flatten(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*shapes))

    def kinds(operations):
        """Return the kinds of the backward pass's products; "w" is the gradient of the kernel."""
        kernel_sizes = [program.avals[op.outputs[0]].size for op in operations]
        return "".join(
            "w" if op.kind == "conv_general_dilated" and size == 1 else "d"
            for op, size in zip(operations, kernel_sizes, strict=True)
            if op.is_backward and (op.kind == "dot_general" or (op.kind == "conv_general_dilated" and size == 1))
        )

    assert kinds(program.operations) == "wddddd"
    assert kinds(with_late_gradients(program, product_kinds=("dot_general",)).operations) == "wddddd"
    assert kinds(with_late_gradients(program).operations) == "ddwddd"
