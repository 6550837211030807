"""KVCache: keys and values of earlier positions, for generation. Fixed length, filled from the front."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The cache of one attention layer: B rows of S slots. The caches of a `Stack` are one cache whose leaves have a
    leading dim L.

    The rows of a slot may hold different positions: prompts of unequal lengths are padded, left or right, to the same
    number of slots, and padding is not `valid`. Appending beyond S silently overwrites the last slots: the caller must
    ensure room.

    Args:
        k, v: keys and values, float (B, S, K, H).
        positions: int32 (B, S), position of the token in each slot.
        valid: bool (B, S), whether the slot holds a token.
        length: int32, number of slots filled.
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
        """Make an empty cache with `length` slots per row, for one layer or for all `layers` of a `Stack`.

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
        """Return the cache with T more slots filled.

        Args:
            k, v: new keys and values, float (B, T, K, H).
            positions: positions of their tokens, int (B, T) or (1, T).
            valid: bool (B, T) or (1, T), False for padding.
        """

        def write(slots: Any, entries: Any) -> Any:
            """Write entries (B or 1, T, ...) to the slots (B, S, ...) after those that are filled."""
            entries = jnp.broadcast_to(entries.astype(slots.dtype), (slots.shape[0], *entries.shape[1:]))
            return lax.dynamic_update_slice_in_dim(slots, entries, self.length, 1)

        return KVCache(
            k=write(self.k, k),
            v=write(self.v, v),
            positions=write(self.positions, positions),
            valid=write(self.valid, valid),
            length=self.length + k.shape[1],
        )
