"""KVCache: keys and values of earlier positions, for generation, in slots that are filled from the front."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The cache of one attention layer: B rows of S slots.

    All layers of a `Stack` share one cache, whose arrays have a leading dim of layers. A slot may hold a different
    position in each row: prompts of unequal lengths are padded, left or right, to the same number of slots, and the
    slots of padding are not `valid`. Appending beyond S silently overwrites the last slots: the caller must ensure that
    there are free slots.

    The slots are the last dim, because the matrix products of attention on XLA:CPU read keys and values in this order.
    With another order of dims, XLA:CPU copies all slots for each new token.

    Args:
        k, v: keys and values, float (B, K, H, S), or float (B * K, H, S) if the first two dims are merged.
        positions: int32 (B, S), position of the token in each slot.
        valid: bool (B, S), whether the slot holds a token.
        length: int32 scalar, number of filled slots.
    """

    k: Any
    v: Any
    positions: Any
    valid: Any
    length: Any

    @classmethod
    def empty(
        cls,
        batch: int,
        length: int,
        kv_heads: int,
        head_dim: int,
        dtype: Any = jnp.float32,
        *,
        layers: int | None = None,
    ) -> "KVCache":
        """Make an empty cache of `batch` rows of `length` slots, for one layer or for all `layers` of a `Stack`.

        Example:
            >>> KVCache.empty(2, 16, 4, 8, layers=3).k.shape
            (3, 2, 4, 8, 16)
        """
        leading_dim_sizes = () if layers is None else (layers,)
        return cls(
            k=jnp.zeros((*leading_dim_sizes, batch, kv_heads, head_dim, length), dtype),
            v=jnp.zeros((*leading_dim_sizes, batch, kv_heads, head_dim, length), dtype),
            positions=jnp.zeros((*leading_dim_sizes, batch, length), jnp.int32),
            valid=jnp.zeros((*leading_dim_sizes, batch, length), bool),
            length=jnp.zeros(leading_dim_sizes, jnp.int32),
        )

    def append(self, k: Any, v: Any, positions: Any, valid: Any) -> "KVCache":
        """Return a cache in which T more slots are filled.

        Args:
            k, v: new keys and values, float (B, T, K, H).
            positions: positions of the new tokens, int (B, T) or (1, T).
            valid: bool (B, T) or (1, T), False for padding.
        """

        def write(slots: Any, entries: Any) -> Any:
            """Write entries to the first free slots, which are the last dim."""
            return lax.dynamic_update_slice_in_dim(slots, entries.astype(slots.dtype), self.length, slots.ndim - 1)

        def write_heads(slots: Any, entries: Any) -> Any:
            """Write keys or values (B, T, K, H)."""
            return write(slots, jnp.moveaxis(entries, 1, 3).reshape(*slots.shape[:-1], entries.shape[1]))

        entries_shape = (self.valid.shape[0], k.shape[1])
        return KVCache(
            k=write_heads(self.k, k),
            v=write_heads(self.v, v),
            positions=write(self.positions, jnp.broadcast_to(positions, entries_shape)),
            valid=write(self.valid, jnp.broadcast_to(valid, entries_shape)),
            length=self.length + k.shape[1],
        )

    def heads(self, batch: int) -> tuple[Any, Any]:
        """Return the keys and the values of `batch` rows, float (B, S, K, H)."""
        heads_shape = (batch, -1, *self.k.shape[-2:])
        return jnp.moveaxis(self.k.reshape(heads_shape), 3, 1), jnp.moveaxis(self.v.reshape(heads_shape), 3, 1)

    def with_heads_as_rows(self) -> "KVCache":
        """Return a layer's cache in which the rows and the heads of keys and values are merged into one dim.

        The matrix products of attention take this shape. XLA:CPU writes a new token into the slots in place if the
        product reads the array that was written, and copies all slots if the product reads a reshaped array.

        Example:
            >>> KVCache.empty(2, 16, 4, 8).with_heads_as_rows().k.shape
            (8, 8, 16)
        """
        array_by_name = {name: getattr(self, name).reshape(-1, *self.k.shape[-2:]) for name in ("k", "v")}
        return dataclasses.replace(self, **array_by_name)
