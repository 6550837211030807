"""Held: what a device holds between the ticks of a schedule, found by tracing a stage on shapes alone."""

import dataclasses
from typing import Any

import jax

from jaxscale.pipeline.actions import Actions
from jaxscale.pipeline.passes import StageFunction
from jaxscale.pipeline.pools import empty
from jaxscale.pipeline.tables import MESSAGES, Tables
from jaxscale.trees import tree_bytes


@dataclasses.dataclass(frozen=True)
class Held:
    """Trees of `jax.ShapeDtypeStruct`, the same on all devices: each has the slots of the one that needs most.

    Args:
        messages: slots of messages, and one to spare.
        links: the message at each end of the device's links.
        kept: slots of what forwards keep (stash "residuals").
        cut: slots of what I leaves for W.
        gradients: float32 sums, of this device's weights and of what stages share.
    """

    messages: Any
    links: Any
    kept: Any
    cut: Any
    gradients: Any

    @property
    def bytes(self) -> int:
        """Bytes of it all."""
        return tree_bytes([getattr(self, field.name) for field in dataclasses.fields(self)])


def held(tables: Tables, stage: StageFunction, weights: Any, shared: Any, batch: Any, key: Any, x: Any) -> Held:
    """What `execute` holds when given the same.

    Args:
        tables, stage, x: as of `execute`.
        weights, shared, batch, key: as of `execute`, arrays or `jax.ShapeDtypeStruct`s.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> from jaxscale.pipeline.tables import tabulate
        >>> def stage(weights, shared, x, microbatch, at, key):
        ...     return x @ weights, x.sum(), {}
        >>> shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(1, 8, 8), (6, 2, 8), (2, 8)]]
        >>> tables = tabulate(METHODS["1f1b"].schedule(4, 6), "residuals")
        >>> found = held(tables, stage, shapes[0], {}, shapes[1], None, shapes[2])
        >>> found.kept, found.bytes  # the input, in 4 slots
        ((ShapeDtypeStruct(shape=(4, 2, 8), dtype=float32),), 832)
    """

    def start(weights: Any, shared: Any, batch: Any, key: Any) -> Any:
        return Actions(tables, stage, weights, shared, batch, key, x, ()).start()

    state = jax.eval_shape(start, weights, shared, batch, key)
    ends = [x for way in MESSAGES if tables.meets(way)]
    return Held(
        messages=jax.eval_shape(lambda: empty(x, tables.messages + 1)),
        links=ends,
        kept=state.get("kept", ()),
        cut=state.get("cut", ()),
        gradients=(state.get("weights", ()), state.get("shared", ())),
    )
