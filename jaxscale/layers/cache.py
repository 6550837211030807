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

    All layers of a `Stack` share one cache, whose arrays have a leading dim of layers. A slot may
    hold a different position in each row: prompts of unequal lengths are padded, left or right, to the same number of
    slots, and the slots of padding are not `valid`. Appending beyond S silently overwrites the last slots: the caller
    must ensure room.

    Args:
        k, v: keys and values, float (B, S, K, H).
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
            (3, 2, 16, 4, 8)
        """
        leading_dims = () if layers is None else (layers,)
        return cls(
            k=jnp.zeros((*leading_dims, batch, length, kv_heads, head_dim), dtype),
            v=jnp.zeros((*leading_dims, batch, length, kv_heads, head_dim), dtype),
            positions=jnp.zeros((*leading_dims, batch, length), jnp.int32),
            valid=jnp.zeros((*leading_dims, batch, length), bool),
            length=jnp.zeros(leading_dims, jnp.int32),
        )

    def append(self, k: Any, v: Any, positions: Any, valid: Any) -> "KVCache":
        """Return a cache in which T more slots are filled.

        Args:
            k, v: new keys and values, float (B, T, K, H).
            positions: positions of the new tokens, int (B, T) or (1, T).
            valid: bool (B, T) or (1, T), False for padding.
        """

        def write(slots: Any, entries: Any) -> Any:
            """Write entries (B or 1, T, ...) to the first free slots of an array (B, S, ...)."""
            row_entries = jnp.broadcast_to(entries.astype(slots.dtype), (slots.shape[0], *entries.shape[1:]))
            return lax.dynamic_update_slice_in_dim(slots, row_entries, self.length, 1)

        return KVCache(
            k=write(self.k, k),
            v=write(self.v, v),
            positions=write(self.positions, positions),
            valid=write(self.valid, valid),
            length=self.length + k.shape[1],
        )
