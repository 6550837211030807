"""A rule and a schedule of the user's own: checked where they are called, and tried on one small matrix.

A rule of optax is a pair of functions that may return anything. What it returns is compared with what it was given, and
two updates for a gradient of halves show a learning rate that is not finite, or of the wrong sign.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.errors import UserError
from jaxscale.optim.step_loss import step_loss
from jaxscale.values.user_frames import frames_of, place_of

TRIED_STEPS = 100_000
"""Number of steps at which a schedule is tried before a run."""


def checked(rule: optax.GradientTransformation, custom: Any) -> optax.GradientTransformationExtraArgs:
    """Return a rule that refuses updates and states that are not like the gradients and the state before.

    Args:
        rule: the user's rule.
        custom: the user's function that made it, for messages.
    """
    extended_rule = optax.with_extra_args_support(rule)
    name = f"{place_of(custom)}optimizer.custom"

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        try:
            returned = extended_rule.update(updates, state, params, **extra)
        except UserError:
            raise
        except Exception as error:
            if frames_of(error.__traceback__):  # the message begins with the user's line
                raise
            message = str(error).partition("\n")[0]
            raise UserError(f"{name}: its update raised {type(error).__name__}: {message}") from error
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise UserError(
                f"{name}: its update returned a {type(returned).__name__}, expected the pair (updates, state)"
            )
        new_updates, new_state = returned
        _check_like(f"{name}: its update returned updates", new_updates, "gradients", updates)
        _check_like(f"{name}: its update returned a state", new_state, "the state before", state)
        return new_updates, new_state

    return optax.GradientTransformationExtraArgs(rule.init, update)


def _check_like(start: str, new_tree: Any, old_name: str, old_tree: Any) -> None:
    """Raise UserError if two trees differ in their structure, or in the shapes or kinds of their arrays."""
    if jax.tree.structure(new_tree) != jax.tree.structure(old_tree):
        raise UserError(
            f"{start} of another structure than {old_name}: expected the same dicts and tuples, with an array for each"
        )
    new_leaves, _ = jax.tree.flatten_with_path(new_tree)
    for (path, new), old in zip(new_leaves, jax.tree.leaves(old_tree), strict=True):
        if jnp.shape(new) != jnp.shape(old):
            raise UserError(
                f"{start} of shape {jnp.shape(new)} at {jax.tree_util.keystr(path) or 'its top'}, but {old_name} "
                f"{jnp.shape(old)}: expected equal shapes"
            )
        if jnp.issubdtype(jnp.result_type(new), jnp.floating) != jnp.issubdtype(jnp.result_type(old), jnp.floating):
            raise UserError(
                f"{start} of {jnp.result_type(new)} at {jax.tree_util.keystr(path) or 'its top'}, but {old_name} "
                f"{jnp.result_type(old)}: expected equal types"
            )


def try_rule(
    custom: Callable[[Callable[[Any], Any]], Any], rate: Callable[[Any], Any], rate_fields: Sequence[str] = ()
) -> None:
    """Refuse a rule whose first updates are not finite, and warn of one that goes up the gradient or reads no rate.

    The rule updates weights of ones by gradients of 0.5 and 2, twice. One that needs the model's parameters is not
    tried. Updates in proportion to the gradients are no reason to warn: a rule with `optax.masked` passes them on.

    Args:
        custom: the user's function of a schedule that returns the rule.
        rate: the schedule.
        rate_fields: names of the optimizer's fields of the learning rate that the user set.

    Example:
        >>> try_rule(lambda rate: optax.sgd(lambda step: 0.1 / step), lambda step: 0.1)
        Traceback (most recent call last):
        jaxscale.errors.UserError: optimizer.custom: the first update for gradients of 0.5 is -inf, expected finite \
