"""The update rules that `Optimizer` names, as data: the options of each, with defaults, and a function that builds its
optax transformation. A new rule is a function here and a row of `RULES`.

Each function imports optax itself: options are checked before JAX is imported.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxscale.errors import UserError, near_miss

Rate = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class RuleSettings:
    """Inputs of a function that builds a rule.

    Args:
        rate: learning rate by the number of updates made.
        options: value of each option of the rule.
        leaves: tree of `jaxscale.optim.leaves.Leaf` like the parameters; `None` judges by shapes.
        mask: tree of bools like the parameters, true where weight decay applies; `None` decays all.
        steps: updates of the run.
    """

    rate: Rate
    options: Mapping[str, Any]
    leaves: Any
    mask: Any
    steps: int

    def __call__(self, *names: str) -> dict[str, Any]:
        """The options of these names."""
        return {name: self.options[name] for name in names}


@dataclasses.dataclass(frozen=True)
class UpdateRule:
    """An update rule by name.

    Args:
        make: builds its optax transformation.
        defaults: its options, fields of `Optimizer`, and their default values.
        schedule: default schedule of the learning rate.
        schedules: schedules that it accepts.
        over_replicas: it takes the mean of the replicas' messages, `one_bit.Messages`, and needs several replicas.
    """

    make: Callable[[RuleSettings], Any]
    defaults: Mapping[str, Any]
    schedule: str = "cosine"
    schedules: tuple[str, ...] = ("cosine", "linear", "constant")
    over_replicas: bool = False

    def options(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Every option of the rule: the set values, and defaults for the others.

        Args:
            name: of the rule, for messages.
            settings: values of fields; `None` is not set.

        Raises:
            UserError: a set option that the rule does not have.

        Example:
            >>> RULES["sgd"].options("sgd", {"momentum": 0.9, "b1": None})
            {'momentum': 0.9, 'weight_decay': 0.1}
        """
        for option, value in settings.items():
            if value is not None and option not in self.defaults:
                raise UserError(
                    f"optimizer.{option}: {name} has none, got {value!r}: leave it out, or none; {name} takes "
                    f"{', '.join(self.defaults)}{near_miss(option, self.defaults)}"
                )
        return {
            option: default if settings.get(option) is None else settings[option]
            for option, default in self.defaults.items()
        }


def _adam(settings: RuleSettings, make: str = "adamw") -> Any:
    import optax

    options = settings("b1", "b2", "eps", "weight_decay")
    return getattr(optax, make)(settings.rate, **options, mask=settings.mask)


def _adan(settings: RuleSettings) -> Any:
    import optax

    return optax.adan(settings.rate, **settings("b1", "b2", "b3", "eps", "weight_decay"), mask=settings.mask)


def _lion(settings: RuleSettings) -> Any:
    import optax

    return optax.lion(settings.rate, **settings("b1", "b2", "weight_decay"), mask=settings.mask)


def _ademamix(settings: RuleSettings) -> Any:
    from optax import contrib

    options = settings("b1", "b2", "b3", "alpha", "eps", "weight_decay")
    return contrib.ademamix(settings.rate, **options, mask=settings.mask)


def _adopt(settings: RuleSettings) -> Any:
    import optax
    from optax import contrib

    return optax.chain(contrib.adopt(settings.rate, **settings("b1", "b2", "eps")), _decay(settings))


def _sgd(settings: RuleSettings) -> Any:
    import optax

    return optax.chain(optax.sgd(settings.rate, momentum=settings.options["momentum"] or None), _decay(settings))


def _adafactor(settings: RuleSettings) -> Any:
    import optax

    return optax.chain(optax.adafactor(settings.rate), _decay(settings))


