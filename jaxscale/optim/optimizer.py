"""Optimizer: an optax optimizer and its schedule, as a value for the command line, JSON and tests.

The update rules and their options are in `rules.py`. `custom` takes any other optax transformation.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jaxscale.errors import UserError
from jaxscale.optim.rules import RULES, RuleSettings, freeze_step
from jaxscale.values import check_types
from jaxscale.values.drawn import drawn
from jaxscale.values.functions import check_parameters
from jaxscale.values.short_repr import short_repr
from jaxscale.values.user_frames import place_of

Name = Literal[
    "adamw", "nadamw", "adan", "ademamix", "adopt", "lion", "sgd", "adafactor", "schedule_free", "lars", "lamb",
    "one_bit_adam", "one_bit_lamb", "muon", "soap", "galore",
]  # fmt: skip
RateSchedule = Literal["cosine", "linear", "constant"]

_POSITIVE_FIELDS = ("learning_rate", "clip", "trust", "rank", "every", "max_dim", "freeze")
_NOT_NEGATIVE_FIELDS = ("final_learning_rate", "warmup", "weight_decay", "momentum", "eps", "alpha")
_DECAY_FIELDS = ("b1", "b2", "b3", "ema")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    r"""An optimizer, its learning-rate schedule, gradient clipping and weight decay.

    The learning rate of update n (from 0) is ``learning_rate * (n + 1) / (warmup + 1)`` for ``n < warmup``, then falls
    from ``learning_rate`` to ``final_learning_rate`` along the schedule until the last step. Gradients are first
    clipped to global norm ``clip``.

    | name | what it is | options and their defaults |
    |---|---|---|
    | adamw | Adam with decoupled decay | b1 0.9, b2 0.95, eps 1e-08, weight_decay 0.1 |
    | nadamw | AdamW with Nesterov's momentum | b1 0.9, b2 0.95, eps 1e-08, weight_decay 0.1 |
    | adan | adaptive Nesterov momentum | b1 0.98, b2 0.92, b3 0.99, eps 1e-08, weight_decay 0.1 |
    | ademamix | AdamW with a slow second momentum | b1 0.9, b2 0.999, b3 0.9999, alpha 5, eps 1e-08, weight_decay 0.1 |
    | adopt | Adam that converges with any b2 | b1 0.9, b2 0.9999, eps 1e-06, weight_decay 0.1 |
    | lion | sign of a momentum | b1 0.9, b2 0.95, weight_decay 0.1 |
    | sgd | stochastic gradient descent | momentum 0, weight_decay 0.1 |
    | adafactor | second moments factored into rows and columns | weight_decay 0.1 |
    | schedule_free | AdamW that averages weights, with no schedule | b1 0.9, b2 0.95, eps 1e-08, weight_decay 0.1 |
    | lars | sgd for large batches | momentum 0.9, trust 0.02, weight_decay 0.0001 |
    | lamb | Adam for large batches | b1 0.9, b2 0.999, eps 1e-06, weight_decay 0.01 |
    | one_bit_adam | adamw with one-bit messages | those of adamw, freeze 0.25 |
    | one_bit_lamb | lamb with one-bit messages | b1 0.9, b2 0.999, eps 1e-06, freeze 0.25, weight_decay 0.01 |
    | muon | orthogonalized momentum | momentum 0.95, scale moonshot, precision bfloat16, and those of adamw |
    | soap | Adam in Shampoo's eigenbasis | b1 0.95, b2 0.95, eps 1e-08, every 10, max_dim 10000, weight_decay 0.1 |
    | galore | AdamW in a low-rank subspace | b1 0.9, b2 0.95, eps 1e-08, rank 128, every 200, weight_decay 0.1 |

    On the command line `--optimizer muon` is short for `--optimizer.name muon`. An option that the rule does not have
    is an error; `None` stands for the rule's default. lars, lamb, one_bit_lamb, muon, soap and galore treat each layer
    of a stacked array as a tensor, and a kernel as a matrix whose columns are its last dim. muon, soap and galore
    update only projections and kernels; embeddings, head, gains and biases get AdamW, at the same learning rate.
    one_bit_adam and one_bit_lamb need a replica axis in the mesh, over which `replicas.OneBit` averages momenta once
    the variance is frozen; from then on each replica clips its own gradient. schedule_free trains and evaluates the
    model at a point between an average of the weights and a fast iterate.

    Args:
        name: the update rule.
        learning_rate: peak learning rate.
        final_learning_rate: learning rate at the end; `None` means a tenth of the peak.
        warmup: number of updates of linear warm-up.
        schedule: schedule of the rate after the warm-up; `None` means cosine, or constant for schedule_free. A function
            of the number of updates made returns the learning rate itself, and has its own warm-up. It is traced, so it
            must choose by `jnp.where`. A continued run imports it again from the file that defines it.
        b1: decay of the first moment.
        b2: decay of the second moment.
        b3: decay of the third moment (adan) or of the slow first moment (ademamix).
        eps: number added to the root of the second moment.
        momentum: decay of the momentum of lars, muon and sgd (with 0, sgd keeps no momentum).
        alpha: weight of the slow first moment (ademamix).
        trust: norm of an update divided by the norm of the weights, at learning rate 1 (lars).
        scale: scale of an orthogonal update of n rows and m columns: sqrt(max(1, m / n)) for "keller", and for
            "moonshot" 0.2 sqrt(max(n, m)), which suits AdamW's learning rates (muon).
        precision: dtype of the orthogonalization and of its messages between devices, bfloat16 or float32 (muon).
        rank: rank of the projection (galore).
        every: number of updates between new bases (soap, galore).
        max_dim: length of the longest side of a matrix that is rotated (soap).
        freeze: number of updates before the variance is frozen and momenta are sent in one bit per number; a value
            below 1 is a share of the run (one_bit_adam, one_bit_lamb).
        weight_decay: factor of the decoupled weight decay: every update subtracts factor * learning rate * weight from
            each weight. lars and lamb include the decay in their trust ratio.
        decay: parameters that decay: "matrices" excludes norms, biases and other vectors; "all" excludes none.
        clip: global norm that gradients are clipped to; `None` never clips.
        custom: a function that returns any optax transformation for a schedule (step to learning rate); it replaces
            `name` and its options. Gradients are first clipped to `clip`, as for other rules. A rule that needs the
            loss gets that of the step as `value`.
        train: which parameters are trained: a regular expression that is searched for in their names, such as
            "lora|head", or the name of their type, such as "LoRAParam". All other parameters have no gradient and no
            state, and stay unchanged, in the precision of the plan. `None` trains all parameters.
        ema: decay, such as 0.999, of an exponential moving average of the weights. Evaluation, samples and export read
            the average. Update n has the decay (1 + n) / (10 + n) if that is less. `None` keeps no average.
        moments: number format of the moments between steps: the format of the plan, or float32 under any plan.
        groups: optimizers of some parameters, by patterns like that of `train`: `{"embed|head": Optimizer("adamw",
            1e-3, weight_decay=0.0)}`. A parameter belongs to the first pattern that matches it. A group inherits
            nothing; `clip`, `train` and `ema` are those of the whole optimizer. On the command line, JSON.

    Example:
        >>> round(Optimizer(learning_rate=1e-3, warmup=99).learning_rate_at(0, steps=1000), 8)
        1e-05
        >>> Optimizer(name="lars", b1=0.9)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        jaxscale.errors.UserError: optimizer.b1: got 0.9, but lars has no such option: leave it out, or set ...
    """

    name: Name = "adamw"
    learning_rate: float = 1e-3
    final_learning_rate: float | None = None
    warmup: int = 0
    schedule: RateSchedule | Callable[[Any], Any] | None = None
    b1: float | None = None
    b2: float | None = None
    b3: float | None = None
    eps: float | None = None
    momentum: float | None = None
    alpha: float | None = None
    trust: float | None = None
    scale: Literal["keller", "moonshot"] | None = None
    precision: Literal["float32", "bfloat16"] | None = None
    rank: int | None = None
    every: int | None = None
    max_dim: int | None = None
    freeze: float | None = None
    weight_decay: float | None = None
    decay: Literal["matrices", "all"] = "matrices"
    clip: float | None = 1.0
    custom: Callable[[Callable[[Any], Any]], Any] | None = None
    train: str | None = None
    ema: float | None = None
    moments: Literal["plan", "float32"] = "plan"
    groups: "Mapping[str, Optimizer]" = dataclasses.field(default_factory=dict, hash=False)

    __repr__ = short_repr
    _repr_html_ = drawn

    def __post_init__(self) -> None:
        if hasattr(self.custom, "init") and hasattr(self.custom, "update"):
            raise UserError(
                "optimizer.custom: got an optax transformation, expected a function that returns one for a learning "
                "rate, such as lambda rate: optax.adam(rate)"
            )
        if callable(self.learning_rate):
            raise UserError(
                "optimizer.learning_rate: got a function, expected a number; a schedule "
                "of your own is Optimizer(schedule=...), from the number of updates made to the learning rate"
            )
        check_types(self)
        if self.custom is not None:
            check_parameters(self.custom, "optimizer.custom", 1, "lambda rate: optax.adam(rate)")
        if self.train is not None:
            _check_pattern(self.train, "optimizer.train", "; leave it out to train all")
        self._check_own_schedule()
        self._check_range(_POSITIVE_FIELDS, lambda setting: 0 < setting < math.inf, "a number above 0")
        self._check_range(_NOT_NEGATIVE_FIELDS, lambda setting: 0 <= setting < math.inf, "0 or more")
        self._check_range(_DECAY_FIELDS, lambda setting: 0 <= setting < 1, "a number from 0 up to, not including, 1")
        if self.freeze is not None and self.freeze >= 1 and self.freeze != int(self.freeze):
            raise UserError(
                f"optimizer.freeze: got {self.freeze!r}, expected a whole number of updates or a share below 1"
            )
        if self.custom is not None:
            set_option_names = [option for option in OPTIONS if getattr(self, option) is not None]
            if set_option_names:
                raise UserError(
                    f"optimizer.{set_option_names[0]}: got {getattr(self, set_option_names[0])} together with "
                    f"optimizer.custom, whose rule has its own options: leave {set_option_names[0]} out, or set it in "
                    "the custom rule"
                )
        else:
            self.options()
            if self.schedule is not None and not self._has_schedule():
                schedule_text = "a function" if callable(self.schedule) else self.schedule
                raise UserError(
                    f"optimizer.schedule: got {schedule_text}, but {self.name} takes only "
                    f"{' or '.join(RULES[self.name].schedule_names)}, because this rule averages weights instead of "
                    "lowering the learning rate: leave optimizer.schedule out"
                )
        self._check_groups()

    def _check_groups(self) -> None:
        """Raise UserError if a pattern is not a regular expression, or if a group sets a field of the whole optimizer.

        The mapping of groups is copied first, so that later changes to it have no effect.
        """
        object.__setattr__(self, "groups", dict(self.groups))
        for pattern, member in self.groups.items():
            path = f"optimizer.groups.{pattern}"
            _check_pattern(pattern, "optimizer.groups", "")
            if member.groups:
                raise UserError(f"{path}.groups: got groups inside of a group; list all groups in optimizer.groups")
            for field, reason in _WHY_NOT_IN_A_GROUP.items():
                if getattr(member, field) != getattr(_DEFAULTS, field):
                    raise UserError(
                        f"{path}.{field}: got {getattr(member, field)!r}, but {reason}; set optimizer.{field} instead"
                    )
        for path, member in {"optimizer": self, **{f"optimizer.groups.{p}": g for p, g in self.groups.items()}}.items():
            if self.groups and member.custom is None and RULES[member.name].takes_mean_messages:
                raise UserError(
                    f"{path}.name: got {member.name} together with optimizer.groups, but replicas that send momenta in "
                    "one bit have one rule for all parameters; take another rule, or leave optimizer.groups out"
                )

    def _has_schedule(self) -> bool:
        """Return whether the rule accepts the schedule; a rule that accepts "cosine" also accepts a user's function."""
        schedule = "cosine" if callable(self.schedule) else self.schedule
        return schedule in RULES[self.name].schedule_names

    def _check_own_schedule(self) -> None:
        """Raise UserError if the schedule is a user's function but a field is set that only named schedules use."""
        if not callable(self.schedule):
            return
        check_parameters(self.schedule, "optimizer.schedule", 1, "lambda step: 1e-3 / (1 + step)")
        default_by_field = {field.name: field.default for field in dataclasses.fields(self)}
        for field_name in ("learning_rate", "final_learning_rate", "warmup"):
            if getattr(self, field_name) != default_by_field[field_name]:
                raise UserError(
                    f"optimizer.{field_name}: got {getattr(self, field_name)} together with a schedule of your own, "
                    f"which returns the learning rate itself: leave {field_name} out"
                )

    def _check_range(
        self, field_names: Sequence[str], is_in_range: Callable[[float], bool], expected_text: str
    ) -> None:
        """Raise UserError if a field with one of these names is out of range."""
        for field_name in field_names:
            setting = getattr(self, field_name)
            if setting is not None and not is_in_range(setting):
                raise UserError(f"optimizer.{field_name}: got {setting!r}, expected {expected_text}")

    def members(self) -> dict[int, "Optimizer"]:
        """Return the optimizer of each group by the group's index; -1 is this optimizer, without its groups.

        The optimizer of -1 updates all parameters that belong to no group.

        Example:
            >>> list(Optimizer(groups={"head": Optimizer("sgd")}).members())
            [-1, 0]
        """
        rest_optimizer = dataclasses.replace(self, groups={}) if self.groups else self
        return {-1: rest_optimizer, **dict(enumerate(self.groups.values()))}

    def describe_rule(self) -> str:
        """Return the rule with its learning rate and weight decay, without groups, as text for the user.

        Example:
            >>> Optimizer("lion", 3e-4).describe_rule()
            'lion, learning rate 0.0003, weight decay 0.1'
        """
        rate_text = f"{self.learning_rate:g}"
        if callable(self.schedule):
            rate_text = f"of the function {getattr(self.schedule, '__name__', type(self.schedule).__name__)}"
        if self.custom is not None:
            return f"the custom rule, learning rate {rate_text}"
        return f"{self.name}, learning rate {rate_text}, weight decay {self.options()['weight_decay']:g}"

    def options(self) -> dict[str, Any]:
        """Return the value of every option of the rule, by name; options that are not set have their defaults.

        Example:
            >>> Optimizer(name="lars", trust=0.01).options()
            {'momentum': 0.9, 'trust': 0.01, 'weight_decay': 0.0001}
        """
        return RULES[self.name].options(self.name, {option: getattr(self, option) for option in OPTIONS})

    def momentum_after(self) -> tuple[str, float] | None:
        """Return the name and value of the option that sets the decay of the rule's running mean of gradients.

        `None` for a rule without such a mean, and for a `custom` rule.

        Example:
            >>> Optimizer().momentum_after(), Optimizer(name="sgd").momentum_after()
            (('b1', 0.9), None)
        """
        if self.custom is not None:
            return None
        options = self.options()
        return next(
            ((option_name, options[option_name]) for option_name in ("momentum", "b1") if options.get(option_name)),
            None,
        )

    def schedule_fn(self, steps: int) -> Callable[[Any], Any]:
        """Return the optax schedule of a run of `steps` updates: learning rate as a function of the updates made."""
        import optax

        if callable(self.schedule):
            import jax.numpy as jnp

            own_schedule = self.schedule
            return lambda update: jnp.asarray(own_schedule(update), jnp.float32)
        peak_rate = self.learning_rate
        final_rate = peak_rate / 10 if self.final_learning_rate is None else self.final_learning_rate
        decay_steps = max(steps - self.warmup, 1)
        schedule_name = self.schedule or ("cosine" if self.custom is not None else RULES[self.name].schedule)
        if schedule_name == "cosine":
            decay_schedule = optax.cosine_decay_schedule(peak_rate, decay_steps, alpha=final_rate / peak_rate)
        elif schedule_name == "linear":
            decay_schedule = optax.linear_schedule(peak_rate, final_rate, decay_steps)
        else:
            decay_schedule = optax.constant_schedule(peak_rate)
        if self.warmup == 0:
            return decay_schedule
        warmup_schedule = optax.linear_schedule(peak_rate / (self.warmup + 1), peak_rate, self.warmup)
        return optax.join_schedules([warmup_schedule, decay_schedule], [self.warmup])

    def learning_rate_at(self, update: int, steps: int) -> float:
        """Return the learning rate of one update in a run of `steps` updates; `update` is its index, from 0."""
        return float(self.schedule_fn(steps)(update))

    def learning_rates(self, update: Any, steps: int) -> dict[str, Any]:
        """Return the metrics of the learning rates of one update, by name: `learning_rate`, and that of each group.

        Args:
            update: index of the update, from 0, an int or a traced number.
            steps: number of updates in the run.

        Example:
            >>> optimizer = Optimizer(groups={"head": Optimizer(learning_rate=0.5, schedule="constant")})
            >>> {name: round(float(rate), 4) for name, rate in optimizer.learning_rates(0, 10).items()}
            {'learning_rate': 0.001, 'learning_rate/head': 0.5}
        """
        metric_names = ["learning_rate", *(f"learning_rate/{pattern}" for pattern in self.groups)]
        return {
            metric_name: member.schedule_fn(steps)(update)
            for metric_name, member in zip(metric_names, self.members().values(), strict=True)
        }

    def try_own(self, steps: int) -> None:
        """Try the user's own schedules and rules before the train step is traced.

        Args:
            steps: number of updates in the run.

        Raises:
            UserError: the learning rate or an update is not a finite number.
        """
        for member in self.members().values():
            if callable(member.schedule) or member.custom is not None:
                from jaxscale.optim.own_rule import try_rule, try_schedule

                if callable(member.schedule):
                    try_schedule(member.schedule, steps)
                if member.custom is not None:
                    rate_field_names = ("learning_rate", "final_learning_rate", "warmup", "schedule")
                    set_field_names = [
                        field_name
                        for field_name in rate_field_names
                        if getattr(member, field_name) != getattr(_DEFAULTS, field_name)
                    ]
                    try_rule(member.custom, member.schedule_fn(steps), set_field_names)

    def build(self, steps: int, leaves: Any) -> Any:
        """Return the optax transformation that clips gradients and then applies `rule`.

        Args:
            steps: number of updates in the run, for the schedule.
            leaves: tree of `jaxscale.optim.leaves.ParamInfo` like the parameters.
        """
        import optax

        rule, messages = self.rule(steps, leaves), self.messages(steps)
        if messages is not None:
            from jaxscale.optim.one_bit import clip_mean_gradients

            return clip_mean_gradients(rule, messages)
        return rule if self.clip is None else optax.chain(optax.clip_by_global_norm(self.clip), rule)

    def rule(self, steps: int, leaves: Any) -> Any:
        """Return the optax transformation without clipping.

        Args:
            steps: number of updates in the run, for the schedule.
            leaves: tree of `jaxscale.optim.leaves.ParamInfo` like the parameters.
        """
        import jax

        if self.groups:
            from jaxscale.optim.groups import rule_of_groups

            return rule_of_groups(self, steps, leaves)
        rate = self.schedule_fn(steps)
        if self.custom is not None:
            from jaxscale.optim.own_rule import with_update_checks
            from jaxscale.optim.step_loss import with_step_loss

            custom_rule = self.custom(rate)
            if not (hasattr(custom_rule, "init") and hasattr(custom_rule, "update")):
                raise UserError(
                    f"{place_of(self.custom)}optimizer.custom returned a {type(custom_rule).__name__}, expected an "
                    "optax transformation, such as optax.adam(rate)"
                )
            return with_step_loss(with_update_checks(custom_rule, self.custom))
        mask = jax.tree.map(lambda param_info: param_info.decays, leaves) if self.decay == "matrices" else None
        return RULES[self.name].make(RuleSettings(self.name, rate, self.options(), leaves, mask, steps))

    def messages(self, steps: int) -> Any:
        """Return the `one_bit.Messages` of the replicas if the rule takes the mean of such messages; otherwise `None`.

        Args:
            steps: number of updates in the run.
        """
        if self.custom is not None or not RULES[self.name].takes_mean_messages:
            return None
        from jaxscale.optim.one_bit import Messages

        options = self.options()
        return Messages(options["b1"], freeze_step(options["freeze"], steps), self.clip)


