"""Cross-entropy by the TPU kernel of `pallas_kernels.cross_entropy`, which never stores logits.

The kernel saves memory, but computes each logit three times ("chunked" only once). So it runs only if it is named.
Under a layout, the axis rules shard the rows and positions of a batch, and the rows of the head.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxscale.errors import UserError
from jaxscale.layers.shards import axes_by_dim, map_over_devices
from jaxscale.sharding.place import current


def kernel_sums(
    hidden: Any,
    head: Any,
    targets: Any,
    weights: Any,
    *,
    vocab: int,
    z_loss: float,
    soft_cap: float | None,
    interpret: bool = False,
) -> tuple[Any, Any]:
    """Return the pair (total + penalty, penalty). Only the first sum is to be differentiated.

    Args:
        hidden: last hidden states (B, T, D).
        head: output projection (V, D).
        targets: tokens to predict, (B, T) integers.
        weights: weights of the targets, (B, T) float32.
        vocab: number of tokens.
        z_loss: factor of the penalty.
        soft_cap: cap of the logits; `None` for no cap.
        interpret: whether to run the kernel step by step in plain JAX, for tests.

    Raises:
        UserError: the kernel does not support the call.
    """
    from pallas_kernels.cross_entropy.api import cross_entropy

    settings = {"vocab": vocab, "z_loss": z_loss, "soft_cap": soft_cap, "implementation": "tpu", "interpret": interpret}

    layout = current()
    platform = jax.default_backend() if layout is None else None  # under a layout, the mesh determines the platform

    def run_kernel(
        local_hidden: Any, local_head: Any, local_targets: Any, local_weights: Any, vocab_axis: Any = None
    ) -> tuple[Any, Any]:
        """Run the kernel on arrays of one device; `vocab_axis` is the mesh axis that shards the head's rows, if any."""
        flat_arrays = (
            local_hidden.reshape(-1, local_hidden.shape[-1]),
            local_head,
            local_targets.reshape(-1),
            local_weights.reshape(-1),
        )
        try:
            return cross_entropy(*flat_arrays, axis=vocab_axis, platform=platform, **settings)
        except (NotImplementedError, ValueError) as error:
            reason = str(error).removesuffix(". Pass implementation=None to take one that can.")
            raise UserError(f"{reason}; or set a chunk instead of this kernel") from error

    head = head.astype(hidden.dtype)
    if layout is None:
        return run_kernel(hidden, head, targets, weights)
    row_axes, position_axes = axes_by_dim(targets.shape, "batch", "inner_seq")
    vocab_axes = axes_by_dim(head.shape, "vocab", None)[0]
    if len(vocab_axes) > 1:
        raise UserError(f"cross_entropy: got a vocabulary sharded over {', '.join(vocab_axes)}, expected one axis")

    def run_on_device(*local_arrays: Any) -> tuple[Any, Any]:
        """Run the kernel on a device's shards, and add up both sums over the devices that split the batch."""
        local_sums = run_kernel(*local_arrays, vocab_axis=vocab_axes[0] if vocab_axes else None)
        return jax.lax.psum(local_sums, (*row_axes, *position_axes)) if row_axes or position_axes else local_sums

    row_spec, vocab_spec = PartitionSpec(row_axes, position_axes), PartitionSpec(vocab_axes)
    in_specs = (row_spec, vocab_spec, row_spec, row_spec)
    return map_over_devices(run_on_device, in_specs, PartitionSpec())(hidden, head, targets, weights)
