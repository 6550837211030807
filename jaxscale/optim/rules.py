"""The update rules that `Optimizer` knows by name, as data: the options that each takes, with defaults, and how the
optax transformation is made of them. A new rule is a function here and a row of `RULES`.

optax is imported where a rule is made: an option that is refused is refused before JAX is imported.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxscale.errors import UserError, near_miss

Rate = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Given:
    """What a rule is made of.

    Args:
        rate: learning rate by the number of updates made.
        options: value of each option that the rule takes.
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
        """Some of the options."""
        return {name: self.options[name] for name in names}


@dataclasses.dataclass(frozen=True)
class Rule:
    """An update rule by name.

    Args:
        make: its optax transformation.
        defaults: the options that it takes, fields of `Optimizer`, and what they are if not set.
        schedule: how the learning rate falls if nothing else is said.
        schedules: what it may be.
        over_replicas: it takes the mean of what `one_bit.Messages` has each replica send, and needs several.
    """

    make: Callable[[Given], Any]
    defaults: Mapping[str, Any]
    schedule: str = "cosine"
    schedules: tuple[str, ...] = ("cosine", "linear", "constant")
    over_replicas: bool = False

    def options(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Every option of the rule, those that are set in place of the defaults.

        Args:
            name: of the rule, for messages.
            given: values of fields; `None` is not set.

        Raises:
            UserError: one is set that the rule does not take.

        Example:
            >>> RULES["sgd"].options("sgd", {"momentum": 0.9, "b1": None})
            {'momentum': 0.9, 'weight_decay': 0.1}
        """
        for option, value in given.items():
            if value is not None and option not in self.defaults:
                raise UserError(
                    f"optimizer.{option}: {name} has none, got {value!r}: leave it out, or none; {name} takes "
                    f"{', '.join(self.defaults)}{near_miss(option, self.defaults)}"
                )
        return {
            option: default if given.get(option) is None else given[option] for option, default in self.defaults.items()
        }


def _adam(given: Given, make: str = "adamw") -> Any:
    import optax

    options = given("b1", "b2", "eps", "weight_decay")
    return getattr(optax, make)(given.rate, **options, mask=given.mask)


def _adan(given: Given) -> Any:
    import optax

    return optax.adan(given.rate, **given("b1", "b2", "b3", "eps", "weight_decay"), mask=given.mask)


def _lion(given: Given) -> Any:
    import optax

    return optax.lion(given.rate, **given("b1", "b2", "weight_decay"), mask=given.mask)


def _ademamix(given: Given) -> Any:
    from optax import contrib

    options = given("b1", "b2", "b3", "alpha", "eps", "weight_decay")
    return contrib.ademamix(given.rate, **options, mask=given.mask)


def _adopt(given: Given) -> Any:
    import optax
    from optax import contrib

    return optax.chain(contrib.adopt(given.rate, **given("b1", "b2", "eps")), _decay(given))


def _sgd(given: Given) -> Any:
    import optax

    return optax.chain(optax.sgd(given.rate, momentum=given.options["momentum"] or None), _decay(given))


def _adafactor(given: Given) -> Any:
    import optax

    return optax.chain(optax.adafactor(given.rate), _decay(given))


def _schedule_free(given: Given) -> Any:
    """`optax.contrib.schedule_free_adamw` with a mask for decay."""
    import optax
    from optax import contrib

    b2, eps = given.options["b2"], given.options["eps"]
    inner = optax.chain(
        optax.scale_by_rms(decay=b2, eps=eps, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(given.options["weight_decay"], mask=given.mask),
        optax.scale_by_learning_rate(given.rate),
    )
    return contrib.schedule_free(inner, given.rate, b1=given.options["b1"])


def _large_batch(given: Given, make: str) -> Any:
    from jaxscale.optim import large_batch

    return getattr(large_batch, make)(given.rate, leaves=given.leaves, mask=given.mask, **given.options)


def _one_bit(given: Given, make: str) -> Any:
    from jaxscale.optim import one_bit

    options = {name: value for name, value in given.options.items() if name != "freeze"}
    if make == "one_bit_lamb":
        options["leaves"] = given.leaves
    freeze = freeze_step(given.options["freeze"], given.steps)
    return getattr(one_bit, make)(given.rate, freeze, **options, mask=given.mask)


def _muon(given: Given) -> Any:
    from jaxscale.optim.muon import muon

    return muon(given.rate, leaves=given.leaves, mask=given.mask, **given.options)


def _soap(given: Given) -> Any:
    from jaxscale.optim.soap import soap

    return soap(given.rate, leaves=given.leaves, mask=given.mask, **given.options)


def _galore(given: Given) -> Any:
    from jaxscale.optim.galore import galore

    return galore(given.rate, leaves=given.leaves, mask=given.mask, **given.options)


def _decay(given: Given) -> Any:
    return decoupled_decay(given.rate, given.options["weight_decay"], given.mask)


_ADAM = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

RULES: Mapping[str, Rule] = {
    # Loshchilov & Hutter 2019
    "adamw": Rule(_adam, _ADAM),
    # Dozat 2016, with AdamW's decay
    "nadamw": Rule(functools.partial(_adam, make="nadamw"), _ADAM),
    # Xie et al. 2022, arXiv 2208.06677
    "adan": Rule(_adan, {"b1": 0.98, "b2": 0.92, "b3": 0.99, "eps": 1e-8, "weight_decay": 0.1}),
    # Pagliardini et al. 2024, arXiv 2409.03137
    "ademamix": Rule(_ademamix, {"b1": 0.9, "b2": 0.999, "b3": 0.9999, "alpha": 5.0, "eps": 1e-8, "weight_decay": 0.1}),
    # Taniguchi et al. 2024, arXiv 2411.02853
    "adopt": Rule(_adopt, {"b1": 0.9, "b2": 0.9999, "eps": 1e-6, "weight_decay": 0.1}),
    # Chen et al. 2023, arXiv 2302.06675
    "lion": Rule(_lion, {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1}),
    "sgd": Rule(_sgd, {"momentum": 0.0, "weight_decay": 0.1}),
    # Shazeer & Stern 2018, arXiv 1804.04235
    "adafactor": Rule(_adafactor, {"weight_decay": 0.1}),
    # Defazio et al. 2024, arXiv 2405.15682
    "schedule_free": Rule(
        _schedule_free, {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}, "constant", ("constant",)
    ),
    # You et al. 2017, arXiv 1708.03888
    "lars": Rule(functools.partial(_large_batch, make="lars"), {"momentum": 0.9, "trust": 0.02, "weight_decay": 1e-4}),
    # You et al. 2020, arXiv 1904.00962
    "lamb": Rule(
        functools.partial(_large_batch, make="lamb"), {"b1": 0.9, "b2": 0.999, "eps": 1e-6, "weight_decay": 0.01}
    ),
    # Tang et al. 2021, arXiv 2102.02888
    "one_bit_adam": Rule(
        functools.partial(_one_bit, make="one_bit_adam"), {**_ADAM, "freeze": 0.25}, over_replicas=True
    ),
    # Li et al. 2021, arXiv 2104.06069
    "one_bit_lamb": Rule(
        functools.partial(_one_bit, make="one_bit_lamb"),
        {"b1": 0.9, "b2": 0.999, "eps": 1e-6, "freeze": 0.25, "weight_decay": 0.01},
        over_replicas=True,
    ),
    # Jordan et al. 2024, and Liu et al. 2025, arXiv 2502.16982
    "muon": Rule(_muon, {"momentum": 0.95, "scale": "moonshot", "precision": "bfloat16", **_ADAM}),
    # Vyas et al. 2024, arXiv 2409.11321
    "soap": Rule(_soap, {"b1": 0.95, "b2": 0.95, "eps": 1e-8, "every": 10, "max_dim": 10_000, "weight_decay": 0.1}),
    # Zhao et al. 2024, arXiv 2403.03507
    "galore": Rule(_galore, {**_ADAM, "rank": 128, "every": 200}),
}


def freeze_step(freeze: float, steps: int) -> int:
    """Updates before a variance is frozen.

    Args:
        freeze: so many, or a share of the run below 1.
        steps: updates of the run.

    Example:
        >>> freeze_step(0.25, 400), freeze_step(30, 400), freeze_step(0.25, 3)
        (100, 30, 1)
    """
    return int(freeze) if freeze >= 1 else max(round(freeze * steps), 1)


def decoupled_decay(rate: Rate, decay: float, mask: Any) -> Any:
    """Weight decay behind an update rule: takes `rate * decay` of each weight off its update.

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
        chosen = jax.tree.map(lambda _: True, params) if mask is None else mask
        after = jax.tree.map(lambda u, p, on: u - share * p if on else u, updates, params, chosen)
        return after, optax.ScaleByScheduleState(count=optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)
