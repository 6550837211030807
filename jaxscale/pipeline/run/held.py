"""Held: the values that a device holds between ticks of a schedule, from an abstract trace of a stage."""

from typing import Any, NamedTuple

import jax

from jaxscale.pipeline.run.actions import Actions
from jaxscale.pipeline.run.passes import StageFunction
from jaxscale.pipeline.run.pools import empty_pool
from jaxscale.pipeline.run.tables import MESSAGES, Tables
from jaxscale.trees import tree_bytes


class Held(NamedTuple):
    """The shapes of the values that a device holds: trees of `jax.ShapeDtypeStruct`.

    They are the same on all devices, because each device has as many slots as the one that needs most.

    Args:
        messages: slots of messages, and one more for no message.
        links: the message at each end of the device's links.
        kept: slots of the residuals of forwards (stash "residuals").
        cut: slots of the values that I leaves for W.
        gradients: float32 sums for this device's weights and for the shared weights.
    """

    messages: Any
    links: Any
    kept: Any
    cut: Any
    gradients: Any

    @property
    def bytes(self) -> int:
        """Bytes of all these trees."""
        return tree_bytes(tuple(self))


def held(tables: Tables, stage: StageFunction, weights: Any, shared: Any, batch: Any, key: Any, x: Any) -> Held:
    """Return the shapes of the values that `execute` holds with the same arguments.

    Args:
        tables, stage, x: as in `execute`.
        weights, shared, batch, key: as in `execute`, arrays or `jax.ShapeDtypeStruct`s.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> from jaxscale.pipeline.run.tables import tabulate
        >>> def stage(weights, shared, x, microbatch, at, key):
        ...     return x @ weights, x.sum(), {}
        >>> shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(1, 8, 8), (6, 2, 8), (2, 8)]]
        >>> tables = tabulate(METHODS["1f1b"].schedule(4, 6), "residuals")
        >>> values = held(tables, stage, shapes[0], {}, shapes[1], None, shapes[2])
        >>> values.kept, values.bytes  # the input, in 4 slots
        ((ShapeDtypeStruct(shape=(4, 2, 8), dtype=float32),), 832)
    """

    def start(weights: Any, shared: Any, batch: Any, key: Any) -> Any:
        """Make the pools and sums at the start of the schedule."""
        return Actions(tables, stage, weights, shared, batch, key, x, ()).start()

    state = jax.eval_shape(start, weights, shared, batch, key)
    return Held(
        messages=jax.eval_shape(lambda: empty_pool(x, tables.messages + 1)),
        links=[x for way in MESSAGES if tables.meets(way)],
        kept=state.get("kept", ()),
        cut=state.get("cut", ()),
        gradients=(state.get("weights", ()), state.get("shared", ())),
    )
