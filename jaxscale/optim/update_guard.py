"""UpdateGuard: the verdict on an update before it is applied, from the norms of the update u and of the parameters p.

    sum(u^2) <= bound^2 max(sum(p^2), floor^2 n),    n the number of trained numbers

A step is first judged by its loss and its gradients (`Watch.judge`). Both may be finite while the update is not, as
with a learning rate of 1e30. To judge an update itself, gradients, state and parameters are read once more. So two
kinds of updates are judged by an estimate of their size, the learning rate times the size of an update of that rule at
rate 1 (`optim/rules.py`): those of a rule that bounds its updates, and those that are never whole on the device (of a
fused kernel, in slices, or on the host).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import optax

from jaxscale.optim.rules import UpdateUnit
from jaxscale.typing import Array, Bool, Float, Params

ZERO_RMS = 0.01
"""Floor of the parameters' root mean square in the condition, so that parameters that start from zero can change."""
GuardedAdvance: TypeAlias = Callable[
    [Params, optax.OptState, Params, Array, Bool[Array, ""]], tuple[Params, optax.OptState, Bool[Array, ""]]
]
"""One step of an optimizer, `(gradients, state, params, norm, is_good) -> (params, state, is_good)`.

The returned `is_good` is whether the step was applied. If it is false, parameters and state are returned unchanged.
"""


@dataclasses.dataclass(frozen=True)
class RateEstimate:
    """The inputs of the estimate of an update's size, for one group of parameters.

    Args:
        rate: the learning rate.
        unit: size of an update at rate 1; `None` assumes the smaller of "ones" and "gradients".
        params: the parameters of the group.
        decay: factor of the decoupled weight decay.
    """

    rate: Float[Array, ""]
    unit: UpdateUnit | None
    params: Params
    decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class UpdateGuard:
    """The condition under which an update is applied.

    Args:
        bound: largest root mean square of an update, divided by that of the parameters. If 0, an update needs only a
            finite sum of squares.
        axes: mesh axes over which the sums of squares are added, inside a region that is manual over these axes.

    Example:
        >>> guard, params = UpdateGuard(100.0), {"w": jnp.full(4, 0.5)}
        >>> [bool(guard.allows({"w": jnp.full(4, update)}, params)) for update in (-40.0, 60.0, jnp.nan)]
        [True, False, False]
    """

    bound: float
    axes: tuple[str, ...] = ()

    def allows(self, updates: Params, params: Params) -> Bool[Array, ""]:
        """Return whether updates may be applied to parameters; the result is equal on every device."""
        squares_and_count = _square_sum(updates), _square_sum(params), _number_count(params)
        if self.axes:
            squares_and_count = jax.lax.psum(squares_and_count, self.axes)
        return self._allows_squares(*squares_and_count)

    def allows_rate(
        self,
        rate: Float[Array, ""],
        unit: UpdateUnit | None,
        gradient_norm: Float[Array, ""],
        params: Params,
        *,
        decay: float = 0.0,
        are_params_read: bool = True,
    ) -> Bool[Array, ""]:
        """Return whether updates at a learning rate may be applied, by their estimated size.

            sum(u^2) = rate^2 (sum of the squares of an update at rate 1 + decay^2 sum(p^2))

        Args:
            rate: the learning rate.
            unit: size of an update at rate 1; `None` assumes the smaller of "ones" and "gradients".
            gradient_norm: global norm of the gradients that the rule receives.
            params: the parameters.
            decay: factor of the decoupled weight decay.
            are_params_read: whether to read the parameters. If false, each of their elements counts as `ZERO_RMS`.

        Example:
            >>> guard, params, norm = UpdateGuard(100.0), {"w": jnp.full(4, 0.5)}, jnp.float32(0.2)
            >>> [bool(guard.allows_rate(jnp.float32(rate), "ones", norm, params)) for rate in (40.0, 60.0)]
            [True, False]
        """
        estimate = RateEstimate(rate, unit, params, decay)
        return self.allows_rates([estimate], gradient_norm, are_params_read=are_params_read)

    def allows_rates(
        self, estimates: Sequence[RateEstimate], gradient_norm: Float[Array, ""], *, are_params_read: bool = True
    ) -> Bool[Array, ""]:
        """Return whether updates of several groups of parameters may be applied, by the sum of their estimates.

        Args:
            estimates: the learning rate and the parameters of each group.
            gradient_norm: global norm of the gradients that the rules receive; it bounds the norm of each group's
                gradients.
            are_params_read: whether to read the parameters, as in `allows_rate`.

        Example:
            >>> guard, params, rate = UpdateGuard(100.0), {"w": jnp.full(4, 0.5)}, jnp.float32(60.0)
            >>> estimates = [RateEstimate(rate, "ones", params), RateEstimate(rate * 0.0, "ones", params)]
            >>> [bool(guard.allows_rates(chosen, jnp.float32(0.2))) for chosen in (estimates, estimates[:1])]
            [True, False]
        """
        update_squares, param_squares, number_count = (jnp.zeros((), jnp.float32) for _ in range(3))
        for estimate in estimates:
            own_count = _number_count(estimate.params)
            floor = ZERO_RMS**2 * own_count
            own_squares = _square_sum(estimate.params) if are_params_read else floor
            squares_by_unit: dict[UpdateUnit | None, Float[Array, ""]] = {
                "ones": own_count,
                "gradients": jnp.square(gradient_norm),
                "weights": jnp.maximum(own_squares, floor),
                None: jnp.minimum(own_count, jnp.square(gradient_norm)),
            }
            squares_at_rate_one = squares_by_unit[estimate.unit] + jnp.square(jnp.float32(estimate.decay)) * own_squares
            update_squares += jnp.square(estimate.rate) * squares_at_rate_one
            param_squares, number_count = param_squares + own_squares, number_count + own_count
        return self._allows_squares(update_squares, param_squares, number_count)

    def _allows_squares(
        self, update_squares: Float[Array, ""], param_squares: Float[Array, ""], number_count: Float[Array, ""]
    ) -> Bool[Array, ""]:
        """Return whether an update of `number_count` elements with this sum of squares is allowed."""
        is_allowed = jnp.isfinite(update_squares)
        if self.bound > 0:
            max_squares = jnp.square(jnp.float32(self.bound)) * jnp.maximum(param_squares, ZERO_RMS**2 * number_count)
            is_allowed &= update_squares <= max_squares
        return is_allowed


def guarded_advance(optimizer: optax.GradientTransformation, guard: UpdateGuard) -> GuardedAdvance:
    """Return the step that applies an optax transformation to whole trees on the device, if the update is allowed.

    Args:
        optimizer: optax transformation that includes clipping.
        guard: the condition on the update.
    """

    def advance(
        gradients: Params, state: optax.OptState, params: Params, norm: Array, is_good: Bool[Array, ""]
    ) -> tuple[Params, optax.OptState, Bool[Array, ""]]:
        updates, new_state = optimizer.update(gradients, state, params)
        is_good &= guard.allows(cast(Params, updates), params)
        new_params, new_state = optax.tree.where(
            is_good, (optax.apply_updates(params, updates), new_state), (params, state)
        )
        return new_params, new_state, is_good

    return advance


def _number_count(tree: Params) -> Float[Array, ""]:
    """Return the number of array elements in a tree, in float32."""
    return jnp.float32(sum(leaf.size for leaf in jax.tree.leaves(tree)))


def _square_sum(tree: Params) -> Float[Array, ""]:
    """Return the sum of the squares of all elements of a tree, in float32."""
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    return jnp.sum(jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in leaves]))
