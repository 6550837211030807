"""Cross-entropy by our own TPU kernel, `pallas_kernels.cross_entropy`, which never holds logits.

It computes each logit three times where chunks compute it once: it is for memory, and is run by name. A kernel is code
of one device, so under a layout it runs in a `shard_map`: rows and positions, and the rows of the head, as the rules
shard them.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxscale.errors import UserError
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
        UserError: what the kernel cannot do.
    """
    from pallas_kernels.cross_entropy.api import cross_entropy

    told = {"vocab": vocab, "z_loss": z_loss, "soft_cap": soft_cap, "implementation": "tpu", "interpret": interpret}

    found = current()
    platform = jax.default_backend() if found is None else None  # a mesh tells

    def run(hidden: Any, head: Any, targets: Any, weights: Any, axis: Any = None) -> tuple[Any, Any]:
        arrays = hidden.reshape(-1, hidden.shape[-1]), head, targets.reshape(-1), weights.reshape(-1)
        try:
            return cross_entropy(*arrays, axis=axis, platform=platform, **told)
        except (NotImplementedError, ValueError) as error:
            reason = str(error).removesuffix(". Pass implementation=None to take one that can.")
            raise UserError(f"{reason}; or take no kernel, and a chunk") from error

    head = head.astype(hidden.dtype)
    if found is None:
        return run(hidden, head, targets, weights)
    mesh, rules = found
    rows = PartitionSpec(*spec(targets.shape, ("batch", "inner_seq"), mesh, rules))
    words = PartitionSpec(*spec(head.shape, ("vocab", None), mesh, rules))
    over, axis = _axes(rows), _axes(words)
    if len(axis) > 1:
        raise UserError(f"cross_entropy: words are sharded over {', '.join(axis)}, and the kernel takes one axis")

    def local(*arrays: Any) -> tuple[Any, Any]:
        part = run(*arrays, axis=axis[0] if axis else None)
        return jax.lax.psum(part, over) if over else part

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, words, rows, rows),
        out_specs=PartitionSpec(),
        # within a region that is manual over some axes (a pipeline's), the kernel becomes manual over the others
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )(hidden, head, targets, weights)


def _axes(partition: PartitionSpec) -> tuple[str, ...]:
    """All mesh axes of a partition."""
    entries = ((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in partition)
    return tuple(axis for entry in entries for axis in entry)
