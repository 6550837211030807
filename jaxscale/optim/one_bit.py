r"""1-bit Adam and 1-bit LAMB: with a frozen variance, replicas exchange momentum in one bit per element.

Adam's update is not linear in the gradient, so error feedback cannot correct a gradient that is sent in one bit. With a
frozen variance v the update is linear in the momentum m, and the error of one message of m is added to the next message
(Tang et al. 2021, arXiv 2102.02888). So both rules have two phases, in which replica i sends these messages:

    warm-up   its gradient g_i; the exact mean of these gradients updates m and v, as in Adam
    frozen    its momentum m_i = b1 m + (1 - b1) g_i; the codec's mean of these momenta is the next m; v is constant

`Messages` computes a replica's message, the rules take the mean of messages, and `replica_updates.py` combines messages
and rules with a codec. 1-bit LAMB (Li et al. 2021, arXiv 2104.06069) also freezes the trust ratio of each layer, at the
ratio's running mean, and multiplies this mean by a factor. The factor follows the ratio of the frozen variance to a
variance estimated from the change of m, and changes by at most a tenth in a step.

Differences from the papers' code: Adam's bias corrections stay, so that the warm-up is exactly Adam or LAMB. A number
with zero variance, such as one in the row of a token that never occurred, does not move, because its sign divided by
eps would be huge. The layers' momenta are not scaled to a common size before they are sent, because each layer's
message has its own scale. Left out: 0/1 Adam, which schedules its variance and the steps between messages.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.errors import UserError
from jaxscale.lowbit.quantize import decode, is_quantized
from jaxscale.optim.leaves import ParamInfo, param_infos_of
from jaxscale.optim.per_layer import UpdateRule
from jaxscale.typing import Array, Bool, Float, Int


class OneBitState(NamedTuple):
    """State of 1-bit Adam.

    Args:
        count: number of updates made.
        mu: the momentum, equal on all replicas.
        nu: the second moment, constant in the frozen phase.
    """

    count: Any
    mu: Any
    nu: Any


class OneBitLambState(NamedTuple):
    """State of 1-bit LAMB.

    Args:
        count: number of updates made.
        mu: the momentum, equal on all replicas.
        nu: the second moment, constant in the frozen phase.
        fresh: current estimate of the second moment, computed from the change of the momentum.
        ratio: running mean of each layer's trust ratio; the dims within a layer have size 1.
        factor: factor of the frozen trust ratio in the last update.
    """

    count: Any
    mu: Any
    nu: Any
    fresh: Any
    ratio: Any
    factor: Any


class ReplicaMessage(NamedTuple):
    """The message of a replica in an update, with the norm of the replica's gradient.

    Args:
        message: gradient or momentum, a tree like the gradients.
        norm: norm of the replica's gradient.
        is_momentum: whether the message is a momentum.
    """

    message: Any
    norm: Float[Array, ""]
    is_momentum: Bool[Array, ""]


@dataclasses.dataclass(frozen=True)
class Messages:
    """Computes the messages of replicas.

    Args:
        b1: decay of the momentum.
        freeze: number of updates before the variance is frozen.
        clip: norm to which each replica clips its gradient before adding it to a momentum; `None` for no clipping. In
            the warm-up, the rule that `clip_mean_gradients` returns clips the mean gradient instead.

    Example:
        >>> rule, messages = one_bit_adam(1e-3, 1), Messages(b1=0.9, freeze=1)
        >>> params = {"w": jnp.ones((1, 2))}
        >>> state = rule.init(params)
        >>> messages(params, state).message["w"].tolist()  # a gradient
        [[1.0, 1.0]]
        >>> _, state = rule.update(params, state, params)
        >>> round(float(messages(params, state).message["w"][0, 0]), 3)  # 0.9 x 0.1 + 0.1 x 1
        0.19
    """

    b1: float
    freeze: int
    clip: float | None = None

    def count(self, state: Any) -> Int[Array, ""]:
        """Return the number of updates made, from a rule's state or a state that contains it."""
        return _rule_state(state).count

    def frozen(self, state: Any) -> Bool[Array, ""]:
        """Return whether the variance is frozen, from a rule's state or a state that contains it."""
        return self.count(state) >= self.freeze

    def __call__(self, gradients: Any, state: Any) -> ReplicaMessage:
        """Return a replica's message, with the norm of the replica's gradient.

        Args:
            gradients: gradients of this replica.
            state: the rule's state, or a state that contains it; the momentum in it may be quantized.
        """
        is_frozen, norm = self.frozen(state), optax.tree.norm(gradients)
        clip_factor = 1.0 if self.clip is None else jnp.where(norm < self.clip, 1.0, self.clip / norm)

        def message_of(g: Array, m: Any) -> Array:
            """In the warm-up, return the gradient `g` of a parameter; afterwards, the momentum `m` updated by `g`."""
            momentum = decode(m) if is_quantized(m) else m
            return jnp.where(is_frozen, self.b1 * momentum + (1 - self.b1) * (g * clip_factor), g)

        return ReplicaMessage(jax.tree.map(message_of, gradients, _rule_state(state).mu), norm, is_frozen)