def _schedule_free(settings: RuleSettings) -> Any:
    """`optax.contrib.schedule_free_adamw` with a decay mask."""
    import optax
    from optax import contrib

    b2, eps = settings.options["b2"], settings.options["eps"]
    inner = optax.chain(
        optax.scale_by_rms(decay=b2, eps=eps, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(settings.options["weight_decay"], mask=settings.mask),
        optax.scale_by_learning_rate(settings.rate),
    )
    return contrib.schedule_free(inner, settings.rate, b1=settings.options["b1"])


def _large_batch(settings: RuleSettings, make: str) -> Any:
    from jaxscale.optim import large_batch

    return getattr(large_batch, make)(settings.rate, leaves=settings.leaves, mask=settings.mask, **settings.options)


def _one_bit(settings: RuleSettings, make: str) -> Any:
    from jaxscale.optim import one_bit

    options = {name: value for name, value in settings.options.items() if name != "freeze"}
    if make == "one_bit_lamb":
        options["leaves"] = settings.leaves
    freeze = freeze_step(settings.options["freeze"], settings.steps)
    return getattr(one_bit, make)(settings.rate, freeze, **options, mask=settings.mask)


def _muon(settings: RuleSettings) -> Any:
    from jaxscale.optim.muon import muon

    return muon(settings.rate, leaves=settings.leaves, mask=settings.mask, **settings.options)


def _soap(settings: RuleSettings) -> Any:
    from jaxscale.optim.soap import soap

    return soap(settings.rate, leaves=settings.leaves, mask=settings.mask, **settings.options)


def _galore(settings: RuleSettings) -> Any:
    from jaxscale.optim.galore import galore

    return galore(settings.rate, leaves=settings.leaves, mask=settings.mask, **settings.options)


def _decay(settings: RuleSettings) -> Any:
    return decoupled_decay(settings.rate, settings.options["weight_decay"], settings.mask)


_ADAM = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

RULES: Mapping[str, UpdateRule] = {
    # Loshchilov & Hutter 2019
    "adamw": UpdateRule(_adam, _ADAM),
    # Dozat 2016, with AdamW's decay
    "nadamw": UpdateRule(functools.partial(_adam, make="nadamw"), _ADAM),
    # Xie et al. 2022, arXiv 2208.06677
    "adan": UpdateRule(_adan, {"b1": 0.98, "b2": 0.92, "b3": 0.99, "eps": 1e-8, "weight_decay": 0.1}),
    # Pagliardini et al. 2024, arXiv 2409.03137
    "ademamix": UpdateRule(
        _ademamix, {"b1": 0.9, "b2": 0.999, "b3": 0.9999, "alpha": 5.0, "eps": 1e-8, "weight_decay": 0.1}
    ),
    # Taniguchi et al. 2024, arXiv 2411.02853
    "adopt": UpdateRule(_adopt, {"b1": 0.9, "b2": 0.9999, "eps": 1e-6, "weight_decay": 0.1}),
    # Chen et al. 2023, arXiv 2302.06675
    "lion": UpdateRule(_lion, {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1}),
    "sgd": UpdateRule(_sgd, {"momentum": 0.0, "weight_decay": 0.1}),
    # Shazeer & Stern 2018, arXiv 1804.04235
    "adafactor": UpdateRule(_adafactor, {"weight_decay": 0.1}),
    # Defazio et al. 2024, arXiv 2405.15682
    "schedule_free": UpdateRule(
        _schedule_free, {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}, "constant", ("constant",)
    ),
    # You et al. 2017, arXiv 1708.03888
    "lars": UpdateRule(
        functools.partial(_large_batch, make="lars"), {"momentum": 0.9, "trust": 0.02, "weight_decay": 1e-4}
    ),
    # You et al. 2020, arXiv 1904.00962
    "lamb": UpdateRule(
        functools.partial(_large_batch, make="lamb"), {"b1": 0.9, "b2": 0.999, "eps": 1e-6, "weight_decay": 0.01}
    ),
    # Tang et al. 2021, arXiv 2102.02888
    "one_bit_adam": UpdateRule(
        functools.partial(_one_bit, make="one_bit_adam"), {**_ADAM, "freeze": 0.25}, over_replicas=True
    ),
    # Li et al. 2021, arXiv 2104.06069
    "one_bit_lamb": UpdateRule(
        functools.partial(_one_bit, make="one_bit_lamb"),
        {"b1": 0.9, "b2": 0.999, "eps": 1e-6, "freeze": 0.25, "weight_decay": 0.01},
        over_replicas=True,
    ),
    # Jordan et al. 2024, and Liu et al. 2025, arXiv 2502.16982
    "muon": UpdateRule(_muon, {"momentum": 0.95, "scale": "moonshot", "precision": "bfloat16", **_ADAM}),
    # Vyas et al. 2024, arXiv 2409.11321
    "soap": UpdateRule(
        _soap, {"b1": 0.95, "b2": 0.95, "eps": 1e-8, "every": 10, "max_dim": 10_000, "weight_decay": 0.1}
    ),
    # Zhao et al. 2024, arXiv 2403.03507
    "galore": UpdateRule(_galore, {**_ADAM, "rank": 128, "every": 200}),
}


def freeze_step(freeze: float, steps: int) -> int:
    """Updates before a variance is frozen.

    Args:
        freeze: number of updates, or below 1 a share of the run.
        steps: updates of the run.

    Example:
        >>> freeze_step(0.25, 400), freeze_step(30, 400), freeze_step(0.25, 3)
        (100, 30, 1)
    """
    return int(freeze) if freeze >= 1 else max(round(freeze * steps), 1)


def decoupled_decay(rate: Rate, decay: float, mask: Any) -> Any:
    """Weight decay after an update rule: subtracts `rate * decay` of each weight from its update.

    Args:
        rate: learning rate by the number of updates made.
        decay: share of a weight, in units of the learning rate.
        mask: tree of bools like the parameters; `None` decays all.
    """
    import jax
    import jax.numpy as jnp
    import optax

    if not decay:
        return optax.identity()

    def init(params: Any) -> Any:
        return optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        share = decay * rate(state.count)
        decay_flags = jax.tree.map(lambda _: True, params) if mask is None else mask
        decayed = jax.tree.map(lambda u, p, decays: u - share * p if decays else u, updates, params, decay_flags)
        return decayed, optax.ScaleByScheduleState(count=optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)
