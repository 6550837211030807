"""Visibility: which keys a query sees, the definition for every implementation of attention in plain JAX."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
    """A key is visible to a query if all specified conditions hold.

    Args:
        q_positions, kv_positions: int (B, T) and (B, S); the index in the row by default.
        q_segments, kv_segments: int (B, T) and (B, S): both are equal, and not padding.
        window: 0 <= q_position - kv_position < window; a whole number, or a traced one.
        causal: 0 <= q_position - kv_position.
        q_offset: position of the query of index 0, where positions are indices; an int32 scalar, 0 by default.
        padding: the segment that sees and is seen by none; `None` if there is no such segment.
    """

    q_positions: Any = None
    kv_positions: Any = None
    q_segments: Any = None
    kv_segments: Any = None
    window: Any = None
    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    q_offset: Any = None
    padding: int | None = dataclasses.field(default=0, metadata={"static": True})

    @property
    def trivial(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal and self.window is None and self.q_segments is None

    @property
    def ordered_by_index(self) -> bool:
        """Whether positions are the index in the row, or begin at an offset."""
        return self.q_positions is None and self.kv_positions is None

    def may_be_blind(self, queries: int, keys: int) -> bool:
        """Whether some query may see no key at all."""
        indexed = self.ordered_by_index and self.q_offset is None and self.q_segments is None
        return not self.trivial and not (indexed and (queries <= keys or self.window is None))

    def mask(self, q_index: jax.Array, kv_index: jax.Array) -> jax.Array:
        """Mask (B, T, S) of the keys at `kv_index` that the queries at `q_index` see; B is 1 if rows are alike."""
        q_positions, kv_positions = _at(self.q_positions, q_index), _at(self.kv_positions, kv_index)
        if self.q_offset is not None:
            q_positions = q_positions + self.q_offset
        distance = q_positions[:, :, None] - kv_positions[:, None, :]
        visible = jnp.ones_like(distance, dtype=bool)
        if self.causal:
            visible = distance >= 0
        if self.window is not None:
            visible = visible & (distance < self.window)
        if self.q_segments is not None:
            q_segments, kv_segments = _at(self.q_segments, q_index), _at(self.kv_segments, kv_index)
            visible = visible & (q_segments[:, :, None] == kv_segments[:, None, :])
            if self.padding is not None:
                visible = visible & (kv_segments != self.padding)[:, None, :]
        return visible

    def reachable(self, q_first: Any, queries: int, kv_first: Any, keys: int) -> Any:
        """Whether some of these queries may see some of these keys, by their indices; `True` if those do not decide.

        Args:
            q_first, queries: index of the first query, and their number.
            kv_first, keys: index of the first key, and their number.
        """
        if not self.ordered_by_index:
            return True
        q_first = q_first if self.q_offset is None else q_first + self.q_offset
        reachable: Any = True
        if self.causal:
            reachable = kv_first <= q_first + queries - 1
        if self.window is not None:
            reachable = reachable & (q_first - (kv_first + keys - 1) < self.window)
        return reachable


def _at(values: Any, index: jax.Array) -> jax.Array:
    """`values[:, index]`, or the index if there are no values. An index as long as the row is the whole row."""
    if values is None:
        return index[None, :]
    return jnp.asarray(values) if values.shape[1] == index.shape[0] else jnp.take(values, index, axis=1, mode="clip")
