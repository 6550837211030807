"""Recorded errors of memory estimates, and factors fitted to compiled programs.

`experiments/benchmarks/fit_accuracy.py --write` writes the errors on the calibration set and the factors of each kind
of platform to `accuracy.json`. `experiments/benchmarks/fit_cases.py --fit` adds the factors of single chips, and
`--write` the errors on held-out cases (nothing is fitted on them), with and without a pipeline.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Literal

from jaxscale.optim.optimizer import Optimizer
from jaxscale.platforms.platform import Chip
from jaxscale.recipe.plan import Plan, StatePlan

FILE = Path(__file__).with_name("accuracy.json")
"""File with the errors by kind of platform, and the factors by kind of platform and by chip."""

MARGIN = 0.15
"""Least difference between estimate and memory limit that decides whether a step fits, as a share of the limit."""

IRREGULAR_MARGIN = 0.25
"""Margin of steps whose blocks run in no loop, or in a loop over cycles of unlike blocks (models with windows)."""

NARROW_MARGIN = 0.12
"""Margin of usual steps (`is_usual`). No unseen one is off by more (`experiments/benchmarks/fit_cases.py`). One was off
by 26 % until its program was changed: XLA kept weights in two layouts (`step/planned_model.py`)."""

USUAL_CHIPS = ("v5e", "v5p", "v6e")
"""Names of the chips of usual steps."""

USUAL_AXES = ("data", "fsdp", "tensor", "sequence")
"""Mesh axes of usual steps."""

USUAL_RULES = ("none", "full", "dots", "save")
"""Memory rules of usual steps."""

USUAL_STATES = (StatePlan(), StatePlan(moments="int8"), StatePlan(master="split"))
"""Number formats of the state of usual steps."""

NEARER_MARGIN = 0.12
"""Margin that replaces the others if the piece of the step that needs the most memory was compiled."""

TPU_MARGIN = 0.2
"""Margin that replaces `MARGIN` on a TPU: of steps that are not usual, and of asynchronous pipelines."""

PIPELINED_TPU_MARGIN = 0.25
"""Margin of steps with a synchronous pipeline on a TPU. Along a tensor axis, XLA may split the residual stream."""

WIDE_MARGIN = 0.3
"""Margin of steps that hold weights in several copies (`holds_weight_copies`), and of steps for which fewer than
`LEAST_PROGRAMS` errors are recorded: partly trained ones, asynchronous pipelines on a GPU, all pipelines on a CPU."""

LEAST_PROGRAMS = 5
"""Least number of recorded pipelined steps for which a margin below `WIDE_MARGIN` is used."""

StepKind = Literal["any", "usual", "irregular", "gathered", "pipelined", "asynchronous"]
"""Kinds of steps whose errors are recorded apart."""


@dataclasses.dataclass(frozen=True)
class Factors:
    """Factors fitted to compiled programs of one kind of platform, or of one chip.

    Args:
        packing: the compiler's bytes of temporaries, divided by the estimated live bytes at the peak.
        gather: share of a gathered weight that is in memory at any one time.
    """

    packing: float = 1.0
    gather: float = 1.0


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Recorded errors of estimates, relative to the bytes that the compiler reports.

    Args:
        programs: number of compiled programs.
        median: median of the absolute errors, as a share of the compiled bytes.
        worst: largest absolute error, as a share of the compiled bytes.
        worst_today: the same without errors of before a rule that was inferred from the step; `None` if it is equal.
        is_compiled: whether the piece that needs the most memory was compiled.
        is_pipelined: whether the programs have a pipeline.
        is_held_out: whether the programs are held-out cases, on which nothing was fitted.
    """

    programs: int
    median: float
    worst: float
    worst_today: float | None = None
    is_compiled: bool = False
    is_pipelined: bool = False
    is_held_out: bool = False

    def __str__(self) -> str:
        step_kind = "pipelined train steps" if self.is_pipelined else "train steps"
        step_kind += " that nothing was fitted on" * self.is_held_out
        condition = ", with the piece that needs the most memory compiled," if self.is_compiled else ""
        today = "" if self.worst_today is None else f" ({self.worst_today:.0%} by the rules of today)"
        return (
            f"estimates of {self.programs} compiled {step_kind}{condition} were off by {self.median:.0%} in the "
            f"median, {self.worst:.0%} at worst{today}"
        )


