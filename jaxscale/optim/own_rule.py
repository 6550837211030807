"""Checks of a user's own rule and schedule: at every call, and by a trial on a small matrix before the run.

A rule of optax is a pair of functions that may return anything. At every call, the returned updates are compared with
the gradients, and the returned state with the state before. Two updates of a small matrix reveal a learning rate that
is not finite or has the wrong sign.
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
from jaxscale.values.user_frames import frames_and_lines_of, place_of

TRIED_STEPS = 100_000
"""Number of steps at which a schedule is tried before a run."""


def with_update_checks(rule: optax.GradientTransformation, custom: Any) -> optax.GradientTransformationExtraArgs:
    """Return the rule with checks that its updates are like the gradients, and its new state like the old one.

    Args:
        rule: the user's rule.
        custom: the user's function that returned the rule, for messages.
    """
    extended_rule = optax.with_extra_args_support(rule)
    rule_text = f"{place_of(custom)}optimizer.custom"

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        try:
            returned_object = extended_rule.update(updates, state, params, **extra)
        except UserError:
            raise
        except Exception as error:
            if frames_and_lines_of(error.__traceback__):  # the message begins with the user's line
                raise
            message = str(error).partition("\n")[0]
            raise UserError(f"{rule_text}: its update raised {type(error).__name__}: {message}") from error
        if not isinstance(returned_object, tuple) or len(returned_object) != 2:
            raise UserError(
                f"{rule_text}: its update returned a {type(returned_object).__name__}, expected the pair (updates, "
                "state)"
            )
        new_updates, new_state = returned_object
        _check_like(f"{rule_text}: its update returned updates", new_updates, "gradients", updates)
        _check_like(f"{rule_text}: its update returned a state", new_state, "the state before", state)
        return new_updates, new_state

    return optax.GradientTransformationExtraArgs(rule.init, update)


def _check_like(message_start: str, new_tree: Any, old_name: str, old_tree: Any) -> None:
    """Raise UserError if two trees differ in their structure, or in the shapes or kinds of their arrays."""
    if jax.tree.structure(new_tree) != jax.tree.structure(old_tree):
        raise UserError(
            f"{message_start} of another structure than {old_name}: expected the same dicts and tuples, with an array "
            "for each"
        )
    paths_and_new_leaves, _ = jax.tree.flatten_with_path(new_tree)
    for (path, new_leaf), old_leaf in zip(paths_and_new_leaves, jax.tree.leaves(old_tree), strict=True):
        if jnp.shape(new_leaf) != jnp.shape(old_leaf):
            raise UserError(
                f"{message_start} of shape {jnp.shape(new_leaf)} at {jax.tree_util.keystr(path) or 'its top'}, but "
                f"{old_name} {jnp.shape(old_leaf)}: expected equal shapes"
            )
        if jnp.issubdtype(jnp.result_type(new_leaf), jnp.floating) != jnp.issubdtype(
            jnp.result_type(old_leaf), jnp.floating
        ):
            raise UserError(
                f"{message_start} of {jnp.result_type(new_leaf)} at {jax.tree_util.keystr(path) or 'its top'}, but "
                f"{old_name} {jnp.result_type(old_leaf)}: expected equal types"
            )


def try_rule(
    custom: Callable[[Callable[[Any], Any]], Any], rate: Callable[[Any], Any], rate_field_names: Sequence[str] = ()
) -> None:
    """Refuse a rule whose first updates are not finite; warn if its updates go up the gradient, or ignore the rate.

    The rule is tried for two updates on weights of 1, with gradients of 0.5 and 2. A rule that needs the model's
    parameters is not tried. Updates proportional to the gradients cause no warning, because `optax.masked` returns some
    gradients unchanged.

    Args:
        custom: the user's function, which takes a schedule and returns the rule.
        rate: the schedule.
        rate_field_names: names of those fields of the optimizer that set the learning rate and that the user set.

    Example:
        >>> try_rule(lambda rate: optax.sgd(lambda step: 0.1 / step), lambda step: 0.1)
        Traceback (most recent call last):
        jaxscale.errors.UserError: optimizer.custom: the first update for gradients of 0.5 is -inf, expected finite \
