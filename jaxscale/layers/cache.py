"""KVCache: keys and values of the positions a model has seen, for generation. Fixed length, filled from the front."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The slots of one attention layer, B rows of S. A `Stack`'s caches are one cache whose leaves have a leading L.

    Rows may differ in position: prompts of unequal lengths, padded left or right, take as many slots each, and padded
    ones are not `valid`. Appending beyond S overwrites the last slots without a word: whoever generates makes room
    first.

    Args:
        k, v: float (B, S, K, H).
        positions: int32 (B, S), position of the token in each slot.
        valid: bool (B, S), whether the slot holds a token.
        length: int32, slots filled.
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
        """A cache with nothing in it; for all layers of a `Stack` at once where `layers` is given.

        Example:
            >>> KVCache.empty(2, 16, 4, 8, layers=3).k.shape
            (3, 2, 16, 4, 8)
        """
        lead = () if layers is None else (layers,)
        return cls(
            k=jnp.zeros((*lead, batch, length, kv_heads, head_dim), dtype),
            v=jnp.zeros((*lead, batch, length, kv_heads, head_dim), dtype),
            positions=jnp.zeros((*lead, batch, length), jnp.int32),
            valid=jnp.zeros((*lead, batch, length), bool),
            length=jnp.zeros(lead, jnp.int32),
        )

    def append(self, k: Any, v: Any, positions: Any, valid: Any) -> "KVCache":
        """With T more slots filled.

        Args:
            k, v: float (B, T, K, H).
            positions: int (B, T) or (1, T).
            valid: bool (B, T) or (1, T).
        """

        def write(slots: Any, new: Any) -> Any:
            new = jnp.broadcast_to(new.astype(slots.dtype), (slots.shape[0], *new.shape[1:]))
            return lax.dynamic_update_slice_in_dim(slots, new, self.length, 1)

        return KVCache(
            k=write(self.k, k),
            v=write(self.v, v),
            positions=write(self.positions, positions),
            valid=write(self.valid, valid),
            length=self.length + k.shape[1],
        )
