"""Products of two activations that are repeated in the backward pass."""

import jax
import jax.numpy as jnp

from jaxscale.programs.flat import flatten
from jaxscale.programs.repeated import with_repeated_scores


def products(program):
    """Return (shape, whether it belongs to the backward pass) of each matrix product."""
    return [
        (program.avals[operation.outputs[0]].shape, operation.is_backward)
        for operation in program.operations
        if operation.kind == "dot_general"
    ]


def kept_program(function, *shapes):
    block = jax.checkpoint(function, policy=jax.checkpoint_policies.dots_saveable)
    return flatten(jax.make_jaxpr(jax.grad(block))(*(jnp.ones(shape) for shape in shapes)))


def test_scores_are_repeated_and_products_with_a_weight_are_not():
    """The scores (2, 16, 16) are larger than queries and keys (2, 16, 4); the other products are not repeated."""

    def loss(x, weight):
        x = x @ weight
        scores = jnp.einsum("btd,bsd->bts", x, x)
        return jnp.sum(jnp.einsum("bts,bsd->btd", jnp.exp(scores), x))

    program = kept_program(loss, (2, 16, 4), (4, 4))
    repeated = with_repeated_scores(program)
    extra = products(repeated)
    for product in products(program):
        extra.remove(product)
    assert extra == [((2, 16, 16), True)]
    defined = set(repeated.inputs)
    for operation in repeated.operations:  # every value is computed before it is read
        assert all(value is None or value in defined for value in operation.inputs)
        defined.update(operation.outputs)


def test_values_that_only_the_forward_pass_reads_are_not_repeated():
    program = flatten(
        jax.make_jaxpr(lambda q, k: jnp.exp(jnp.einsum("btd,bsd->bts", jnp.sin(q), jnp.sin(k))))(
            *[jnp.ones((2, 16, 4))] * 2
        )
    )
    assert len(with_repeated_scores(program).operations) == len(program.operations)


def test_products_with_the_weights_of_experts_are_not_repeated():
    """A weight has a batch dim here, the expert, and the result is larger than both operands."""

    def loss(x, weights):
        hidden = jnp.einsum("ebd,edf->ebf", jnp.sin(x), weights.astype(jnp.bfloat16).astype(jnp.float32))
        return jnp.sum(jnp.exp(hidden))

    program = kept_program(loss, (2, 64, 4), (2, 4, 32))
    assert products(with_repeated_scores(program)) == products(program)


def test_a_loop_of_the_forward_pass_repeats_nothing():
    def forward(q, k):
        scores = jnp.einsum("btd,bsd->bts", jnp.sin(q), jnp.sin(k))
        return jax.lax.scan(lambda total, row: (total + row, None), scores[0], scores)[0]

    program = flatten(jax.make_jaxpr(forward)(*[jnp.ones((2, 16, 4))] * 2))
    assert products(with_repeated_scores(program)) == products(program)


def test_a_loop_over_layers_keeps_its_scores():
    def loss(x, weights):
        def layer(x, weight):
            x = x @ weight
            return jnp.einsum("bts,bsd->btd", jnp.exp(jnp.einsum("btd,bsd->bts", x, x)), x), None

        layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    program = flatten(jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, 16, 4)), jnp.ones((3, 4, 4))))
    assert products(with_repeated_scores(program)) == products(program)
