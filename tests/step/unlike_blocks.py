"""A model of unlike blocks: widths that change, whole numbers and a skip in the message, dropout."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.blocks import Context, Loss, dropout_mask
from jaxscale.layers.norm import LayerNorm
from jaxscale.layers.stack import Chain


class Layer(nnx.Module):
    """Widens or narrows, and passes a count of whole numbers and the input's skip on."""

    def __init__(self, inward: int, outward: int, *, rngs: nnx.Rngs):
        self.norm = LayerNorm(inward, rngs=rngs)
        self.weight = nnx.Param(0.3 * jax.random.normal(rngs.params(), (inward, outward)))

    def __call__(self, state: Any, *, context: Context = Context()) -> Any:
        """(x, skip, count)."""
        x, skip, count = state
        y = jnp.tanh(self.norm(x) @ self.weight[...])
        if context.key is not None:
            y = jnp.where(dropout_mask(context, "it", y.shape, 0.9), y, 0.0)
        return y, skip, count + 1


class Module(nnx.Module):
    """Embed, unlike layers, head."""

    def __init__(self, widths: tuple[int, ...], rngs: nnx.Rngs):
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (12, widths[0])))
        pairs = itertools.pairwise(widths)
        self.blocks = Chain([Layer(inward, outward, rngs=rngs) for inward, outward in pairs])
        self.head = nnx.Param(jax.random.normal(rngs.params(), (widths[-1] + widths[0], 12)))


@dataclasses.dataclass(frozen=True)
class Unlike:
    """A model of a chain."""

    widths: tuple[int, ...] = (6, 8, 4, 10, 6)

    def build(self, rngs: nnx.Rngs, *, vocab_multiple: int = 1) -> Module:
        return Module(self.widths, rngs)

    def loss(self, module: Module, batch: Any, context: Context) -> Loss:
        x = module.embed[...][batch["tokens"]]
        x, skip, count = module.blocks((x, x, jnp.zeros((1,), jnp.int32)), context=context)
        logits = jnp.concatenate([x, skip], -1).astype(jnp.float32) @ module.head[...].astype(jnp.float32)
        nats = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        return Loss(nats.sum() * count[0] / 4, jnp.float32(nats.size), jnp.square(logits).sum() * 1e-3)

    def logical_sizes(self) -> dict[str, int]:
        return {}
