"""Targets that the loss ignores, and the number of classes that the targets of a batch may have.

A target that is not a class, such as `IGNORED`, has weight 0 in the loss. Batches on the host are checked before a step
(`state/batches.py`), so a wrong label raises an error there instead of being silently ignored.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax.numpy as jnp

from jaxscale.layers.traced_device import traced_device
from jaxscale.typing import Array, Bool, Float, Int, Integer

IGNORED = -100
"""Class of a target that the loss ignores, as in PyTorch and transformers."""

_class_count_by_name: contextvars.ContextVar[dict[str, int] | None] = contextvars.ContextVar(
    "class_counts", default=None
)


def is_class(targets: Integer[Array, "*S"], classes: int) -> Bool[Array, "*S"]:
    """Return whether each target is a class: an integer from 0 to `classes` - 1.

    Example:
        >>> is_class(jnp.array([7, 200, 255], "uint8"), 300).tolist()  # 300 is no value of this type
        [True, True, True]
    """
    wide_targets = targets.astype(jnp.int32)
    return (wide_targets >= 0) & (wide_targets < classes)


def zero_ignored_targets(
    targets: Integer[Array, "*S"], classes: int, weights: Float[Array, "*S"] | None = None
) -> tuple[Int[Array, "*S"], Float[Array, "*S"]]:
    """Return the pair (targets, weights), in which each ignored target is replaced by class 0 with weight 0.

    Args:
        targets: class of each target. The loss ignores a target that is outside of 0 to `classes` - 1.
        classes: number of classes.
        weights: weights of the targets; all ones by default.

    Returns:
        The targets, which are now all classes, in int32, and their weights in float32.

    Example:
        >>> targets, weights = zero_ignored_targets(jnp.array([2, IGNORED]), 4)
        >>> targets.tolist(), weights.tolist()
        ([2, 0], [1.0, 0.0])
    """
    is_counted = is_class(targets, classes)
    target_weights = 1.0 if weights is None else weights.astype(jnp.float32)
    return jnp.where(is_counted, targets.astype(jnp.int32), 0), jnp.where(is_counted, target_weights, jnp.float32(0.0))


def gathers_label_logits() -> bool:
    """Return whether a loss gathers the logits of the labels, or else sums over all classes.

    On a TPU, a gather stores all log-probabilities, and its gradient is a scatter that stores them again where XLA does
    not turn it into a comparison, as in the branches of a pipeline. By libtpu's clock, steps of a decoder of Flax's own
    layers on v6e (0.27 s) and of a GPT-2 on v5e (0.28 s) take as long either way. On a CPU, a gather took 0.6 to 0.9 of
    the time of a loss and its gradients (8 rows of 128 to 512 targets, 512 to 32,000 classes; 2026-11-30).
    """
    return traced_device()[0] != "tpu"


@contextlib.contextmanager
def noting_class_counts() -> Iterator[dict[str, int]]:
    """Yield a dict that collects, while a loss is traced, the number of classes of each label array, by array name."""
    class_count_by_name: dict[str, int] = {}
    token = _class_count_by_name.set(class_count_by_name)
    try:
        yield class_count_by_name
    finally:
        _class_count_by_name.reset(token)


def note_class_count(name: str, class_count: int) -> None:
    """Record that the array `name` of the batch holds classes from 0 to `class_count` - 1."""
    class_count_by_name = _class_count_by_name.get()
    if class_count_by_name is not None:
        class_count_by_name[name] = class_count