numbers: is its learning rate finite at step 0?
    """

    rate_calls: list[Any] = []

    def counted_rate(update: Any) -> Any:
        rate_calls.append(None)
        return rate(update)

    @jax.jit
    def two_updates() -> tuple[Any, ...]:
        params: Any = {"weight": jnp.ones((4, 4))}
        gradients: Any = {"weight": jnp.full((4, 4), 0.5).at[2:].set(2.0)}
        rule = optax.with_extra_args_support(custom(counted_rate))
        state, sums, ratios = rule.init(params), [], []
        for _ in range(2):
            updates, state = rule.update(gradients, state, params, value=1.0)
            update: Any = updates["weight"]  # pyright: ignore[reportIndexIssue,reportArgumentType,reportCallIssue]
            sums.append(update.sum())
            ratios.append(update[0, 0] / 0.5 - update[2, 0] / 2.0)
        return (*sums, jnp.abs(jnp.asarray(ratios)).max())

    try:
        with step_loss(1.0), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first, second, ratio_difference = map(float, two_updates())
    except Exception:  # it needs the model's parameters; a mistake in it is reported where the step is traced
        return
    name = f"{place_of(custom)}optimizer.custom"
    for index, total in (("first", first), ("second", second)):
        if not math.isfinite(total):
            raise UserError(
                f"{name}: the {index} update for gradients of 0.5 is {total}, expected finite numbers: is its "
                f"learning rate finite at step {0 if index == 'first' else 1}?"
            )
    if rate_fields and not rate_calls:
        warnings.warn(
            f"{name}: it does not use the learning rate that it is given, so optimizer.{rate_fields[0]} has no effect: "
            f"pass it on, as in lambda rate: optax.adam(rate), or leave {rate_fields[0]} out",
            stacklevel=2,
        )
    is_proportional = ratio_difference < 1e-6 * max(abs(first), abs(second))
    if min(first, second) >= 0 and max(first, second) > 0 and not is_proportional:
        warnings.warn(
            f"{name}: its updates go up the gradient, so the loss grows: is the learning rate negative, or does the "
            "rule lack optax.scale_by_learning_rate(rate)?",
            stacklevel=2,
        )


def try_schedule(schedule: Callable[[Any], Any], steps: int) -> None:
    """Call a schedule of the user's own at some steps of a run, and, if it can be traced, at the first `TRIED_STEPS`.

    Args:
        schedule: function of the number of updates made that returns the learning rate.
        steps: number of updates in the run.

    Raises:
        UserError: it returned something else than a finite number of 0 or more, or 0 alone.

    Example:
        >>> try_schedule(lambda step: 0.5 - step, 10)
        Traceback (most recent call last):
        jaxscale.errors.UserError: optimizer.schedule: returned -0.5 at step 1, expected a number of 0 or more
    """
    tried_steps, rates = sorted({0, min(1, steps - 1), steps // 2, steps - 1}), []
    for step in tried_steps:
        rate: Any = schedule(jnp.int32(step))
        dtype = getattr(rate, "dtype", None)
        is_array = dtype is not None and not jnp.ndim(rate) and _is_real(dtype)
        is_number = is_array or (isinstance(rate, int | float) and not isinstance(rate, bool))
        number = float(rate) if is_number else math.nan
        if not 0 <= number < math.inf:
            rate_text = f"{number:.4g}" if is_array else f"{rate!r:.100}"
            raise _bad_rate(schedule, rate_text, step)
        rates.append(number)
    if not any(rates):
        raise UserError(
            f"{place_of(schedule)}optimizer.schedule: returned 0 at the steps {', '.join(map(str, tried_steps))}, so "
            "nothing would be trained: expected learning rates above 0"
        )
    try:
        all_rates = jax.vmap(lambda step: jnp.asarray(schedule(step), jnp.float32))(jnp.arange(min(steps, TRIED_STEPS)))
    except Exception:  # a mistake under a trace is reported where the step is traced
        return
    if all_rates.ndim == 1 and not (is_right := (all_rates >= 0) & (all_rates < jnp.inf)).all():
        step = int(jnp.argmin(is_right))
        raise _bad_rate(schedule, f"{float(all_rates[step]):.4g}", step)


def _is_real(dtype: Any) -> bool:
    """Return whether a dtype is one of integers or of real numbers, rather than of booleans, texts or keys."""
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.integer, jnp.floating))


def _bad_rate(schedule: Callable[[Any], Any], rate_text: str, step: int) -> UserError:
    """Return the error for what a schedule returned at a step."""
    return UserError(
        f"{place_of(schedule)}optimizer.schedule: returned {rate_text} at step {step}, expected a number of 0 or more"
    )