@functools.cache
def _recorded_sections() -> dict:
    """Return the sections of `accuracy.json` by name."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def factors(chip: Chip) -> Factors:
    """Return the factors of a chip: those fitted to its own programs, others of its kind. What is not recorded is 1."""
    recorded_factors = _recorded_sections().get("factors", {})
    return Factors(**recorded_factors.get(chip.kind, {}) | recorded_factors.get(chip.name, {}))


def recorded_accuracy(kind: str, *, is_compiled: bool = False) -> Accuracy | None:
    """Return the recorded errors of estimates of the calibration set; `None` if none are recorded.

    Args:
        kind: "tpu", "gpu" or "cpu".
        is_compiled: whether the piece that needs the most memory was compiled.
    """
    fields = _recorded_sections().get("compiled" if is_compiled else "accuracy", {}).get(kind)
    return None if fields is None else Accuracy(**fields, is_compiled=is_compiled)


def held_out_accuracy(kind: str, step_kind: StepKind = "any") -> Accuracy | None:
    """Return the recorded errors on held-out cases, without compiled pieces; `None` if none are recorded.

    Args:
        kind: "tpu", "gpu" or "cpu".
        step_kind: "usual" for usual steps (`is_usual`), "irregular" for steps whose blocks run in no loop or in cycles
            of unlike blocks, "gathered" for steps that hold weights in several copies (`holds_weight_copies`),
            "pipelined" for steps with a synchronous pipeline, "asynchronous" for those with an
            asynchronous one, "any" for all others.
    """
    section_name = "held out" if step_kind == "any" else f"held out, {step_kind}"
    fields = _recorded_sections().get(section_name, {}).get(kind)
    is_pipelined = step_kind in ("pipelined", "asynchronous")
    return None if fields is None else Accuracy(**fields, is_pipelined=is_pipelined, is_held_out=True)


def kind_of(
    chip: Chip, plan: Plan, optimizer: Optimizer, *, slices: int = 1, has_regular_blocks: bool = True
) -> StepKind:
    """Return the kind of a step, by which errors are recorded.

    Args:
        chip: chip that the step would run on.
        plan: plan of the step.
        optimizer: optimizer of the step.
        slices: number of TPU slices.
        has_regular_blocks: whether the model's blocks run in a loop, and are alike.
    """
    if plan.pipeline is not None:
        return "asynchronous" if plan.asynchronous else "pipelined"
    if holds_weight_copies(chip, plan):
        return "gathered"
    if not has_regular_blocks:
        return "irregular"
    return "usual" if slices == 1 and is_usual(chip, plan, optimizer) else "any"


def holds_weight_copies(chip: Chip, plan: Plan) -> bool:
    """Return whether a step may hold several copies of whole weights at once, whose number the estimate assumes.

    Under ZeRO 1 and 2 without microbatches, XLA for a TPU 7x copies gathered weights of two-byte types to other tiles,
    some of them ahead of time.

    Args:
        chip: chip that the step would run on.
        plan: plan of the step.

    Example:
        >>> from jaxscale.platforms.platform import Platform
        >>> plan = Plan(zero=2, precision="bfloat16")
        >>> [holds_weight_copies(Platform.parse(name).chip, plan) for name in ("tpu 7x:2x2x1", "gpu h100")]
        [True, False]
    """
    return chip.name == "7x" and plan.zero in (1, 2) and plan.precision != "float32" and plan.microbatches == 1


def is_usual(chip: Chip, plan: Plan, optimizer: Optimizer) -> bool:
    """Return whether a step with regular blocks is of the kind whose recorded errors are smallest.

    Such a step runs on a TPU v5e, v5p or v6e, computes in bfloat16, and has AdamW as optimizer. Its plan differs from
    the default only as those of recorded steps do: in mesh, ZeRO stage, microbatches, memory rule and state.

    Args:
        chip: chip that the step would run on.
        plan: plan of the step.
        optimizer: optimizer of the step.

    Example:
        >>> from jaxscale.platforms.platform import Platform
        >>> v6e, plan = Platform.parse("tpu v6e:2x2").chip, Plan(precision="bfloat16", zero=3)
        >>> is_usual(v6e, plan, Optimizer()), is_usual(v6e, plan, Optimizer("muon"))
        (True, False)
    """
    usual_plan = Plan(precision="bfloat16")
    varied_names = ("mesh", "zero", "microbatches", "memory", "state")
    has_usual_plan = (
        all(
            getattr(plan, field.name) == getattr(usual_plan, field.name)
            for field in dataclasses.fields(Plan)
            if field.name not in varied_names
        )
        and plan.memory.rule in USUAL_RULES
        and plan.memory.objective == usual_plan.memory.objective
        and plan.state in USUAL_STATES
        and (plan.mesh is None or all(size == 1 or axis in USUAL_AXES for axis, size in plan.mesh.sizes.items()))
    )
    has_usual_optimizer = optimizer.name == "adamw" and optimizer.ema is None and not optimizer.groups
    return chip.name in USUAL_CHIPS and has_usual_plan and has_usual_optimizer


def margin(
    kind: str, step_kind: StepKind = "any", *, is_compiled: bool = False, is_partly_trained: bool = False
) -> float:
    """Return the least difference between estimate and memory limit that decides whether a step fits.

    The difference is a share of the limit.

    Args:
        kind: "tpu", "gpu" or "cpu".
        step_kind: kind of the step, as in `held_out_accuracy`.
        is_compiled: whether the piece that needs the most memory was compiled.
        is_partly_trained: whether some parameters are not trained.
    """
    if is_partly_trained and not is_compiled:
        return WIDE_MARGIN
    if step_kind in ("pipelined", "asynchronous"):
        recorded_errors = held_out_accuracy(kind, step_kind)
        if recorded_errors is None or recorded_errors.programs < LEAST_PROGRAMS:
            return WIDE_MARGIN
    if is_compiled:
        return NEARER_MARGIN
    margin_by_kind = {"usual": NARROW_MARGIN, "irregular": IRREGULAR_MARGIN, "gathered": WIDE_MARGIN}
    if kind == "tpu":
        margin_by_kind["pipelined"] = PIPELINED_TPU_MARGIN
    return margin_by_kind.get(step_kind, TPU_MARGIN if kind == "tpu" else MARGIN)
