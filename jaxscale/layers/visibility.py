"""Visibility: which keys a query sees, the definition for every implementation of attention."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.typing import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
    """A key is visible to a query if all specified conditions hold.

    Args:
        q_positions, kv_positions: int (B, T) and (B, S); the index in the row by default.
        q_segments, kv_segments: int (B, T) and (B, S): both are equal, and not 0, which is padding.
        window: 0 <= q_position - kv_position < window; a whole number, or a traced one.
        causal: 0 <= q_position - kv_position.
    """

    q_positions: Any = None
    kv_positions: Any = None
    q_segments: Any = None
    kv_segments: Any = None
    window: Any = None
    causal: bool = dataclasses.field(default=True, metadata={"static": True})

    @property
    def trivial(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal and self.window is None and self.q_segments is None

    @property
    def ordered_by_index(self) -> bool:
        """Whether positions are the index in the row."""
        return self.q_positions is None and self.kv_positions is None

    def may_be_blind(self, queries: int, keys: int) -> bool:
        """Whether some query may see no key at all."""
        indexed = self.ordered_by_index and self.q_segments is None
        return not self.trivial and not (indexed and (queries <= keys or self.window is None))

    def mask(self, q_index: Int[Array, "T"], kv_index: Int[Array, "S"]) -> Bool[Array, "_ T S"]:
        """Mask of the keys at `kv_index` that the queries at `q_index` see; dim 0 is B, or 1 if rows are alike."""
        q_positions, kv_positions = _at(self.q_positions, q_index), _at(self.kv_positions, kv_index)
        distance = q_positions[:, :, None] - kv_positions[:, None, :]
        visible = jnp.ones_like(distance, dtype=bool)
        if self.causal:
            visible = distance >= 0
        if self.window is not None:
            visible = visible & (distance < self.window)
        if self.q_segments is not None:
            q_segments, kv_segments = _at(self.q_segments, q_index), _at(self.kv_segments, kv_index)
            visible = visible & (q_segments[:, :, None] == kv_segments[:, None, :]) & (kv_segments != 0)[:, None, :]
        return visible


def _at(values: Any, index: Any) -> Any:
    """`values[:, index]`, or the index if there are no values. An index as long as the row is the whole row."""
    if values is None:
        return index[None, :]
    return jnp.asarray(values) if values.shape[1] == index.shape[0] else jnp.take(values, index, axis=1, mode="clip")
