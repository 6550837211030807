"""Embedding and PositionTable: rows of a table by token and by position. The table of an Embedding is (vocab, embed),
which is also the layout of an output head: a tied head is `embedding.weight`, an untied one another `Embedding`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxscale.layers.linear import Initializer
from jaxscale.sharding import place
from jaxscale.sharding.partition import axes_of
from jaxscale.typing import Array, Float, Int


def _rows(table: Any, index: Any) -> Any:
    """The rows of a table at `index`, whose gradients are summed in float32 for every type of the table.

    A frequent token's row sums thousands of gradients: in bfloat16 a sum of ones stops at 256. If some axes of the mesh
    are manual, those of the index become manual too: XLA aborts on a look-up in a table sharded over one axis by an
    index sharded over another (JAX 0.10 and 0.12).
    """
    layout = place.current()
    mesh, rules = layout or (None, None)
    if rules is None or not getattr(mesh, "manual_axes", ()):
        return _take_rows(table, index)
    spec = place.spec(index.shape, ("batch", "seq", *(None,) * index.ndim)[: index.ndim], mesh, rules)
    axes = set(axes_of(spec))
    if not axes:
        return _take_rows(table, index)
    replicated = PartitionSpec()
    return jax.shard_map(
        _take_rows, mesh=mesh, in_specs=(replicated, spec), out_specs=spec, axis_names=axes, check_vma=False
    )(table, index)


def _take_rows(table: Any, index: Any) -> Any:
    """The rows of a table at `index` on one device."""
    if table.dtype == jnp.float32:
        return jnp.take(table, index, axis=0, mode="clip")
    return _narrow_rows(table, index)


@jax.custom_vjp
def _narrow_rows(table: Any, index: Any) -> Any:
    """The rows of a table of a narrower type than float32, with a backward pass that sums in float32."""
    return jnp.take(table, index, axis=0, mode="clip")


def _narrow_rows_backward(residuals: Any, row_gradients: Any) -> Any:
    table, index = residuals
    index = jnp.clip(index, 0, table.shape[0] - 1)
    table_gradient = jnp.zeros(table.shape, jnp.float32).at[index].add(row_gradients.astype(jnp.float32))
    return table_gradient.astype(table.dtype), None


_narrow_rows.defvjp(lambda table, index: (_narrow_rows(table, index), (table, index)), _narrow_rows_backward)


class Embedding(nnx.Module):
    """A table with a row per token, padded with rows of zeros to a multiple.

    Args:
        vocab: number of tokens.
        size: width of a row.
        vocab_multiple: number that divides the padded number of rows, so that a mesh axis may shard them. The random
            values of the rows of tokens do not depend on it.
        init: initializer of the rows of tokens; normal with standard deviation 0.02 by default.

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
        rows = init(rngs.params(), (vocab, size), jnp.float32)
        self.vocab = vocab
        self.weight = nnx.Param(jnp.pad(rows, ((0, -vocab % vocab_multiple), (0, 0))), out_sharding=("vocab", "embed"))

    def lookup(self, tokens: Int[Array, "*B"], dtype: Any = None) -> Float[Array, "*B D"]:
        """The rows of `tokens`, in `dtype` (by default the parameters'); gradients are summed in float32."""
        rows = _rows(self.weight[...], tokens)
        return rows if dtype is None else rows.astype(dtype)


class PositionTable(nnx.Module):
    """A table with a learned row per position (GPT-2, ViT).

    Args:
        length: number of positions.
        size: width of a row.
        init: initializer; normal with standard deviation 0.02 by default.

    Example:
        >>> from flax import nnx
        >>> PositionTable(5, 3, rngs=nnx.Rngs(0)).lookup(jnp.array([[0, 4]])).shape
        (1, 2, 3)
    """

    def __init__(self, length: int, size: int, *, init: Initializer | None = None, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02) if init is None else init
        self.weight = nnx.Param(init(rngs.params(), (length, size), jnp.float32), out_sharding=("position", "embed"))

    def lookup(self, positions: Int[Array, "*B"], dtype: Any = None) -> Float[Array, "*B D"]:
        """The rows of `positions`, in `dtype` (by default the parameters')."""
        rows = _rows(self.weight[...], positions)
        return rows if dtype is None else rows.astype(dtype)
