"""AxisRules: the mesh axes of each logical axis.

Each logical axis has a field. So `dataclasses.replace` makes the rules of a strategy, and refuses a misspelled axis.

Parameters and activations use the same logical axes. The rules do not describe how ZeRO shards parameters over "fsdp":
for each parameter, `zero.py` chooses a dim that can be split evenly.
"""

import dataclasses

from jaxscale.errors import UserError, unknown
from jaxscale.sharding.mesh import AXES
from jaxscale.values import check_types

Axes = tuple[str, ...]
"""Names of mesh axes, from the slowest link to the fastest."""


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """The mesh axes over which each logical axis is split; `()` keeps a dim whole.

    Args:
        batch: rows of the batch.
        seq: positions of the residual stream; Megatron's sequence parallelism adds "tensor" here.
        inner_seq: positions inside attention and mlp, where "tensor" already splits heads and mlp.
        kv_seq: positions of keys and values; whole by default, because every query reads all positions.
        embed: width of the residual stream.
        heads: query heads, and the (heads * head_dim) dim of their projections.
        kv_heads: key and value heads, and the (kv_heads * head_dim) dim of their projections.
        head_dim: width of a head.
        mlp: hidden width of a feed-forward layer.
        vocab: vocabulary.
        expert: experts.
        layers: the stacked dim of a `Stack`.
        channels: channels of convolutions.
        position: rows of a learned position table.
        norm: gains and biases of norms.

    Example:
        >>> import dataclasses
        >>> megatron = dataclasses.replace(AxisRules(), seq=("sequence", "tensor"))
        >>> megatron.axes("seq")
        ('sequence', 'tensor')
    """

    batch: Axes = ("replica", "data", "fsdp")
    seq: Axes = ("sequence",)
    inner_seq: Axes = ("sequence",)
    kv_seq: Axes = ()
    embed: Axes = ()
    heads: Axes = ("tensor",)
    kv_heads: Axes = ("tensor",)
    head_dim: Axes = ()
    mlp: Axes = ("tensor",)
    vocab: Axes = ("tensor",)
    expert: Axes = ("expert",)
    layers: Axes = ()
    channels: Axes = ()
    position: Axes = ()
    norm: Axes = ()

    def __post_init__(self) -> None:
        check_types(self)
        for field in dataclasses.fields(self):
            axes = getattr(self, field.name)
            for axis in axes:
                if axis not in AXES:
                    raise unknown(f"mesh axis for {field.name}", axis, AXES)
            if len(set(axes)) < len(axes):
                raise UserError(f"{field.name}: got {', '.join(axes)}, expected each mesh axis at most once")

    def axes(self, name: str | None) -> Axes:
        """Return the mesh axes of the logical axis `name`; a dim without a name is whole."""
        if name is None:
            return ()
        if name not in LOGICAL_AXES:
            raise unknown("logical axis", name, LOGICAL_AXES)
        return getattr(self, name)


LOGICAL_AXES = frozenset(field.name for field in dataclasses.fields(AxisRules))
"""Names of all logical axes."""
