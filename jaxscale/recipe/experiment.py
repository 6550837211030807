"""Experiment: a training run as a value. Settings that affect only speed and memory are in the experiment's Plan."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxscale.blocks import Model
from jaxscale.errors import UserError, near_miss
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.plan import Plan
from jaxscale.values import check_types
from jaxscale.values.drawn import drawn
from jaxscale.values.limits import MAX_INT32, MAX_INT64, MAX_NAME_BYTES, check_at_most
from jaxscale.values.short_repr import short_repr


def _check(record: "Evaluation | Samples | Checkpointing | Guard | Experiment", path: str, **minima: int) -> None:
    """Raise UserError if a field has a wrong type, or holds a number that is infinite or too small.

    Args:
        record: the value whose fields are checked.
        path: path of the record in the experiment, for messages; "" for the experiment itself.
        minima: the smallest allowed value of each numeric field, by field name; `None` is always allowed.
    """
    check_types(record)
    for name, minimum in minima.items():
        value = getattr(record, name)
        if isinstance(value, int):
            check_at_most(f"{path}.{name}" if path else name, value, MAX_INT64)
        if value is None or (value >= minimum and math.isfinite(value)):
            continue
        kind_text = "whole number" if isinstance(value, int) else "number"
        raise UserError(f"{f'{path}.' if path else ''}{name}: got {value!r}, expected a {kind_text} >= {minimum}")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """When to measure the held-out loss.

    Args:
        every: number of steps between evaluations; 0 evaluates at the end only.
        batches: number of held-out batches per evaluation, spread evenly over the split; `None` takes the whole split.
            The same number is taken from each of the experiment's held-out sets.
        at_start: whether to measure before the first step as well, for example when a model is fine-tuned.
        best: name of the loss that selects the best checkpoint. "loss" is the loss of the data's own held-out part or,
            if the data has no such part, of the first held-out set. "news/loss" is the loss of the held-out set "news".
    """

    every: int = 250
    batches: int | None = None
    at_start: bool = False
    best: str = "loss"

    __repr__ = short_repr

    def __post_init__(self) -> None:
        _check(self, "evaluation", every=0, batches=1)


@dataclasses.dataclass(frozen=True)
class Samples:
    """The samples to generate during training, for models that can generate.

    Args:
        every: number of steps between samples; 0 draws samples at the end only.
        prompts: texts to continue, one sample for each; () draws no samples.
        tokens: number of tokens per sample.
        temperature: temperature of the softmax from which tokens are drawn; 0 takes the most likely token.
    """

    every: int = 500
    prompts: tuple[str, ...] = ("\n",)
    tokens: int = 200
    temperature: float = 0.8

    __repr__ = short_repr

    def __post_init__(self) -> None:
        _check(self, "samples", every=0, tokens=1, temperature=0)
        for prompt in self.prompts:
            if not prompt:
                raise UserError(
                    "samples.prompts: got '', expected text to continue, such as a line break; () draws no samples"
                )


@dataclasses.dataclass(frozen=True)
class Checkpointing:
    """When to save checkpoints, and which of them to keep.

    Args:
        every: number of steps between checkpoints; 0 saves at the end only.
        minutes: minutes between checkpoints; `every` or `minutes` applies, whichever comes first. `None`
            counts steps only.
        keep: number of newest checkpoints to keep; the last good checkpoint is also kept, even if it is older.
        best: whether to also keep the checkpoint with the lowest held-out loss.
        memory_every: number of steps between copies of the state in the hosts' memory; 0 for no copies. A restart
            continues from the copies if they are newer than the newest checkpoint.
    """

    every: int = 500
    minutes: float | None = 10.0
    keep: int = 3
    best: bool = True
    memory_every: int = 0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        _check(self, "checkpoint", every=0, minutes=0, keep=1, memory_every=0)


@dataclasses.dataclass(frozen=True)
class Guard:
    """When to skip a step that would harm the run. A step with a non-finite loss, gradient or update is always skipped.

    Args:
        spike: a step is skipped if its gradient norm is more than this many times the running mean of the norms; 0
            turns this check off.
        warmup: number of steps before the running mean is used.
        update: a step is skipped if the root mean square (RMS) of its update is more than this many times the RMS of
            the parameters, which counts as at least 0.01; 0 turns this check off. If the optimizer's rule bounds its
            updates, their RMS is estimated from the learning rate.
        patience: number of consecutive skipped steps after which the run stops with exit code 4.
    """

    spike: float = 20.0
    warmup: int = 100
    update: float = 100.0
    patience: int = 20

    __repr__ = short_repr

    def __post_init__(self) -> None:
        _check(self, "guard", spike=0, warmup=0, update=0, patience=1)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A training run as a value. The same experiment, plan and seed give the same steps.

    Args:
        name: name of the run's folder.
        model: a frozen dataclass that builds the module and its loss (`jaxscale.blocks.Model`).
        data: a value that opens the batches (`jaxscale.data`). A dict of arrays stands for `data.Arrays`, and an
            iterable of batches for `data.Stream`.
        held_out: further held-out sets, by name, which are evaluated in addition to the held-out part of `data`. If a
            set is a value of `jaxscale.data`, its held-out part is evaluated. A set may also be a path of files, which
            are read like `data`; a dict of arrays; or an iterable of batches. Such a set is evaluated as a whole.
        optimizer: the optimizer and its schedule; a name such as "muon" stands for `Optimizer("muon")`.
        steps: number of updates.
        batch: number of rows of the global batch.
        seed: seed of parameters, data order, dropout and samples.
        evaluation: when to measure the held-out loss.
        samples: the samples to generate during training.
        checkpoint: when to save checkpoints, and which of them to keep.
        guard: when to skip a step that would spoil the run.
        plan: the techniques with which to train.
    """

    name: str
    model: Model
    data: Any
    optimizer: Optimizer = Optimizer()
    steps: int = 1000
    batch: int = 8
    seed: int = 0
    evaluation: Evaluation = Evaluation()
    samples: Samples = Samples()
    checkpoint: Checkpointing = Checkpointing()
    guard: Guard = Guard()
    plan: Plan = Plan()
    held_out: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    __repr__ = short_repr
    _repr_html_ = drawn

    def __post_init__(self) -> None:
        _refuse_flax_and_optax(self)
        if isinstance(self.optimizer, str):
            object.__setattr__(self, "optimizer", Optimizer(self.optimizer))  # pyright: ignore[reportArgumentType]
        _check(self, "", steps=1, batch=1, seed=0)
        if self.data is not None and not hasattr(self.data, "open"):
            from jaxscale.data.stream import as_data

            object.__setattr__(self, "data", as_data(self.data))
        if self.held_out:
            from jaxscale.data.held_out_sets import as_held_out_sets

            object.__setattr__(self, "held_out", as_held_out_sets(self.held_out, self.data))
        loss_names = ("loss", *(f"{name}/loss" for name in self.held_out))
        if self.evaluation.best not in loss_names:
            raise UserError(
                f"evaluation.best: got {self.evaluation.best!r}, expected {' or '.join(loss_names)}"
                f"{near_miss(self.evaluation.best, loss_names)}"
            )
        for name in ("steps", "batch", "seed"):
            if getattr(self, name) > MAX_INT32:
                raise UserError(f"{name}: got {getattr(self, name)}, expected a whole number below 2**31")
        if not self.name or self.name in (".", "..") or any(character in self.name for character in "/\\\0"):
            raise UserError(f"name: got {self.name!r}, expected the name of a folder, without / and \\")
        try:
            name_byte_count = len(self.name.encode("utf-8"))
        except UnicodeEncodeError:  # half of a surrogate pair
            raise UserError(f"name: got {self.name!r}, which has a character that no file name can have") from None
        check_at_most("name: number of bytes in UTF-8", name_byte_count, MAX_NAME_BYTES)

    @property
    def train(self) -> str | None:
        """The setting that selects the trained parameters: the optimizer's, or else the model's; `None` trains all."""
        return self.optimizer.train or getattr(self.model, "train", None)


