"""GaLore (Zhao et al. 2024, arXiv 2403.03507): Adam in a low-rank subspace of each matrix's gradients, layer by layer.

The rule is `optax.contrib.scale_by_galore`, which does not support stacked layers; `per_layer` passes it one
matrix at a time. Embeddings, head, gains and biases get AdamW. Each moment of a matrix has rank x (shorter dim)
elements, and its projection has rank x (longer dim). Neither has the parameter's shape, so ZeRO does not shard them
and quantization does not apply. A sharded gradient is gathered, and each device projects the whole gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from jaxscale.compat import sequential_on_cpu
from jaxscale.optim.per_layer import UpdateRule, matrices_by, per_layer


def galore(
    rate: float | Callable[[Any], Any],
    *,
    rank: int = 128,
    every: int = 200,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    leaves: Any = None,
    mask: Any = None,
) -> UpdateRule:
    r"""Adam in a low-rank subspace of each matrix's gradients, and AdamW for all other parameters.

    The columns of P are the first `rank` singular vectors of a gradient. P is recomputed every `every` updates.

    .. math:: w \leftarrow w - \eta \left(P \, \mathrm{adam}(P^\top g) + \lambda w\right)

    The paper multiplies updates by a scale of 0.25; here the learning rate includes this factor.

    Args:
        rate: learning rate, or a schedule.
        rank: rank of the projection, at most the shorter dim of a matrix.
        every: number of updates between new projections, each of which needs a singular value decomposition.
        b1, b2, eps: Adam's constants.
        weight_decay: lambda, the factor of weight decay.
        leaves: tree of `ParamInfo` like the parameters; `None` derives the tree from shapes and paths.
        mask: tree of bools like the parameters, true where weight decay applies; `None` decays all parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"w": jnp.ones((8, 4))}
        >>> rule = galore(0.1, rank=1)
        >>> state = rule.init(params)
        >>> sorted({leaf.shape for leaf in optax.tree.get(state, "projector").values()})
        [(8, 1)]
    """
    adam = optax.scale_by_adam(b1, b2, eps)
    galore_rule = contrib.scale_by_galore(rank, every, base_optimizer=adam)
    matrix_rule = optax.GradientTransformation(galore_rule.init, _loop_over_matrices(galore_rule.update))
    layer_rule = per_layer(matrix_rule, leaves, as_matrices=True, on_whole_tensors=True)
    return matrices_by(layer_rule, adam, rate, weight_decay, leaves, mask)


def _loop_over_matrices(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `update` that decomposes stacked matrices one by one on a CPU, and does not stack step counts."""
    update_one_by_one = sequential_on_cpu(update)

    def update_matrices(gradient: Any, state: Any, params: Any = None) -> Any:
        """Return (new gradient, new state); arrays are computed matrix by matrix, and a step count only once."""
        # XLA computes only the counts of the batched outputs, because nothing else is used
        batched_outputs = update(gradient, state, params)
        outputs = update_one_by_one(gradient, state, params)
        return jax.tree.map(
            lambda array, batched_array: array if jnp.ndim(array) else batched_array, outputs, batched_outputs
        )

    return update_matrices
