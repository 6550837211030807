"""Calibration: one factor for a chip and a version of jaxlib, by which modeled seconds are multiplied.

    factor = median of a run's measured seconds of a step / modeled seconds of the same step

The factor changes no order of plans. It corrects the seconds that are shown, and gives seconds to a chip whose rates
are unknown, such as a CPU, whose plans are ordered by assumed ones.
"""

import dataclasses
import importlib.metadata
import json
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxscale.errors import UserError
from jaxscale.planning.search.model_costs import has_rates
from jaxscale.planning.search.step_seconds import StepSeconds, modeled_seconds
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.records.storage import write_whole
from jaxscale.values import from_json, read_json, to_json
from jaxscale.values.units import duration

LEAST_STEPS = 20
"""Least number of measured steps of a calibration."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A factor by which modeled seconds are multiplied, and where it was measured.

    Args:
        factor: measured seconds over modeled ones.
        steps: number of measured steps.
        experiment: name of the experiment.
        jaxlib: version of jaxlib.
    """

    factor: float
    steps: int
    experiment: str
    jaxlib: str

    def __str__(self) -> str:
        return f"scaled by {self.factor:.3g}, as measured in {self.steps} steps of {self.experiment}"


def calibration_of(platform: Platform) -> Calibration | None:
    """Return the stored calibration of a platform's chip and this version of jaxlib; `None` if there is none.

    Args:
        platform: platform to plan for.

    Raises:
        UserError: the file of calibrations is damaged.
    """
    path = calibration_file()
    if path is None or not path.exists():
        return None
    entry = _stored(path).get(_chip_name(platform))
    if entry is None:
        return None
    calibration = from_json(Calibration, entry, str(path))
    if not (math.isfinite(calibration.factor) and calibration.factor > 0):
        raise UserError(f"{path}: got a factor of {calibration.factor}, expected a number above 0; remove the file")
    return calibration if calibration.jaxlib == importlib.metadata.version("jaxlib") else None


def calibrated(seconds: StepSeconds, platform: Platform) -> StepSeconds:
    """Return modeled seconds, multiplied by the factor of the platform's calibration if there is one.

    Args:
        seconds: modeled seconds without a calibration.
        platform: platform to plan for.
    """
    calibration = calibration_of(platform)
    return seconds if calibration is None else seconds.scaled(calibration.factor)


def is_timed(platform: Platform) -> bool:
    """Return whether modeled seconds are more than proportions: the rates are known, or there is a calibration."""
    return has_rates(platform) or calibration_of(platform) is not None


def calibrate(experiment: Experiment, plan: Plan, platform: Platform, measured: Sequence[float]) -> str:
    """Store the calibration of a platform's chip from the steps of a run; return a sentence about it.

    Args:
        experiment: the experiment that ran.
        plan: its plan, with a mesh and a memory rule that is resolved.
        platform: platform on which it ran.
        measured: seconds of its steps.

    Raises:
        UserError: there are fewer than `LEAST_STEPS` steps, the plan's memory rule has no price, or there is no folder
            in which to store the calibration.
    """
    check_step_count(len(measured))
    path = calibration_file()
    if path is None:
        raise UserError("recalibrate: there is no folder for the calibration; set JAXSCALE_CACHE to a writable one")
    used_platform = platform
    if platform.chip.kind != "tpu" and plan.mesh is not None:  # a run may use some of the devices
        used_platform = dataclasses.replace(platform, chips=max(1, plan.mesh.devices // platform.chip.devices))
    modeled, median = modeled_seconds(experiment, used_platform, plan).total, statistics.median(measured)
    jaxlib_version = importlib.metadata.version("jaxlib")
    calibration = Calibration(median / modeled, len(measured), experiment.name, jaxlib_version)
    content = _stored(path) | {_chip_name(platform): to_json(calibration)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"recalibrate: {path} cannot be written: {error.strerror}; set JAXSCALE_CACHE") from error
    return (
        f"measured {duration(median)} a step, modeled {duration(modeled)}: stored the factor {calibration.factor:.3g} "
        f"for {_chip_name(platform)} and jaxlib {jaxlib_version} in {path}"
    )


def check_step_count(count: int) -> None:
    """Refuse a calibration from too few measured steps.

    Raises:
        UserError: there are fewer than `LEAST_STEPS`.
    """
    if count < LEAST_STEPS:
        raise UserError(
            f"recalibrate: got {count} measured steps, expected at least {LEAST_STEPS}; train more steps, with "
            "--log-every 1"
        )


def calibration_file() -> Path | None:
    """Return the path of the file with the calibrations of all chips; `None` if there is no folder for it."""
    base_text = os.environ.get("JAXSCALE_CACHE")
    try:
        return (Path(base_text) if base_text else Path.home() / ".cache" / "jaxscale") / "calibration.json"
    except RuntimeError:  # there is no home
        return None


def _stored(path: Path) -> dict[str, Any]:
    """Return the content of the file of calibrations, by chip; empty if there is no file."""
    content = read_json(path) if path.exists() else {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: got a {type(content).__name__}, expected calibrations by chip; remove the file")
    return content


def _chip_name(platform: Platform) -> str:
    """Return the kind and the name of a platform's chip."""
    return " ".join(dict.fromkeys((platform.chip.kind, platform.chip.name)))