def _refuse_flax_and_optax(experiment: Experiment) -> None:
    """Refuse a Flax module as the model, or an optax transformation as the optimizer.

    The error says which class wraps it.
    """
    model, optimizer = experiment.model, experiment.optimizer
    model_class = model if isinstance(model, type) else type(model)
    is_module = any(cls.__module__.startswith("flax.") and cls.__name__ == "Module" for cls in model_class.__mro__)
    if is_module:
        class_name = model_class.__qualname__
        got_text = f"the class {class_name}" if isinstance(model, type) else f"a {class_name}"
        raise UserError(
            f"model: got {got_text}, which is a module of Flax, expected a model such as ForeignModel(make=lambda "
            f"rngs: {class_name}(rngs=rngs), score=...), which makes the module",
            page="start/own_model",
        )
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        raise UserError(
            "optimizer: got an optax transformation, expected an Optimizer, such as Optimizer(custom=lambda rate: "
            "optax.adam(rate))"
        )


def plan_of(experiment: Any, plan: Any) -> Plan:
    """Return `plan`, or the experiment's own plan if `plan` is `None`.

    Raises:
        UserError: `experiment` is not an `Experiment`, or `plan` is not a `Plan`.
    """
    if not isinstance(experiment, Experiment):
        advice_text = "such as load_file(PATH)[0]"
        if callable(experiment) and not isinstance(experiment, type):
            advice_text = f"which the call {getattr(experiment, '__name__', 'experiment')}() may return"
        elif hasattr(experiment, "build"):
            advice_text = "which has the model and the data: Experiment(name=..., model=..., data=...)"
        raise UserError(f"experiment: got {experiment!r:.200}, expected an Experiment, {advice_text}")
    if not isinstance(plan, Plan | None):
        raise UserError(f"plan: got {plan!r}, expected a Plan, such as Plan(mesh='fsdp:4', zero=3)")
    return experiment.plan if plan is None else plan
