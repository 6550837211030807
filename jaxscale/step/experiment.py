"""Experiment: what to run, as a value. What belongs to speed and memory alone is its Plan."""

import dataclasses
from typing import Any

from jaxscale.blocks import Model
from jaxscale.errors import UserError
from jaxscale.optim.optimizer import Optimizer
from jaxscale.step.plan import Plan
from jaxscale.values import check_types


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """When to measure the held-out loss.

    Args:
        every: steps between evaluations; 0 evaluates at the end only.
        batches: held-out batches per evaluation; `None` takes the whole split.
    """

    every: int = 250
    batches: int | None = None

    def __post_init__(self) -> None:
        check_types(self)


@dataclasses.dataclass(frozen=True)
class Samples:
    """What to generate while training (models that generate).

    Args:
        every: steps between samples; 0 samples at the end only.
        prompts: a sample is drawn for each.
        tokens: tokens per sample.
        temperature: 0 is greedy.
    """

    every: int = 500
    prompts: tuple[str, ...] = ("\n",)
    tokens: int = 200
    temperature: float = 0.8

    def __post_init__(self) -> None:
        check_types(self)


@dataclasses.dataclass(frozen=True)
class Checkpointing:
    """When to save, and what to keep.

    Args:
        every: steps between checkpoints; 0 saves at the end only.
        minutes: minutes between checkpoints, whichever comes first; `None` counts steps only.
        keep: how many of the newest to keep.
        best: keep the one with the least held-out loss too.
    """

    every: int = 500
    minutes: float | None = 10.0
    keep: int = 3
    best: bool = True

    def __post_init__(self) -> None:
        check_types(self)


@dataclasses.dataclass(frozen=True)
class Guard:
    """What to do about a step that would spoil the run. A step with a non-finite loss or gradient is always skipped.

    Args:
        spike: skip a step whose gradient norm exceeds this many times its running mean; 0 never skips for it.
        warmup: steps before the running mean is trusted.
        patience: skipped steps in a row after which the run stops, with exit code 4.
    """

    spike: float = 20.0
    warmup: int = 100
    patience: int = 20

    def __post_init__(self) -> None:
        check_types(self)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A training run to be: the same experiment, plan and seed give the same steps.

    Args:
        name: names the run's folder.
        model: a frozen dataclass that builds the module and its loss (`jaxscale.blocks.Model`).
        data: a frozen dataclass that opens the batches (`jaxscale.data`).
        optimizer: the optimizer and its schedule.
        steps: updates.
        batch: rows of the global batch.
        seed: of parameters, data order, dropout and samples.
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

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("steps", "batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name}: got {value!r}, expected a whole number >= 1")
