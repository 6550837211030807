"""GaLore (Zhao et al. 2024, arXiv 2403.03507): Adam in a low-rank subspace of each matrix's gradients, layer by layer.

The rule is `optax.contrib.scale_by_galore`, which does not support stacked layers; `per_layer` passes it single
matrices. Embeddings, head, gains and biases get AdamW. Moments have rank x (the shorter dim) numbers, the projection
rank x (the longer): neither has the shape of the parameter, so ZeRO and quantization leave both unchanged. A sharded
gradient is gathered, and each device projects all of it.
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
    r"""Adam in a low-rank subspace: with P the first singular vectors of a gradient, recomputed every `every` updates,

    .. math:: w \leftarrow w - \eta \left(P \, \mathrm{adam}(P^\top g) + \lambda w\right)

    The paper's scale (0.25) is 1 here, as part of the learning rate.

    Args:
        rate: learning rate, or a schedule.
        rank: rank of the projection, at most the shorter dim of a matrix.
        every: number of updates between new projections, each of which takes a singular value decomposition.
        b1, b2, eps: Adam's constants.
        weight_decay: lambda, the factor of weight decay.
        leaves: tree of `ParamInfo` like the parameters; `None` derives it from shapes and paths.
        mask: tree of bools like the parameters, true where weight decay applies; `None` decays all.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"w": jnp.ones((8, 4))}
        >>> rule = galore(0.1, rank=1)
        >>> state = rule.init(params)
        >>> sorted({leaf.shape for leaf in optax.tree.get(state, "projector").values()})
        [(8, 1)]
    """
    adam = optax.scale_by_adam(b1, b2, eps)
    rule = contrib.scale_by_galore(rank, every, base_optimizer=adam)
    rule = optax.GradientTransformation(rule.init, _matrix_by_matrix(rule.update))
    return matrices_by(per_layer(rule, leaves, as_matrices=True, gathers=True), adam, rate, weight_decay, leaves, mask)


def _matrix_by_matrix(update: Callable[..., Any]) -> Callable[..., Any]:
    """An `update` that decomposes one matrix after the other on a CPU. Step counts get no dim of layers."""
    update_one_by_one = sequential_on_cpu(update)

    def run(gradient: Any, state: Any, params: Any = None) -> Any:
        """The new gradient and state: arrays from updates of one matrix each, step counts from the update of all."""
        outputs_of_all = update(gradient, state, params)  # XLA computes only its counts, since nothing else is used
        outputs = update_one_by_one(gradient, state, params)
        return jax.tree.map(lambda one, all_: one if jnp.ndim(one) else all_, outputs, outputs_of_all)

    return run
