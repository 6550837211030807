r"""SOAP (Vyas et al. 2024, arXiv 2409.11321): Adam in the eigenbasis of Shampoo's statistics, layer by layer.

    L <- b2 L + (1 - b2) g g',  R <- b2 R + (1 - b2) g' g;  w <- w - rate * Q_L adam(Q_L' g Q_R) Q_R'
    Q_L and Q_R are the eigenvectors of L and R, refined every k updates by one power iteration and a QR decomposition

As in the authors' code, the first update only computes the bases. The first moment is in the space of the weights.
The second moment is in the space of the bases; its rows and columns are in the order of the bases' vectors. A side
longer than `max_dim` is not rotated. Embeddings, head, gains and biases get AdamW. Besides Adam's moments, a matrix of
n rows and m columns has 2 n n + 2 m m elements of state: L, R, Q_L and Q_R. These are not quantized, because small
eigenvalues would be lost, and bases would no longer be orthogonal. A sharded matrix is gathered, and each device
rotates the whole matrix. Left out: Shampoo's grafting, and blocks of a large matrix.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.compat import sequential_on_cpu
from jaxscale.optim.per_layer import UpdateRule, matrices_by, per_layer
from jaxscale.typing import Array, Params


def soap(
    rate: float | Callable[[Any], Any],
    *,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    every: int = 10,
    max_dim: int = 10_000,
    weight_decay: float = 0.1,
    leaves: Any = None,
    mask: Any = None,
) -> UpdateRule:
    """SOAP for projections and kernels, AdamW for all other parameters.

    Args:
        rate: learning rate of both SOAP and AdamW, or a schedule.
        b1, b2, eps: Adam's constants; b2 also decays the statistics.
        every: number of updates between new bases.
        max_dim: length of the longest side that gets a basis; longer sides are not rotated.
        weight_decay: factor of the decoupled weight decay.
        leaves: tree of `ParamInfo` like the parameters; `None` derives the tree from shapes and paths.
        mask: tree of bools like the parameters, true where weight decay applies; `None` decays all parameters.

    Example:
        >>> params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
        >>> state = soap(0.1).init(params)
        >>> sorted(leaf.shape for leaf in jax.tree.leaves(state) if leaf.size == 9)  # statistics and basis of the rows
        [(3, 3), (3, 3)]
    """
    rule = per_layer(scale_by_soap(b1, b2, eps, every, max_dim), leaves, as_matrices=True, on_whole_tensors=True)
    return matrices_by(rule, optax.scale_by_adam(b1, b2, eps), rate, weight_decay, leaves, mask)


class Sides(NamedTuple):
    """Two trees like the parameters, one for the rows and one for the columns of n x m matrices.

    Leaves are (n, n) arrays for rows and (m, m) arrays for columns; a side without a basis has an array of one element.
    """

    rows: Params
    columns: Params


class SoapState(NamedTuple):
    """State of `scale_by_soap`.

    Args:
        step: number of updates made; the first update leaves the weights unchanged.
        mu: average of gradients.
        nu: average of the squares of rotated gradients.
        GG: statistics: the average of g g' for rows, and of g' g for columns.
        Q: bases: the eigenvectors of GG, in columns.
    """

    step: Array
    mu: Params
    nu: Params
    GG: Sides
    Q: Sides


def scale_by_soap(
    b1: float = 0.95, b2: float = 0.95, eps: float = 1e-8, every: int = 10, max_dim: int = 10_000
) -> UpdateRule:
    """Return a rule that applies Adam to matrices in the eigenbasis of Shampoo's statistics, and plain Adam to others.

    Args:
        b1, b2, eps: Adam's constants; b2 also decays the statistics.
        every: number of updates between new bases.
        max_dim: longest side of a matrix that has a basis.
    """

    def side_shape(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
        """Return the shape of the statistics and of the basis of rows (dim 0) or columns (dim 1)."""
        return (shape[dim], shape[dim]) if len(shape) == 2 and shape[dim] <= max_dim else (1,)

    def init(params: Any) -> SoapState:
        """Return the initial state, in which all arrays are zero."""

        def zero_side(dim: int) -> Any:
            """Return zeros in the shapes of the statistics (and of the bases) of rows (dim 0) or columns (dim 1)."""
            return jax.tree.map(lambda p: jnp.zeros(side_shape(p.shape, dim), jnp.float32), params)

        zeros = jax.tree.map(jnp.zeros_like, params)
        statistics, bases = (Sides(rows=zero_side(0), columns=zero_side(1)) for _ in range(2))
        return SoapState(jnp.zeros((), jnp.int32), zeros, zeros, statistics, bases)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Return the new updates for the gradients `updates`, and the new state."""
        treedef = jax.tree.structure(updates)
        leaf_lists = map(treedef.flatten_up_to, (state.mu, state.nu, *state.GG, *state.Q))
        leaf_outputs = [
            _update_array(state.step, *leaf_inputs, b1=b1, b2=b2, eps=eps, every=every)
            for leaf_inputs in zip(jax.tree.leaves(updates), *leaf_lists, strict=True)
        ]
        new_updates, mu, nu, *statistics_and_bases = (
            treedef.unflatten(arrays) for arrays in zip(*leaf_outputs, strict=True)
        )
        return new_updates, SoapState(
            state.step + 1, mu, nu, Sides(*statistics_and_bases[:2]), Sides(*statistics_and_bases[2:])
        )

    return optax.GradientTransformation(init, update)