def describe_warmup(optimizer: Optimizer, steps: int) -> list[str]:
    """Return a line of text for each warm-up, of the optimizer or of a group, that a run of `steps` updates cuts off.

    Example:
        >>> describe_warmup(Optimizer(learning_rate=1e-3, warmup=99), 10)[0].partition("; ")[0]
        'optimizer.warmup 99: the run has 10 steps, so its learning rate ends at 0.0001 and never reaches 0.001'
    """
    member_by_path = {
        "optimizer": optimizer,
        **{f"optimizer.groups.{pattern}": member for pattern, member in optimizer.groups.items()},
    }
    return [
        f"{path}.warmup {member.warmup}: the run has {steps} steps, so its learning rate ends at "
        f"{member.learning_rate * steps / (member.warmup + 1):.3g} and never reaches {member.learning_rate:g}; set "
        f"warmup below {steps}"
        for path, member in member_by_path.items()
        if member.warmup and member.warmup >= steps
    ]


OPTIONS = tuple(
    field.name for field in dataclasses.fields(Optimizer) if any(field.name in rule.defaults for rule in RULES.values())
)
"""Names of the fields of `Optimizer` that are options of an update rule."""


def _check_pattern(pattern: str, path: str, alternative: str) -> None:
    """Raise UserError if a pattern of parameters is not a regular expression, or is empty.

    Args:
        pattern: the pattern.
        path: path of the field, for messages.
        alternative: end of the message about an empty pattern.
    """
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"{path}: got {pattern!r:.200}, expected a regular expression: {error}") from None
    if not pattern:
        raise UserError(f"{path}: got an empty text, expected a part of names{alternative}")


_WHY_NOT_IN_A_GROUP: Mapping[str, str] = {
    "clip": "gradients are clipped by the norm of all of them",
    "train": "a group contains only parameters that are trained",
    "ema": "the average is of all weights",
}
"""For each field that a group may not set, the reason."""
_DEFAULTS = Optimizer()
"""An optimizer whose fields have their defaults."""
