"""Cross-entropy by the TPU kernel of `pallas_kernels.cross_entropy`, which never stores logits.

It computes each logit three times, where chunks compute it once: it saves memory, and is selected by name. A kernel is
code of one device, so under a layout it runs in a `shard_map`: rows and positions, and the rows of the head, sharded by
the rules.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxscale.errors import UserError
from jaxscale.sharding.partition import axes_of
from jaxscale.sharding.place import current, spec


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
    mesh, rules = layout
    row_spec = PartitionSpec(*spec(targets.shape, ("batch", "inner_seq"), mesh, rules))
    vocab_spec = PartitionSpec(*spec(head.shape, ("vocab", None), mesh, rules))
    sum_axes, vocab_axes = axes_of(row_spec), axes_of(vocab_spec)
    if len(vocab_axes) > 1:
        raise UserError(f"cross_entropy: words are sharded over {', '.join(vocab_axes)}, and the kernel takes one axis")

    def local(*arrays: Any) -> tuple[Any, Any]:
        local_sums = run(*arrays, vocab_axis=vocab_axes[0] if vocab_axes else None)
        return jax.lax.psum(local_sums, sum_axes) if sum_axes else local_sums

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(row_spec, vocab_spec, row_spec, row_spec),
        out_specs=PartitionSpec(),
        # within a region that is manual over some axes (a pipeline's), the kernel becomes manual over the others
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )(hidden, head, targets, weights)
