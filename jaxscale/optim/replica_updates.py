"""1-bit Adam and 1-bit LAMB for custom training loops, as a rule that takes the gradients of one replica."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxscale.optim.leaves import ParamInfo, param_infos_of
from jaxscale.optim.one_bit import Messages
from jaxscale.optim.per_layer import UpdateRule
from jaxscale.replicas.codec import Codec


class OverReplicasState(NamedTuple):
    """State of a replica.

    Args:
        rule: the rule's state, equal on all replicas.
        codec_states: the codec's state for each parameter, in order; an empty dict for a parameter with an exact mean.
    """

    rule: Any
    codec_states: tuple[Any, ...]


def over_replicas(
    rule: UpdateRule,
    messages: Messages,
    codec: Codec,
    axis: str,
    replicas: int,
    *,
    leaves: Any = None,
    small: int = 256,
) -> UpdateRule:
    """Return a rule for the gradients of one replica, inside a `jax.shard_map` or `jax.vmap` over the replicas' axis.

    Our train step uses `replicas.reduce.GradientExchange` for this, which also supports replicas of several devices.

    Args:
        rule: `one_bit_adam` or `one_bit_lamb`.
        messages: the replicas' messages, with the rule's b1 and freeze step.
        codec: codec that averages momenta; it must make no random draws. In the warm-up, means are exact.
        axis: name of the replicas' axis.
        replicas: number of replicas.
        leaves: tree of `ParamInfo` like the parameters; the codec averages each layer of a stack separately.
        small: number of elements below which a layer has an exact mean; gains and biases always have an exact mean.

    Example:
        >>> from jaxscale.optim.one_bit import one_bit_adam
        >>> from jaxscale.replicas import OneBit
        >>> rule = over_replicas(one_bit_adam(0.1, 1), Messages(0.9, 1), OneBit(), "r", 2)
        >>> params = {"w": jnp.ones((16, 16))}
        >>> gradients = {"w": jnp.stack([jnp.ones((16, 16)), jnp.zeros((16, 16))])}
        >>> step = jax.vmap(lambda g: rule.update(g, rule.init(params), params)[0], axis_name="r")
        >>> print(step(gradients)["w"][:, 0, 0].round(3))
        [-0.1 -0.1]
    """

    def uses_codec(param_info: ParamInfo) -> bool:
        """Return whether the codec averages this parameter; all other parameters have exact means."""
        return param_info.kind != "vector" and param_info.rows * param_info.columns >= small

    def init(params: Any) -> OverReplicasState:
        """Return a replica's initial state."""
        codec_states = (
            codec.init(param_info.shape, None, replicas, layers=param_info.stack > 0) if uses_codec(param_info) else {}
            for param_info in param_infos_of(leaves, params)
        )
        return OverReplicasState(rule.init(params), tuple(codec_states))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, OverReplicasState]:
        """Return the updates, equal on all replicas, for this replica's gradients `updates`, and the new state."""
        message_tree, gradient_norm, is_frozen = messages(updates, state.rule)
        # one replica's NaN would stay in the residuals of the others
        is_finite = jnp.isfinite(lax.psum(gradient_norm, axis))
        update_count, treedef = messages.count(state.rule), jax.tree.structure(updates)
        means, new_codec_states = [], []
        param_infos, leaf_messages = param_infos_of(leaves, updates), jax.tree.leaves(message_tree)
        for param_info, message, old_state in zip(param_infos, leaf_messages, state.codec_states, strict=True):
            mean, new_state = lax.pmean(message, axis), old_state
            if uses_codec(param_info):
                coded_mean, new_state = codec.reduce(
                    message, old_state, axis, None, update_count, layers=param_info.stack > 0
                )
                mean = jnp.where(is_frozen, coded_mean, mean)
            means.append(jnp.where(is_finite, mean, jnp.nan))
            new_codec_states.append(optax.tree.where(is_finite & is_frozen, new_state, old_state))
        new_updates, rule_state = rule.update(treedef.unflatten(means), state.rule, params)
        return new_updates, OverReplicasState(rule_state, tuple(new_codec_states))

    return optax.GradientTransformation(init, update)
