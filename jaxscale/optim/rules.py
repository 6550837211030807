"""The update rules that `Optimizer` names, as data: options with their defaults, and a function that builds the rule.

A new rule is a function in this module and a row of `RULES`. Each function imports optax in its body, so that options
are checked before JAX is imported.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxscale.errors import UserError, near_miss

Rate = Callable[[Any], Any]
UpdateUnit = Literal["ones", "gradients", "weights"]
"""Size of a rule's update at learning rate 1: 1 per element, or the size of the gradients, or that of the weights."""


@dataclasses.dataclass(frozen=True)
class RuleSettings:
    """Inputs of a function that builds a rule.

    Args:
        name: name of the rule, a key of `RULES`.
        rate: learning rate as a function of the number of updates made.
        options: value of each option of the rule.
        param_info_tree: tree of `jaxscale.optim.leaves.ParamInfo` like the parameters; `None` derives the tree from
            shapes and paths.
        mask: tree of bools like the parameters, true where weight decay applies; `None` decays all parameters.
        steps: number of updates in the run.
    """

    name: str
    rate: Rate
    options: Mapping[str, Any]
    param_info_tree: Any
    mask: Any
    steps: int


@dataclasses.dataclass(frozen=True)
class RuleEntry:
    """An entry of `RULES`: how to build an update rule, and its options.

    Args:
        make: function that builds the rule's optax transformation.
        defaults: default value of each option of the rule; options are fields of `Optimizer`.
        schedule: name of the default schedule of the learning rate.
        schedule_names: names of the schedules that the rule accepts.
        takes_mean_messages: whether the rule takes the mean of the replicas' `one_bit.Messages`, and so needs several
            replicas.
        update_unit: approximate size of an update at learning rate 1, without weight decay.
        is_bounded: whether the rule's definition limits the update to a few dozen times `update_unit`, given finite
            gradients and a positive `eps`.
    """

    make: Callable[[RuleSettings], Any]
    defaults: Mapping[str, Any]
    schedule: str = "cosine"
    schedule_names: tuple[str, ...] = ("cosine", "linear", "constant")
    takes_mean_messages: bool = False
    update_unit: UpdateUnit = "ones"
    is_bounded: bool = False

    def options(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the value of every option of the rule, by name; options that are not set have their defaults.

        Args:
            name: name of the rule, for messages.
            settings: values of options by name; an option with the value `None` is not set.

        Raises:
            UserError: an option that the rule does not have is set.

        Example:
            >>> RULES["sgd"].options("sgd", {"momentum": 0.9, "b1": None})
            {'momentum': 0.9, 'weight_decay': 0.1}
        """
        set_option_values = {option: setting for option, setting in settings.items() if setting is not None}
        for option, setting in set_option_values.items():
            if option not in self.defaults:
                raise UserError(
                    f"optimizer.{option}: got {setting!r}, but {name} has no such option: leave it out, or set one of "
                    f"{', '.join(self.defaults)}{near_miss(option, self.defaults)}"
                )
        return {**self.defaults, **set_option_values}


def _optax_function(name: str) -> Callable[..., Any]:
    """Return the function of `optax` or `optax.contrib` that builds the rule with this name."""
    import optax
    from optax import contrib

    return getattr(optax if hasattr(optax, name) else contrib, name)


def _build_with_mask(settings: RuleSettings) -> Any:
    """Build a rule of optax that has weight decay and a mask for it."""
    return _optax_function(settings.name)(settings.rate, **settings.options, mask=settings.mask)


def _build_with_decay(settings: RuleSettings) -> Any:
    """Build a rule of optax that has no weight decay, followed by decoupled weight decay."""
    import optax

    options = {option: setting for option, setting in settings.options.items() if option != "weight_decay"}
    if settings.name == "sgd":
        options["momentum"] = options["momentum"] or None  # a momentum of 0 has no state
    rule = _optax_function(settings.name)(settings.rate, **options)
    return optax.chain(rule, decoupled_decay(settings.rate, settings.options["weight_decay"], settings.mask))


def _build_schedule_free(settings: RuleSettings) -> Any:
    """Build the rule of `optax.contrib.schedule_free_adamw` with a mask for weight decay."""
    import optax
    from optax import contrib

    b2, eps = settings.options["b2"], settings.options["eps"]
    base_rule = optax.chain(
        optax.scale_by_rms(decay=b2, eps=eps, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(settings.options["weight_decay"], mask=settings.mask),
        optax.scale_by_learning_rate(settings.rate),
    )
    return contrib.schedule_free(base_rule, settings.rate, b1=settings.options["b1"])


def _build_by_layer(settings: RuleSettings) -> Any:
    """Build a rule of this package that treats each layer of a stack separately."""
    module_name = "large_batch" if settings.name in ("lars", "lamb") else f"matrix.{settings.name}"
    build_rule = getattr(importlib.import_module(f"jaxscale.optim.{module_name}"), settings.name)
    return build_rule(settings.rate, leaves=settings.param_info_tree, mask=settings.mask, **settings.options)


def _build_one_bit(settings: RuleSettings) -> Any:
    """Build 1-bit Adam or 1-bit LAMB; a freeze step that is a share of the run becomes a number of updates."""
    from jaxscale.optim import one_bit

    options = {**settings.options, "freeze": freeze_step(settings.options["freeze"], settings.steps)}
    if settings.name == "one_bit_lamb":
        options["leaves"] = settings.param_info_tree
    return getattr(one_bit, settings.name)(settings.rate, **options, mask=settings.mask)


_ADAM_DEFAULTS = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

RULES: Mapping[str, RuleEntry] = {
    # Loshchilov & Hutter 2019
    "adamw": RuleEntry(_build_with_mask, _ADAM_DEFAULTS, is_bounded=True),
    # Dozat 2016, with AdamW's decay
    "nadamw": RuleEntry(_build_with_mask, _ADAM_DEFAULTS, is_bounded=True),
    # Xie et al. 2022, arXiv 2208.06677
    "adan": RuleEntry(_build_with_mask, {"b1": 0.98, "b2": 0.92, "b3": 0.99, "eps": 1e-8, "weight_decay": 0.1}),
    # Pagliardini et al. 2024, arXiv 2409.03137
    "ademamix": RuleEntry(
        _build_with_mask, {"b1": 0.9, "b2": 0.999, "b3": 0.9999, "alpha": 5.0, "eps": 1e-8, "weight_decay": 0.1}
    ),
    # Taniguchi et al. 2024, arXiv 2411.02853
    "adopt": RuleEntry(_build_with_decay, {"b1": 0.9, "b2": 0.9999, "eps": 1e-6, "weight_decay": 0.1}),
    # Chen et al. 2023, arXiv 2302.06675
    "lion": RuleEntry(_build_with_mask, {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1}, is_bounded=True),
    "sgd": RuleEntry(
        _build_with_decay, {"momentum": 0.0, "weight_decay": 0.1}, update_unit="gradients", is_bounded=True
    ),
    # Shazeer & Stern 2018, arXiv 1804.04235
    "adafactor": RuleEntry(_build_with_decay, {"weight_decay": 0.1}, update_unit="weights"),
    # Defazio et al. 2024, arXiv 2405.15682
    "schedule_free": RuleEntry(_build_schedule_free, _ADAM_DEFAULTS, schedule="constant", schedule_names=("constant",)),
    # You et al. 2017, arXiv 1708.03888
    "lars": RuleEntry(_build_by_layer, {"momentum": 0.9, "trust": 0.02, "weight_decay": 1e-4}, update_unit="weights"),
    # You et al. 2020, arXiv 1904.00962
    "lamb": RuleEntry(
        _build_by_layer,
        {"b1": 0.9, "b2": 0.999, "eps": 1e-6, "weight_decay": 0.01},
        update_unit="weights",
        is_bounded=True,
    ),
    # Tang et al. 2021, arXiv 2102.02888
    "one_bit_adam": RuleEntry(_build_one_bit, {**_ADAM_DEFAULTS, "freeze": 0.25}, takes_mean_messages=True),
    # Li et al. 2021, arXiv 2104.06069
    "one_bit_lamb": RuleEntry(
        _build_one_bit,
        {"b1": 0.9, "b2": 0.999, "eps": 1e-6, "freeze": 0.25, "weight_decay": 0.01},
        takes_mean_messages=True,
        update_unit="weights",
    ),
    # Jordan et al. 2024, and Liu et al. 2025, arXiv 2502.16982
    "muon": RuleEntry(
        _build_by_layer, {"momentum": 0.95, "scale": "moonshot", "precision": "bfloat16", **_ADAM_DEFAULTS}
    ),
    # Vyas et al. 2024, arXiv 2409.11321
    "soap": RuleEntry(
        _build_by_layer, {"b1": 0.95, "b2": 0.95, "eps": 1e-8, "every": 10, "max_dim": 10_000, "weight_decay": 0.1}
    ),
    # Zhao et al. 2024, arXiv 2403.03507
    "galore": RuleEntry(_build_by_layer, {**_ADAM_DEFAULTS, "rank": 128, "every": 200}),
}


def freeze_step(freeze: float, steps: int) -> int:
    """Return the number of updates before a variance is frozen.

    Args:
        freeze: number of updates; a value below 1 is a share of the run's updates.
        steps: number of updates in the run.

    Example:
        >>> freeze_step(0.25, 400), freeze_step(30, 400), freeze_step(0.25, 3)
        (100, 30, 1)
    """
    return int(freeze) if freeze >= 1 else max(round(freeze * steps), 1)


def decoupled_decay(rate: Rate, decay: float, mask: Any) -> Any:
    """Return the transformation that subtracts `rate * decay` times each weight from the weight's update.

    Args:
        rate: learning rate as a function of the number of updates made.
        decay: factor of weight decay.
        mask: tree of bools like the parameters, true where weight decay applies; `None` decays all parameters.
    """
    import jax
    import jax.numpy as jnp
    import optax

    if not decay:
        return optax.identity()

    def init(params: Any) -> Any:
        return optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Return `updates` minus the decay, and the new state."""
        factor = decay * rate(state.count)
        decay_flags = jax.tree.map(lambda _: True, params) if mask is None else mask
        new_updates = jax.tree.map(
            lambda u, w, is_decayed: u - factor * w if is_decayed else u, updates, params, decay_flags
        )
        return new_updates, optax.ScaleByScheduleState(count=optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)