def one_bit_adam(
    rate: float | Callable[[Any], Any],
    freeze: int,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> UpdateRule:
    r"""AdamW whose variance is frozen, so that replicas may send their momentum in one bit per number.

    .. math:: w \leftarrow w - \eta \Big(\frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^{\min(t, F)})} + \epsilon}
        + \lambda w\Big)

    Args:
        rate: learning rate, or a schedule.
        freeze: F, the number of updates before the variance is frozen; in the paper, 15 to 25 % of a run.
        b1, b2, eps: Adam's constants.
        weight_decay: lambda, the factor of weight decay.
        mask: tree of bools like the parameters, true where weight decay applies; `None` decays all parameters.

    Returns:
        A transformation of the mean of the replicas' messages (see `Messages`), which are gradients in the first F
        updates, and momenta afterwards.

    Raises:
        UserError: `freeze` is below 1, so the variance would be frozen before its first estimate.

    References:
        Tang et al. 2021, arXiv 2102.02888.

    Example:
        >>> rule = one_bit_adam(0.1, 2)
        >>> params = {"w": jnp.ones((1, 2))}
        >>> update, _ = rule.update(params, rule.init(params), params)
        >>> round(float(update["w"][0, 0]), 3)
        -0.1
    """
    _check_freeze(freeze)

    def init(params: Any) -> OneBitState:
        return OneBitState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params), optax.tree.zeros_like(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, OneBitState]:
        """Return Adam's updates for the mean messages `updates`, and the new state."""
        new_state, corrected_moments = _state_and_corrected_moments(updates, state, b1, b2, freeze)
        return jax.tree.map(lambda m, v: _direction(m, v, eps), *corrected_moments), new_state

    return optax.chain(
        optax.GradientTransformation(init, update),
        optax.add_decayed_weights(weight_decay, mask=mask),
        optax.scale_by_learning_rate(rate),
    )


