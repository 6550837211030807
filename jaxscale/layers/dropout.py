"""Dropout (Srivastava et al. 2014) whose mask is a pure function of seed, step, layer, site and example: the same on
every mesh, in any number of microbatches, scanned or unrolled.
"""

import jax.numpy as jnp
from flax import nnx

from jaxscale.blocks import Context, dropout_mask
from jaxscale.errors import UserError
from jaxscale.typing import Array, Float


class Dropout(nnx.Module):
    """Zeroes a share of the values and scales up the others; if the context has no key, values are unchanged.

    Args:
        rate: share of the values zeroed, in [0, 1).
        site: name of the place inside a block; two places in a block with the same name would share their masks.

    Example:
        >>> import jax
        >>> x = jnp.ones((2, 8))
        >>> Dropout(0.5, site="mlp")(x, Context()).tolist() == x.tolist()
        True
        >>> sorted(set(Dropout(0.5, site="mlp")(x, Context(key=jax.random.key(0))).ravel().tolist()))
        [0.0, 2.0]
    """

    def __init__(self, rate: float, site: str):
        if not 0 <= rate < 1:
            raise UserError(f"dropout at {site}: got rate {rate!r}, expected at least 0 and less than 1")
        self.rate, self.site = rate, site

    def __call__(self, x: Float[Array, "B *_"], context: Context) -> Float[Array, "B *_"]:
        """Return `x` with a share of its values zeroed and the others scaled up."""
        if self.rate == 0 or context.key is None:
            return x
        keep_rate = 1 - self.rate
        return jnp.where(dropout_mask(context, self.site, x.shape, keep_rate), x / keep_rate, jnp.zeros((), x.dtype))