numbers: is its learning rate finite at step 0?
    """

    rate_calls: list[Any] = []

    def counted_rate(update_count: Any) -> Any:
        rate_calls.append(None)
        return rate(update_count)

    @jax.jit
    def try_two_updates() -> tuple[Any, ...]:
        params: Any = {"weight": jnp.ones((4, 4))}
        gradients: Any = {"weight": jnp.full((4, 4), 0.5).at[2:].set(2.0)}
        rule = optax.with_extra_args_support(custom(counted_rate))
        state, update_sums, ratio_differences = rule.init(params), [], []
        for _ in range(2):
            updates, state = rule.update(gradients, state, params, value=1.0)
            weight_update: Any = updates["weight"]  # pyright: ignore[reportIndexIssue,reportArgumentType,reportCallIssue]
            update_sums.append(weight_update.sum())
            ratio_differences.append(weight_update[0, 0] / 0.5 - weight_update[2, 0] / 2.0)
        return (*update_sums, jnp.abs(jnp.asarray(ratio_differences)).max())

    try:
        with step_loss(1.0), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first_sum, second_sum, max_ratio_difference = map(float, try_two_updates())
    except Exception:  # the rule needs the model's parameters; a mistake in it is reported when the step is traced
        return
    rule_text = f"{place_of(custom)}optimizer.custom"
    for ordinal, update_sum in (("first", first_sum), ("second", second_sum)):
        if not math.isfinite(update_sum):
            raise UserError(
                f"{rule_text}: the {ordinal} update for gradients of 0.5 is {update_sum}, expected finite numbers: is "
                f"its learning rate finite at step {0 if ordinal == 'first' else 1}?"
            )
    if rate_field_names and not rate_calls:
        warnings.warn(
            f"{rule_text}: it does not use the learning rate that it is given, so optimizer.{rate_field_names[0]} has "
            f"no effect: pass it on, as in lambda rate: optax.adam(rate), or leave {rate_field_names[0]} out",
            stacklevel=2,
        )
    is_proportional = max_ratio_difference < 1e-6 * max(abs(first_sum), abs(second_sum))
    if min(first_sum, second_sum) >= 0 and max(first_sum, second_sum) > 0 and not is_proportional:
        warnings.warn(
            f"{rule_text}: its updates go up the gradient, so the loss grows: is the learning rate negative, or does "
            "the rule lack optax.scale_by_learning_rate(rate)?",
            stacklevel=2,
        )


def try_schedule(schedule: Callable[[Any], Any], steps: int) -> None:
    """Check the rates of a user's own schedule at the first two, the middle and the last step of a run.

    If the schedule can be traced, the rates of the first `TRIED_STEPS` steps are checked, too.

    Args:
        schedule: function of the number of updates made that returns the learning rate.
        steps: number of updates in the run.

    Raises:
        UserError: a rate is not a finite number of 0 or more, or all rates are 0.

    Example:
        >>> try_schedule(lambda step: 0.5 - step, 10)
        Traceback (most recent call last):
        jaxscale.errors.UserError: optimizer.schedule: returned -0.5 at step 1, expected a number of 0 or more
    """
    tried_steps, rate_numbers = sorted({0, min(1, steps - 1), steps // 2, steps - 1}), []
    for step in tried_steps:
        rate: Any = schedule(jnp.int32(step))
        dtype = getattr(rate, "dtype", None)
        is_array = dtype is not None and not jnp.ndim(rate) and _is_real_dtype(dtype)
        is_number = is_array or (isinstance(rate, int | float) and not isinstance(rate, bool))
        rate_number = float(rate) if is_number else math.nan
        if not 0 <= rate_number < math.inf:
            rate_text = f"{rate_number:.4g}" if is_array else f"{rate!r:.100}"
            raise _rate_error(schedule, rate_text, step)
        rate_numbers.append(rate_number)
    if not any(rate_numbers):
        raise UserError(
            f"{place_of(schedule)}optimizer.schedule: returned 0 at the steps {', '.join(map(str, tried_steps))}, so "
            "nothing would be trained: expected learning rates above 0"
        )
    try:
        first_rates = jax.vmap(lambda step: jnp.asarray(schedule(step), jnp.float32))(
            jnp.arange(min(steps, TRIED_STEPS))
        )
    except Exception:  # a mistake under a trace is reported where the step is traced
        return
    if first_rates.ndim == 1 and not (are_right := (first_rates >= 0) & (first_rates < jnp.inf)).all():
        step = int(jnp.argmin(are_right))
        raise _rate_error(schedule, f"{float(first_rates[step]):.4g}", step)


def _is_real_dtype(dtype: Any) -> bool:
    """Return whether a dtype holds integers or real numbers, rather than booleans, texts or random keys."""
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.integer, jnp.floating))


def _rate_error(schedule: Callable[[Any], Any], rate_text: str, step: int) -> UserError:
    """Return the error for an invalid learning rate that a schedule returned at a step."""
    return UserError(
        f"{place_of(schedule)}optimizer.schedule: returned {rate_text} at step {step}, expected a number of 0 or more"
    )