def one_bit_lamb(
    rate: float | Callable[[Any], Any],
    freeze: int,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    leaves: Any = None,
    mask: Any = None,
    smooth: float = 0.9,
    factors: tuple[float, float] = (0.5, 4.0),
    change: float = 0.1,
) -> UpdateRule:
    r"""LAMB whose variance is frozen, so that replicas may send their momentum in one bit per number.

    For each layer, u is LAMB's update with the frozen variance v, c is the running mean of the trust ratio |w| / |u| in
    the warm-up, and v' is the variance estimated from the changes of the momentum:

    .. math:: w \leftarrow w - \eta c f u, \quad
        f = r \max \frac{\sqrt{\hat v} + \epsilon}{\sqrt{\hat v'} + \epsilon} + 1 - r, \quad
        r = \min\Big(1, \frac{|u - \lambda w|}{|u|}\Big)

    The factor f is kept within the bounds `factors`, and near its value in the previous update.

    Args:
        rate: learning rate, or a schedule.
        freeze: number of updates before the variance is frozen.
        b1, b2, eps: Adam's constants.
        weight_decay: lambda, the factor of weight decay.
        leaves: tree of `ParamInfo` like the parameters; `None` derives the tree from shapes and paths. Each layer of a
            stack has its own norms, and gains and biases have no ratio, as in `large_batch.lamb`.
        mask: tree of bools like the parameters, true where weight decay applies; `None` decays all parameters.
        smooth: decay of the running mean of the trust ratio.
        factors: lower and upper bounds of f.
        change: largest relative change of f in an update.

    Returns:
        A transformation of the mean of the replicas' messages (see `Messages`). Its update needs the parameters.

    Raises:
        UserError: `freeze` is below 1, so the variance would be frozen before its first estimate.

    Example:
        >>> rule, params = one_bit_lamb(0.1, freeze=1, weight_decay=0.0), {"w": jnp.ones((2, 2))}
        >>> update, _ = rule.update(params, rule.init(params), params)
        >>> round(float(jnp.linalg.norm(update["w"])), 3)  # a tenth of the norm of the weights, as LAMB's
        0.2

    References:
        Li et al. 2021, arXiv 2104.06069.
    """
    _check_freeze(freeze)

    def init(params: Any) -> OneBitLambState:
        """Return the initial state: moments and ratios of 0, and factors of 1."""

        def fill_tensors(fill_number: float) -> Any:
            """Return a tree like the parameters that holds this value once for each tensor."""
            shapes = [
                (*param_info.shape[: param_info.stack], *(1,) * (len(param_info.shape) - param_info.stack))
                for param_info in param_infos_of(leaves, params)
            ]
            return jax.tree.structure(params).unflatten([jnp.full(shape, fill_number, jnp.float32) for shape in shapes])

        mu, nu, fresh_nu = (optax.tree.zeros_like(params) for _ in range(3))
        return OneBitLambState(jnp.zeros((), jnp.int32), mu, nu, fresh_nu, fill_tensors(0.0), fill_tensors(1.0))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, OneBitLambState]:
        """Return LAMB's updates for the mean messages `updates` and the parameters, and the new state."""
        if params is None:
            raise UserError("one_bit_lamb: got no parameters; call update(mean, state, params)")
        is_frozen, treedef = state.count >= freeze, jax.tree.structure(updates)
        adam_state, (corrected_mu, corrected_nu) = _state_and_corrected_moments(updates, state, b1, b2, freeze)

        def estimate_variance(old_fresh_v: Array, m: Array, old_m: Array, v: Array) -> Array:
            """In the warm-up, return v; afterwards, the second moment estimated from the change of the momentum."""
            gradient = (m - b1 * old_m) / (1 - b1)
            return jnp.where(is_frozen, b2 * old_fresh_v + (1 - b2) * gradient**2, v)

        fresh_nu = jax.tree.map(estimate_variance, state.fresh, adam_state.mu, state.mu, adam_state.nu)
        decay_flags = treedef.flatten_up_to(jax.tree.map(lambda _: True, params) if mask is None else mask)
        input_trees = (corrected_mu, corrected_nu, fresh_nu, params, state.ratio, state.factor)
        new_updates, new_mean_ratios, new_factors = [], [], []
        for param_info, is_decayed, m, v, fresh_v, w, old_mean_ratio, old_factor in zip(
            param_infos_of(leaves, updates), decay_flags, *map(treedef.flatten_up_to, input_trees), strict=True
        ):
            adam_step = _direction(m, v, eps)
            u = adam_step + weight_decay * w if is_decayed else adam_step
            trust_ratio = _trust_ratio(w, u, param_info)
            mean_ratio = jnp.where(is_frozen, old_mean_ratio, smooth * old_mean_ratio + (1 - smooth) * trust_ratio)
            corrected_fresh_v = _correct_bias(fresh_v, b2, adam_state.count)
            max_root_ratio = _reduce_tensors(
                (jnp.sqrt(v) + eps) / (jnp.sqrt(corrected_fresh_v) + eps), param_info, jnp.max
            )
            r = jnp.minimum(
                1.0, _norms(adam_step, param_info) / jnp.maximum(_norms(u, param_info), jnp.finfo(jnp.float32).tiny)
            )
            bounded_factor = jnp.clip(r * max_root_ratio + 1 - r, *factors)
            limited_factor = jnp.clip(bounded_factor, (1 - change) * old_factor, (1 + change) * old_factor)
            factor = jnp.where(is_frozen, limited_factor, old_factor)
            # corrects the bias of the running mean of ratios, which started from zero
            corrected_mean_ratio = mean_ratio / (1 - smooth ** jnp.minimum(adam_state.count, freeze))
            is_vector = param_info.kind == "vector"
            update_scale = (
                jnp.ones_like(trust_ratio)
                if is_vector
                else jnp.where(is_frozen, corrected_mean_ratio * factor, trust_ratio)
            )
            new_updates.append(u * update_scale)
            new_mean_ratios.append(mean_ratio)
            new_factors.append(factor)
        new_mean_ratio_tree, new_factor_tree = treedef.unflatten(new_mean_ratios), treedef.unflatten(new_factors)
        return treedef.unflatten(new_updates), OneBitLambState(
            *adam_state, fresh_nu, new_mean_ratio_tree, new_factor_tree
        )

    return optax.chain(optax.GradientTransformation(init, update), optax.scale_by_learning_rate(rate))


