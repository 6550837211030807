"""Cross-entropy by the TPU kernel of `pallas_kernels.cross_entropy`, which never stores logits.

It computes each logit three times, where chunks compute it once: it saves memory, and is selected by name. Under a
layout, rows and positions, and the rows of the head, are sharded by the rules.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxscale.errors import UserError
from jaxscale.layers.shards import axes_by_dim, on_each_device
from jaxscale.sharding.place import current


def sums(
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
    """Total plus penalty, which carries the gradient of both, and the penalty.

    Args:
        hidden: (B, T, D).
        head: (V, D).
        targets: (B, T) integers.
        weights: (B, T) float32.
        vocab, z_loss, soft_cap: as of `loss.cross_entropy`.
        interpret: run the kernel step by step in plain JAX, for tests.

    Raises:
        UserError: the kernel does not support the call.
    """
    from pallas_kernels.cross_entropy.api import cross_entropy

    settings = {"vocab": vocab, "z_loss": z_loss, "soft_cap": soft_cap, "implementation": "tpu", "interpret": interpret}

    layout = current()
    platform = jax.default_backend() if layout is None else None  # else the mesh determines it

    def run(hidden: Any, head: Any, targets: Any, weights: Any, vocab_axis: Any = None) -> tuple[Any, Any]:
        arrays = hidden.reshape(-1, hidden.shape[-1]), head, targets.reshape(-1), weights.reshape(-1)
        try:
            return cross_entropy(*arrays, axis=vocab_axis, platform=platform, **settings)
        except (NotImplementedError, ValueError) as error:
            reason = str(error).removesuffix(". Pass implementation=None to take one that can.")
            raise UserError(f"{reason}; or take no kernel, and a chunk") from error

    head = head.astype(hidden.dtype)
    if layout is None:
        return run(hidden, head, targets, weights)
    rows, positions = axes_by_dim(targets.shape, "batch", "inner_seq")
    vocab_axes = axes_by_dim(head.shape, "vocab", None)[0]
    if len(vocab_axes) > 1:
        raise UserError(f"cross_entropy: words are sharded over {', '.join(vocab_axes)}, and the kernel takes one axis")

    def local(*arrays: Any) -> tuple[Any, Any]:
        local_sums = run(*arrays, vocab_axis=vocab_axes[0] if vocab_axes else None)
        return jax.lax.psum(local_sums, (*rows, *positions)) if rows or positions else local_sums

    by_row, by_word = PartitionSpec(rows, positions), PartitionSpec(vocab_axes)
    return on_each_device(local, (by_row, by_word, by_row, by_row), PartitionSpec())(hidden, head, targets, weights)
