"""The shapes of the values that a device holds between the ticks of a schedule, from an abstract trace of a stage."""

from typing import Any, NamedTuple

import jax

from jaxscale.pipeline.run.actions import Actions
from jaxscale.pipeline.run.passes import StageFunction
from jaxscale.pipeline.run.pools import empty_pool
from jaxscale.pipeline.run.tables import ORIGINS, Tables
from jaxscale.trees import tree_bytes


class HeldShapes(NamedTuple):
    """The shapes of the values that a device holds: trees of `jax.ShapeDtypeStruct`.

    The shapes are the same on all devices, because all devices have the number of slots that the fullest device needs.

    Args:
        messages: slots of messages, with one more slot that stands for no message.
        boxes: a message for each origin (`tables.ORIGINS`) that has messages.
        stashes: slots of the residuals of forwards (stash "residuals").
        cuts: slots of the values that are kept from I to W.
        gradients: (weights, shared), float32 sums of the gradients of this device's weights and of the shared weights.
    """

    messages: Any
    boxes: Any
    stashes: Any
    cuts: Any
    gradients: Any

    @property
    def bytes(self) -> int:
        """Bytes of all values that the device holds."""
        return tree_bytes(tuple(self))


def held_shapes(
    tables: Tables, stage: StageFunction, weights: Any, shared: Any, batch: Any, key: Any, message_shapes: Any
) -> HeldShapes:
    """Return the shapes of the values that `execute` holds with the same arguments.

    Args:
        tables: the schedule, as in `execute`.
        stage: the stage function, as in `execute`.
        weights: weights as in `execute`, or their shapes (`jax.ShapeDtypeStruct`).
        shared: shared weights as in `execute`, or their shapes.
        batch: microbatches as in `execute`, or their shapes.
        key: random key as in `execute`, or its shape.
        message_shapes: shapes and types of the message from stage to stage.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> from jaxscale.pipeline.run.tables import tabulate
        >>> def stage(weights, shared, x, microbatch, at, key):
        ...     return x @ weights, x.sum(), {}
        >>> shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(1, 8, 8), (6, 2, 8), (2, 8)]]
        >>> tables = tabulate(METHODS["1f1b"].schedule(4, 6), "residuals")
        >>> held = held_shapes(tables, stage, shapes[0], {}, shapes[1], None, shapes[2])
        >>> held.stashes, held.bytes  # the stash is the stage's input, in 4 slots
        ((ShapeDtypeStruct(shape=(4, 2, 8), dtype=float32),), 832)
    """

    def initial_state(weights: Any, shared: Any, batch: Any, key: Any) -> Any:
        """Return the state before the first tick: empty slots, and sums of gradients that are zero."""
        return Actions(tables, stage, weights, shared, batch, key, message_shapes, ()).initial_state()

    abstract_state = jax.eval_shape(initial_state, weights, shared, batch, key)
    return HeldShapes(
        messages=jax.eval_shape(lambda: empty_pool(message_shapes, tables.message_slot_count + 1)),
        boxes=[message_shapes for origin in ORIGINS if tables.has_messages(origin)],
        stashes=abstract_state.get("kept", ()),
        cuts=abstract_state.get("cut", ()),
        gradients=(abstract_state.get("weights", ()), abstract_state.get("shared", ())),
    )