def clip_mean_gradients(rule: UpdateRule, messages: Messages) -> UpdateRule:
    """Return a rule that first clips mean gradients to a global norm, and leaves mean momenta unchanged.

    Args:
        rule: `one_bit_adam` or `one_bit_lamb`, or a rule that contains it.
        messages: the replicas' messages, which specify the norm and the freeze step.

    Returns:
        A transformation with the state of `optax.chain(optax.clip_by_global_norm(...), rule)`.
    """
    if messages.clip is None:
        return rule
    clip_rule = optax.clip_by_global_norm(messages.clip)

    def init(params: Any) -> Any:
        return (clip_rule.init(params), rule.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Return the updates of `rule` for the mean messages `updates` after clipping, and the new state."""
        clipped_updates, clip_state = clip_rule.update(updates, state[0], params)
        is_frozen = messages.frozen(state)
        new_updates, rule_state = rule.update(optax.tree.where(is_frozen, updates, clipped_updates), state[1], params)
        return new_updates, (clip_state, rule_state)

    return optax.GradientTransformation(init, update)


def _check_freeze(freeze: int) -> None:
    """Raise UserError if the variance would be frozen before the first update."""
    if freeze < 1:
        raise UserError(f"freeze: got {freeze}, expected 1 or more, because the first update estimates the variance")


def _rule_state(state: Any) -> Any:
    """Return the rule's state from a state that contains it."""

    def is_rule_state(node: Any) -> bool:
        return isinstance(node, OneBitState | OneBitLambState)

    return next(node for node in jax.tree.leaves(state, is_leaf=is_rule_state) if is_rule_state(node))


def _state_and_corrected_moments(
    means: Any, state: Any, b1: float, b2: float, freeze: int
) -> tuple[OneBitState, tuple[Any, Any]]:
    """Return Adam's state after an update, and the bias-corrected pair (first moment, second moment).

    `means` is a tree like the parameters: the mean gradients, or the mean momenta.
    """
    is_frozen, update_count = state.count >= freeze, jnp.asarray(optax.safe_increment(state.count))
    mu = jax.tree.map(
        lambda x, m, v: jnp.where(is_frozen, jnp.where(v > 0, x, 0.0), b1 * m + (1 - b1) * x), means, state.mu, state.nu
    )
    nu = jax.tree.map(lambda x, v: jnp.where(is_frozen, v, b2 * v + (1 - b2) * x**2), means, state.nu)
    corrected_mu = jax.tree.map(lambda m: _correct_bias(m, b1, update_count), mu)
    corrected_nu = jax.tree.map(lambda v: _correct_bias(v, b2, jnp.minimum(update_count, freeze)), nu)
    return OneBitState(update_count, mu, nu), (corrected_mu, corrected_nu)


def _correct_bias(moment: Array, decay: float, update_count: Array) -> Array:
    """Return a moment with Adam's bias correction for `update_count` updates."""
    return moment / (1 - decay ** update_count.astype(jnp.float32))


def _direction(m: Array, v: Array, eps: float) -> Array:
    """Return Adam's update without the learning rate; elements with zero variance get 0."""
    return jnp.where(v > 0, m / (jnp.sqrt(v) + eps), 0.0)


def _reduce_tensors(x: Array, param_info: ParamInfo, reduce: Callable[..., Array]) -> Array:
    """Return `reduce` of each tensor of a leaf, such as each layer; reduced dims remain with size 1."""
    return reduce(x, axis=tuple(range(param_info.stack, x.ndim)), keepdims=True)


def _norms(x: Array, param_info: ParamInfo) -> Array:
    """Return the norm of each tensor of a leaf; the dims of a tensor remain with size 1."""
    return jnp.sqrt(_reduce_tensors(jnp.square(x), param_info, jnp.sum))


def _trust_ratio(w: Array, u: Array, param_info: ParamInfo) -> Array:
    """Return |w| / |u| of each tensor of a leaf; it is 1 if either norm is zero, as in optax."""
    weight_norm, update_norm = _norms(w, param_info), _norms(u, param_info)
    return jnp.where(
        (weight_norm == 0) | (update_norm == 0), 1.0, weight_norm / jnp.where(update_norm == 0, 1.0, update_norm)
    )
