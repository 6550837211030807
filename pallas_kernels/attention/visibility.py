"""Which keys a query sees: the definition that every implementation of attention in plain JAX uses."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
    """Conditions under which a query sees a key: all conditions that are specified must hold.

    Args:
        q_positions, kv_positions: positions of queries and keys, int (B, T) and (B, S); by default indices in the row.
        q_segments, kv_segments: segment ids of queries and keys, int (B, T) and (B, S): a query sees keys of its own
            segment only.
        window: number of positions that a query sees, ending with its own: an integer, or a traced scalar. Only with
            `causal`.
        causal: whether a query sees no key at a later position than its own.
        q_offset: position of the first query, an int32 scalar, if positions are indices; by default 0.
        padding: the segment id of padding, which sees no key and is seen by no query; `None` if there is no padding.
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
    def is_trivial(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal and self.window is None and self.q_segments is None

    @property
    def is_ordered_by_index(self) -> bool:
        """Whether positions are the indices in the row, perhaps plus an offset for the queries."""
        return self.q_positions is None and self.kv_positions is None

    def may_be_blind(self, queries: int, keys: int) -> bool:
        """Whether one of `queries` queries may see none of `keys` keys."""
        only_positions_count = self.is_ordered_by_index and self.q_offset is None and self.q_segments is None
        return not self.is_trivial and not (only_positions_count and (queries <= keys or self.window is None))

    def mask(self, q_index: jax.Array, kv_index: jax.Array) -> jax.Array:
        """Compute which keys each query sees, for some queries and keys.

        Args:
            q_index: indices of the queries in the row, int (T,).
            kv_index: indices of the keys in the row, int (S,).

        Returns:
            A mask (B, T, S), True where the query sees the key; B is 1 if all rows have the same mask.
        """
        q_positions, kv_positions = _take_columns(self.q_positions, q_index), _take_columns(self.kv_positions, kv_index)
        if self.q_offset is not None:
            q_positions = q_positions + self.q_offset
        distance = q_positions[:, :, None] - kv_positions[:, None, :]
        visible = jnp.ones_like(distance, dtype=bool)
        if self.causal:
            visible = distance >= 0
        if self.window is not None:
            visible = visible & (distance < self.window)
        if self.q_segments is not None:
            q_segments, kv_segments = _take_columns(self.q_segments, q_index), _take_columns(self.kv_segments, kv_index)
            visible = visible & (q_segments[:, :, None] == kv_segments[:, None, :])
            if self.padding is not None:
                visible = visible & (kv_segments != self.padding)[:, None, :]
        return visible

    def is_reachable(self, first_query: Any, queries: int, first_key: Any, keys: int) -> Any:
        """Whether one of some queries may see one of some keys, judged by positions alone.

        Args:
            first_query: index of the first of the queries in the row.
            queries: number of consecutive queries.
            first_key: index of the first of the keys in the row.
            keys: number of consecutive keys.

        Returns:
            A traced bool; or the Python value `True` if the indices do not decide.
        """
        if not self.is_ordered_by_index:
            return True
        first_position = first_query if self.q_offset is None else first_query + self.q_offset
        is_reachable: Any = True
        if self.causal:
            is_reachable = first_key <= first_position + queries - 1
        if self.window is not None:
            is_reachable = is_reachable & (first_position - (first_key + keys - 1) < self.window)
        return is_reachable


def _take_columns(values: Any, index: jax.Array) -> jax.Array:
    """`values[:, index]`, or the index if `values` is None; an index as long as the row selects the whole row."""
    if values is None:
        return index[None, :]
    return jnp.asarray(values) if values.shape[1] == index.shape[0] else jnp.take(values, index, axis=1, mode="clip")
