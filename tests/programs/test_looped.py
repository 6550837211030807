"""Copies of arguments for loops that run both passes."""

import jax
import jax.numpy as jnp
import pytest

from jaxscale.programs.flat import flatten
from jaxscale.programs.looped import with_looped_copies

WEIGHT = jax.ShapeDtypeStruct((256, 256), jnp.float32)


def program_of(compute_dtype, *, updates=True):
    def fn(weight, xs):
        compute_weight = weight.astype(compute_dtype)

        def add_microbatch(total, x):
            return total + jax.grad(lambda w: jnp.sum(jnp.sin(x.astype(w.dtype) @ w)))(compute_weight), None

        total = jax.lax.scan(add_microbatch, jnp.zeros(weight.shape, compute_dtype), xs)[0]
        return weight - total if updates else total

    return flatten(jax.make_jaxpr(fn)(WEIGHT, jax.ShapeDtypeStruct((2, 8, 256), jnp.float32)))


@pytest.mark.parametrize(
    ("compute_dtype", "updates", "copies"), [("float32", True, 1), ("bfloat16", True, 0), ("float32", False, 0)]
)
def test_a_weight_that_the_loop_reads_and_the_step_overwrites_is_copied(compute_dtype, updates, copies):
    program = program_of(compute_dtype, updates=updates)
    copied = with_looped_copies(program)
    kinds = [operation.kind for operation in copied.operations]
    assert kinds.count("retile") == copies
    (loop,) = [operation for operation in copied.operations if operation.loop_body is not None]
    assert (program.inputs[0] not in loop.inputs) == (copies or compute_dtype == "bfloat16")
    assert any(program.inputs[0] in operation.inputs for operation in copied.operations)
