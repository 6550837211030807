"""Embedding and PositionTable: tables with a row for each token and for each position.

The table of an Embedding has the shape (vocab, embed), like an output head: a tied head is `embedding.weight`, and an
untied head is another `Embedding`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxscale.layers.linear import Initializer
from jaxscale.sharding import place
from jaxscale.sharding.partition import axes_of
from jaxscale.typing import Array, Float, Integer


def _look_up(table: Any, indices: Any) -> Any:
    """Return the rows of a table at `indices`; their gradients are summed in float32 for every type of the table.

    The row of a frequent token sums thousands of gradients, and in bfloat16 a sum of ones stops at 256. If some axes of
    the mesh are manual, the axes that shard the indices become manual too. Without that, XLA would abort on the look-up
    if the table were sharded over one axis and the indices over another (JAX 0.10 and 0.12).
    """
    indices = indices.astype(jnp.int32)  # XLA aborts on indices of 8 bits into a sharded table (JAX 0.10)
    layout = place.current()
    mesh, rules = layout or (None, None)
    if rules is None or not getattr(mesh, "manual_axes", ()):
        return _take_rows(table, indices)
    index_spec = place.spec(indices.shape, ("batch", "seq", *(None,) * indices.ndim)[: indices.ndim], mesh, rules)
    index_axes = set(axes_of(index_spec))
    if not index_axes:
        return _take_rows(table, indices)
    replicated_spec = PartitionSpec()
    return jax.shard_map(
        _take_rows,
        mesh=mesh,
        in_specs=(replicated_spec, index_spec),
        out_specs=index_spec,
        axis_names=index_axes,
        check_vma=False,
    )(table, indices)


def _take_rows(table: Any, indices: Any) -> Any:
    """Return the rows of a table at `indices`, on one device."""
    if table.dtype == jnp.float32:
        return jnp.take(table, indices, axis=0, mode="clip")
    return _take_narrow(table, indices)


@jax.custom_vjp
def _take_narrow(table: Any, indices: Any) -> Any:
    """Return rows of a table whose type is narrower than float32; the backward pass sums in float32."""
    return jnp.take(table, indices, axis=0, mode="clip")


def _take_narrow_backward(residuals: Any, row_gradients: Any) -> Any:
    """Return the gradients of the table and of the indices (`None`); `residuals` holds the table and the indices."""
    table, indices = residuals
    clipped_indices = jnp.clip(indices, 0, table.shape[0] - 1)
    table_gradient = jnp.zeros(table.shape, jnp.float32).at[clipped_indices].add(row_gradients.astype(jnp.float32))
    return table_gradient.astype(table.dtype), None


_take_narrow.defvjp(lambda table, indices: (_take_narrow(table, indices), (table, indices)), _take_narrow_backward)


class Embedding(nnx.Module):
    """A table with a row per token, padded with rows of zeros.

    Args:
        vocab: number of tokens.
        size: width of a row.
        vocab_multiple: the table is padded to a multiple of this number of rows, so that a mesh axis may shard them.
            The padding does not affect the initial rows of tokens.
        init: initializer of the rows of tokens; normal with standard deviation 0.02 by default.
        rngs: random streams; the rows are drawn from `params`.

    Example:
        >>> from flax import nnx
        >>> embedding = Embedding(5, 3, vocab_multiple=4, rngs=nnx.Rngs(0))
        >>> embedding.weight.shape, embedding.lookup(jnp.array([[0, 4]]), "bfloat16").shape
        ((8, 3), (1, 2, 3))
    """

    def __init__(
        self, vocab: int, size: int, *, vocab_multiple: int = 1, init: Initializer | None = None, rngs: nnx.Rngs
    ):
        init = nnx.initializers.normal(0.02) if init is None else init
        token_rows = init(rngs.params(), (vocab, size), jnp.float32)
        self.vocab = vocab
        self.weight = nnx.Param(
            jnp.pad(token_rows, ((0, -vocab % vocab_multiple), (0, 0))), out_sharding=("vocab", "embed")
        )

    def lookup(self, tokens: Integer[Array, "*B"], dtype: Any = None) -> Float[Array, "*B D"]:
        """Return the rows of `tokens`, in `dtype` (by default the table's type); gradients are summed in float32."""
        rows = _look_up(self.weight[...], tokens)
        return rows if dtype is None else rows.astype(dtype)


class PositionTable(nnx.Module):
    """A table with a learned row per position (GPT-2, ViT).

    Args:
        length: number of positions.
        size: width of a row.
        init: initializer; normal with standard deviation 0.02 by default.
        rngs: random streams; the rows are drawn from `params`.

    Example:
        >>> from flax import nnx
        >>> PositionTable(5, 3, rngs=nnx.Rngs(0)).lookup(jnp.array([[0, 4]])).shape
        (1, 2, 3)
    """

    def __init__(self, length: int, size: int, *, init: Initializer | None = None, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02) if init is None else init
        self.weight = nnx.Param(init(rngs.params(), (length, size), jnp.float32), out_sharding=("position", "embed"))

    def lookup(self, positions: Integer[Array, "*B"], dtype: Any = None) -> Float[Array, "*B D"]:
        """Return the rows of `positions`, in `dtype` (by default the table's type)."""
        rows = _look_up(self.weight[...], positions)
        return rows if dtype is None else rows.astype(dtype)
