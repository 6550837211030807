"""Live bytes against sums done by hand."""

import jax
import jax.numpy as jnp
import pytest

from jaxscale.planning.fusion import Compiler
from jaxscale.planning.timeline import timeline
from jaxscale.programs.flat import flatten
from jaxscale.programs.placements import place

KB = 1024 * 4
X = jax.ShapeDtypeStruct((32, 32), jnp.float32)  # 4 KB


def peak(fn, *args, fuses="no", **properties):
    program = flatten(jax.make_jaxpr(fn)(*args))
    placed = place(program, [((),) * len(arg.shape) for arg in args], {})
    return timeline(program, placed, Compiler(fuses, **properties))


def test_an_expression_takes_no_memory():
    assert peak(lambda x: jnp.sin(x) * 2 + x, X).peak_bytes == 0


def test_a_product_is_an_array_until_its_last_reader():
    assert peak(lambda x: (x @ x) @ x, X).peak_bytes == 2 * KB
    assert peak(lambda x: ((x @ x) @ x) @ x, X).peak_bytes == 2 * KB  # the first is gone when the third is made


def test_what_an_expression_is_made_of_stays():
    def fn(x):
        a, b = x @ x, x.T @ x
        both = jnp.sin(a) * b
        return (both @ x) @ (x @ both)

    assert peak(fn, X).peak_bytes == 3 * KB  # both, and the products that read it; before, what it is made of
    assert peak(fn, X, fuses="all").peak_bytes == 4 * KB  # computed inside each product, from a and b


def test_a_loop_keeps_what_it_stacks_and_frees_the_rest():
    def fn(x, w):
        def step(x, w):
            y = jnp.sin(x) @ w
            return y @ w, y

        return jax.lax.scan(step, x, w)[1]

    w = jax.ShapeDtypeStruct((5, 32, 32), jnp.float32)
    found = peak(fn, X, w, fuses="all")
    assert found.peak_bytes == (5 + 1 + 1) * KB  # the stack, the state, and the next state while it is made


def test_logits_stay_alive_through_the_blocks_of_a_tpu_unless_microbatches_run_in_a_loop():
    head, blocks = jax.ShapeDtypeStruct((32, 320), jnp.float32), jax.ShapeDtypeStruct((4, 32, 32), jnp.float32)

    def gradients(x, head, blocks):
        def loss(head, blocks):
            y = jax.lax.scan(lambda x, block: (jnp.sin(x @ block), None), x, blocks)[0]
            return jnp.exp(y @ head).sum()

        return jax.grad(loss, argnums=(0, 1))(head, blocks)

    def accumulated(x, head, blocks):
        def add(sums, x):
            return jax.tree.map(jnp.add, sums, gradients(x, head, blocks)), None

        zeros = (jnp.zeros_like(head), jnp.zeros_like(blocks))
        return jax.lax.scan(add, zeros, x)[0]

    logits_bytes = 64 * 320 * 4
    for fn, shape, is_late in ((gradients, (64, 32), True), (accumulated, (2, 64, 32), False)):
        moments = peak(fn, jax.ShapeDtypeStruct(shape, jnp.float32), head, blocks, fuses="all").moments
        sizes_by_moment = [{item.bytes for item in moment.items} for moment in moments if moment.is_backward]
        assert logits_bytes in sizes_by_moment[0]
        assert (logits_bytes in sizes_by_moment[-1]) == is_late  # the last one belongs to the blocks, or to the sums
    rows = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    moments = peak(gradients, rows, head, blocks, fuses="all", has_whole_gradients=True).moments  # under ZeRO 0
    assert logits_bytes not in {item.bytes for item in moments[-1].items}


def test_remat_keeps_less():
    def net(keep):
        def block(x, w):
            return jnp.sin(jnp.sin(x @ w) @ w)

        block = block if keep else jax.checkpoint(block, prevent_cse=False)

        def loss(w, x):
            return jax.lax.scan(lambda x, w: (block(x, w), None), x, w)[0].sum()

        return jax.grad(loss)

    w = jax.ShapeDtypeStruct((16, 32, 32), jnp.float32)
    kept, less = (peak(net(keep), w, X, fuses="all").peak_bytes for keep in (True, False))
    # cosines of both products, the input of the second product, and the block's input; gradients in both
    assert kept - less == pytest.approx(3 * 16 * KB, rel=0.15)


@pytest.mark.parametrize(("zeroes_early", "stack_count"), [(False, 0), (True, 2)])
def test_the_largest_stacks_of_gradients_are_in_memory_during_the_loss_if_messages_are_hidden(
    zeroes_early, stack_count
):
    head = jax.ShapeDtypeStruct((32, 320), jnp.float32)
    wide, narrow = (jax.ShapeDtypeStruct((4, 32, width), jnp.float32) for width in (64, 32))

    def gradients(x, head, up, gate, narrow):
        def loss(head, up, gate, narrow):
            def layer(x, weights):
                up, gate, narrow = weights
                return jnp.sin(jnp.sin(x @ up) * (x @ gate)) @ jnp.concatenate((narrow, narrow)), None

            y = jax.lax.scan(jax.checkpoint(layer), x, (up, gate, narrow))[0]
            return jnp.exp(y @ head).sum()

        return jax.grad(loss, (0, 1, 2, 3))(head, up, gate, narrow)

    moments = peak(gradients, X, head, wide, wide, narrow, zeroes_stacks_early=zeroes_early).moments
    during_loss = [moment for moment in moments if any("[32, 320]" in item.name for item in moment.items)]
    stacks = [item for item in during_loss[0].items if "[4, 32, " in item.name and "dot_general" in item.name]
    assert [item.bytes for item in stacks] == [4 * 2 * KB] * stack_count  # those of the two weights of one shape
