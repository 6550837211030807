"""What differs between the JAX versions: where a definition is at hand, the same on each of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.compat import sequential_on_cpu
from jaxscale.optim.matrix.soap import _eigenvectors, _orthogonal
from jaxscale.replicas.codecs.gradzip import _solve

OPERANDS = r"@(lapack_\w+|blas_\w+)\(.*: \(tensor<([\dx]+)xf32>"
"""Of each kernel of LAPACK in a lowered program, its name and the shape of its first operand."""


def symmetric(*shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return x @ np.swapaxes(x, -1, -2) + np.eye(shape[-1], dtype=np.float32)


@pytest.mark.parametrize(
    ("function", "others"),
    [(_eigenvectors, ()), (_orthogonal, ()), (_solve, (np.ones((2, 3, 4, 1), np.float32),))],
    ids=["eigenvectors of SOAP", "bases of SOAP", "factors of GradZip"],
)
def test_a_cpu_gets_matrices_of_a_batch_one_by_one(function, others):
    """Of a batch a kernel of jaxlib 0.10 may wait for ever: see `sequential_on_cpu`."""
    mapped = jax.jit(jax.vmap(jax.vmap(function)))
    found = re.findall(OPERANDS, mapped.lower(symmetric(2, 3, 4, 4), *others).as_text())
    assert found
    assert {shape for _, shape in found} == {"4x4"}


def test_one_by_one_is_all_at_once():
    batch = jnp.asarray(symmetric(2, 3, 4, 4))
    found = jax.vmap(jax.vmap(sequential_on_cpu(jnp.linalg.cholesky)))(batch)
    np.testing.assert_allclose(found, jnp.linalg.cholesky(batch), atol=1e-6)
    np.testing.assert_array_equal(sequential_on_cpu(jnp.linalg.cholesky)(batch[0, 0]), jnp.linalg.cholesky(batch[0, 0]))
