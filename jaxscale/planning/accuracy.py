"""Recorded errors of memory estimates, and factors fitted to compiled programs.

`experiments/benchmarks/fit_accuracy.py --write` writes the errors on the calibration set and the factors to
`accuracy.json`; `experiments/benchmarks/fit_cases.py --write` adds the errors on held-out cases (nothing is fitted on
them), with and without a pipeline.
"""

import dataclasses
import functools
import json
from pathlib import Path

from jaxscale.platforms.platform import Chip
from jaxscale.recipe.plan import Plan

FILE = Path(__file__).with_name("accuracy.json")
"""File with the errors and factors, by kind of platform."""

MARGIN = 0.15
"""Least difference between estimate and memory limit that decides whether a step fits, as a share of the limit."""

NARROW_MARGIN = 0.1
"""Margin that replaces `MARGIN` for the steps whose recorded errors are smallest: on `NARROW_CHIPS`, in bfloat16, with
blocks in a loop, and with no setting beyond those that the recorded steps vary."""

NARROW_CHIPS = ("v5e", "v5p", "v6e")
"""Names of the chips on which a step may have the margin `NARROW_MARGIN`."""

VARIED_SETTINGS = ("mesh", "zero", "microbatches", "memory", "state")
"""Settings of a plan that the recorded steps in bfloat16 vary."""

VARIED_RULES = ("none", "full", "dots", "save")
"""Memory rules of these steps."""

NEARER_MARGIN = 0.12
"""Margin that replaces `MARGIN` if the piece of the step that needs the most memory was compiled."""

UNKNOWN_MARGIN = 0.3
"""Margin of a step for which no errors are recorded: a partly trained step, or a pipelined step on a platform with
fewer than `LEAST_PROGRAMS` records."""

LEAST_PROGRAMS = 5
"""Least number of recorded pipelined steps of a kind of platform for which the usual margin is used."""


@dataclasses.dataclass(frozen=True)
class Factors:
    """Factors fitted to compiled programs of one kind of platform.

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
        is_compiled: whether the piece that needs the most memory was compiled.
        is_pipelined: whether the programs have a pipeline.
        is_held_out: whether the programs are held-out cases, on which nothing was fitted.
    """

    programs: int
    median: float
    worst: float
    is_compiled: bool = False
    is_pipelined: bool = False
    is_held_out: bool = False

    def __str__(self) -> str:
        step_kind = "pipelined train steps" if self.is_pipelined else "train steps"
        step_kind += " that nothing was fitted on" * self.is_held_out
        condition = ", with the piece that needs the most memory compiled," if self.is_compiled else ""
        return (
            f"estimates of {self.programs} compiled {step_kind}{condition} were off by {self.median:.0%} in the "
            f"median, {self.worst:.0%} at worst"
        )


@functools.cache
def _recorded_sections() -> dict:
    """Return the sections of `accuracy.json` by name."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def factors(kind: str) -> Factors:
    """Return the factors of a kind of platform ("tpu", "gpu" or "cpu"). Factors that are not recorded are 1."""
    return Factors(**_recorded_sections().get("factors", {}).get(kind, {}))


def recorded_accuracy(kind: str, *, is_compiled: bool = False) -> Accuracy | None:
    """Return the recorded errors of estimates of the calibration set; `None` if none are recorded.

    Args:
        kind: "tpu", "gpu" or "cpu".
        is_compiled: whether the piece that needs the most memory was compiled.
    """
    fields = _recorded_sections().get("compiled" if is_compiled else "accuracy", {}).get(kind)
    return None if fields is None else Accuracy(**fields, is_compiled=is_compiled)


def held_out_accuracy(kind: str, *, is_pipelined: bool = False) -> Accuracy | None:
    """Return the recorded errors on held-out cases, without compiled pieces; `None` if none are recorded.

    Args:
        kind: "tpu", "gpu" or "cpu".
        is_pipelined: whether the steps are pipelined.
    """
    fields = _recorded_sections().get("held out, pipelined" if is_pipelined else "held out", {}).get(kind)
    return None if fields is None else Accuracy(**fields, is_pipelined=is_pipelined, is_held_out=True)


def margin(
    chip: Chip,
    plan: Plan,
    *,
    has_looped_blocks: bool = True,
    is_compiled: bool = False,
    is_partly_trained: bool = False,
) -> float:
    """Return the least difference between estimate and memory limit that decides whether a step fits.

    The difference is a share of the limit.

    Args:
        chip: chip that the step would run on.
        plan: plan of the step.
        has_looped_blocks: whether the model's blocks run in a loop.
        is_compiled: whether the piece that needs the most memory was compiled.
        is_partly_trained: whether some parameters are not trained.

    Example:
        >>> from jaxscale.platforms.platform import Platform
        >>> v6e, h100 = (Platform.parse(text).chip for text in ("tpu v6e:2x2", "gpu h100"))
        >>> margin(v6e, Plan(precision="bfloat16")), margin(v6e, Plan()), margin(h100, Plan(precision="bfloat16"))
        (0.1, 0.15, 0.15)
    """
    if is_partly_trained and not is_compiled:
        return UNKNOWN_MARGIN
    is_pipelined = plan.pipeline is not None
    recorded_errors = held_out_accuracy(chip.kind, is_pipelined=True) if is_pipelined else None
    if is_pipelined and (recorded_errors is None or recorded_errors.programs < LEAST_PROGRAMS):
        return UNKNOWN_MARGIN
    if chip.name in NARROW_CHIPS and has_looped_blocks and _has_recorded_settings(plan):
        return NARROW_MARGIN
    return NEARER_MARGIN if is_compiled else MARGIN


def _has_recorded_settings(plan: Plan) -> bool:
    """Return whether a plan computes in bfloat16 and differs from the default only as the recorded steps do."""
    varied_values = {name: getattr(plan, name) for name in VARIED_SETTINGS}
    return plan == Plan(precision="bfloat16", **varied_values) and plan.memory.rule in VARIED_RULES
