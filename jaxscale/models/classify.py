"""Loss and accuracy of image classifiers: cross-entropy over classes with label smoothing, and the summed weight of the
rows that are classified correctly.

Label smoothing follows Szegedy et al. 2016 (arXiv:1512.00567), section 7: the target distribution gives a / V to each
of V classes, and an additional 1 - a to the label.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.blocks import Context, Loss
from jaxscale.errors import UserError
from jaxscale.layers.targets import gathers_label_logits, is_class
from jaxscale.models.field_checks import check_batch
from jaxscale.typing import Array, Batch, Float, Integer, Shaped
from pallas_kernels.cross_entropy.reference import values_at


def cross_entropy(
    logits: Float[Array, "*rows V"], labels: Integer[Array, "*rows"], smoothing: float = 0.0
) -> Float[Array, "*rows"]:
    """Return the loss of each target in nats: (1 - a) * -log p[label] + a * mean over classes of -log p.

    Args:
        logits: unnormalized log-probabilities, of any float type; the loss is computed in float32.
        labels: class of each target; a label that is not a class, such as -100, gives loss 0.
        smoothing: a, the share of the target distribution that is spread evenly over all classes.

    Returns:
        One loss per target, float32.

    Example:
        >>> import jax.numpy as jnp
        >>> cross_entropy(jnp.array([[0.0, 40.0]]), jnp.array([0])).tolist()
        [40.0]
    """
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    losses = -values_at(log_p, labels, gather=gathers_label_logits())
    if smoothing > 0.0:
        losses = (1.0 - smoothing) * losses - smoothing * log_p.mean(-1)
    return jnp.where(is_class(labels, logits.shape[-1]), losses, 0.0)


def weighted_sum(
    losses: Float[Array, "B ..."], batch: Batch, target_weights: Shaped[Array, "B ..."] | None = None
) -> Loss:
    """Return the sum of the weighted losses, and the sum of the weights.

    The weights are `batch["weights"]`, of shape [B] (one per row) or of the shape of the losses (one per target). A
    batch without weights gives each target the weight 1. `target_weights`, if given, multiply these weights.

    Raises:
        UserError: the weights of the batch have neither of these shapes.
    """
    losses = losses.astype(jnp.float32)
    batch_weights = batch.get("weights")
    if batch_weights is None and target_weights is None:
        return Loss(losses.sum(), jnp.float32(losses.size))
    weights = jnp.ones(losses.shape[:1]) if batch_weights is None else jnp.asarray(batch_weights, jnp.float32)
    if weights.shape != losses.shape[: weights.ndim] or weights.ndim not in (1, losses.ndim):
        raise UserError(
            f"weights: got shape {weights.shape} for losses of shape {losses.shape}; "
            f"expected one weight per row {losses.shape[:1]} or one per loss {losses.shape}"
        )
    trailing_dim_sizes = (1,) * (losses.ndim - weights.ndim)
    loss_weights = jnp.broadcast_to(weights.reshape(weights.shape + trailing_dim_sizes), losses.shape)
    loss_weights = loss_weights if target_weights is None else loss_weights * target_weights
    # a row of weight 0 must not change the sum, even with an infinite or NaN loss
    return Loss(jnp.where(loss_weights == 0, 0.0, losses * loss_weights).sum(), loss_weights.sum())


def correct_indicators(logits: Float[Array, "*rows V"], labels: Integer[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Return 1.0 for each target whose label has the largest logit, and 0.0 for every other target, float32."""
    return (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)


def image_loss(module: Callable[..., Any], batch: Batch, context: Context, smoothing: float) -> Loss:
    """Return the weighted sum of the cross-entropies between `module(batch["images"])` and `batch["labels"]`."""
    logits, labels = _logits_and_labels(module, batch, context)
    return weighted_sum(cross_entropy(logits, labels, smoothing), batch, is_class(labels, logits.shape[-1]))


def image_accuracy(
    module: Callable[..., Any], batch: Batch, context: Context
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return (summed weights of the rows whose label has the largest logit, summed weights of all labeled rows)."""
    logits, labels = _logits_and_labels(module, batch, context)
    weighted_sums = weighted_sum(correct_indicators(logits, labels), batch, is_class(labels, logits.shape[-1]))
    return weighted_sums.total, weighted_sums.weight


def _logits_and_labels(module: Callable[..., Any], batch: Batch, context: Context) -> tuple[Array, Array]:
    """Return the logits of a batch's images [B, V], and their labels [B]."""
    check_batch(batch, ("images", "labels"), "a classifier of images")
    return module(jnp.asarray(batch["images"]), context=context), jnp.asarray(batch["labels"])