def _update_array(
    update_count: Array,
    g: Array,
    mu: Array,
    nu: Array,
    *statistics_and_bases: Array,
    b1: float,
    b2: float,
    eps: float,
    every: int,
) -> tuple[Array, ...]:
    """Return the update of one array, its two new moments, and its new `statistics_and_bases` in the same order.

    These are the statistics of rows and of columns, followed by the bases of rows and of columns.
    """
    old_statistics, bases = statistics_and_bases[:2], statistics_and_bases[2:]
    # 1 if the first update only computes bases, 0 for an array without bases
    basis_update_count = jnp.int32(any(basis.ndim == 2 for basis in bases))
    adam_step_count = jnp.maximum(update_count + 1 - basis_update_count, 1)
    only_computes_bases = update_count < basis_update_count
    rotated_gradient = _rotate(g, bases)
    new_mu = b1 * mu + (1 - b1) * g
    new_nu = b2 * nu + (1 - b2) * jnp.square(rotated_gradient)
    rotated_mean = _rotate(new_mu, bases) / (1 - b1**adam_step_count)
    adam_step = _rotate(rotated_mean / (jnp.sqrt(new_nu / (1 - b2**adam_step_count)) + eps), bases, is_back=True)
    mu, nu = jnp.where(only_computes_bases, mu, new_mu), jnp.where(only_computes_bases, nu, new_nu)
    gram_functions = (lambda: _multiply(g, g.T), lambda: _multiply(g.T, g))
    statistics = tuple(
        b2 * GG + (1 - b2) * gram() if GG.ndim == 2 else GG
        for GG, gram in zip(old_statistics, gram_functions, strict=True)
    )

    def compute_bases() -> tuple[Array, ...]:
        """Return (second moment, basis of rows, basis of columns); the bases are the eigenvectors of the statistics.

        The eigenvector of the largest eigenvalue comes first.
        """
        return nu, *(_eigenvectors(GG)[:, ::-1] if GG.ndim == 2 else GG for GG in statistics)

    def refine_bases() -> tuple[Array, ...]:
        """Return (second moment, basis of rows, basis of columns): new bases after one power iteration and QR.

        The second moment is reordered to the new bases.
        """
        sorted_nu, new_bases = nu, []
        for dim, (GG, Q) in enumerate(zip(statistics, bases, strict=True)):
            if GG.ndim == 2:
                # negated estimates of the eigenvalues, so that the largest comes first
                sort_keys = -jnp.sum(Q * _multiply(GG, Q), axis=0)
                sorted_nu = _sort_along(sorted_nu, sort_keys, dim)
                Q = _orthogonal(_multiply(GG, _sort_along(Q, sort_keys, 1)))
            new_bases.append(Q)
        return sorted_nu, *new_bases

    if any(basis.ndim == 2 for basis in bases):
        branch_index = jnp.where(only_computes_bases, 0, jnp.where(adam_step_count % every == 0, 1, 2))
        nu, *bases = jax.lax.switch(branch_index, [compute_bases, refine_bases, lambda: (nu, *bases)])
    return jnp.where(only_computes_bases, jnp.zeros_like(g), adam_step).astype(g.dtype), mu, nu, *statistics, *bases


_eigenvectors = sequential_on_cpu(lambda matrix: jnp.linalg.eigh(matrix)[1])
_orthogonal = sequential_on_cpu(lambda matrix: jnp.linalg.qr(matrix)[0])


def _sort_along(x: Array, keys: Array, dim: int) -> Array:
    """Return a matrix with its rows (dim 0) or columns (dim 1) in the order of increasing `keys`.

    All elements are sorted; they are not gathered, because inside a region that is manual over replicas, XLA aborts on
    a gather from a matrix that is sharded over several axes.
    """
    number_keys = jax.lax.broadcast_in_dim(keys, x.shape, (dim,))
    return jax.lax.sort((number_keys, x), dimension=dim, num_keys=1)[1]


def _rotate(x: Array, bases: Any, *, is_back: bool = False) -> Array:
    """Return a matrix rotated into the bases of its rows and columns; if `is_back`, rotate back out of these bases."""
    left_basis, right_basis = bases
    if left_basis.ndim == 2:
        x = _multiply(left_basis if is_back else left_basis.T, x)
    if right_basis.ndim == 2:
        x = _multiply(x, right_basis.T if is_back else right_basis)
    return x


def _multiply(a: Array, b: Array) -> Array:
    """Return the product of two matrices, computed in full float32 precision."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
