"""Calibration: one factor for a chip and a version of jaxlib, by which modeled seconds are multiplied.

    factor = median of a run's measured seconds of a step / modeled seconds of the same step

The factor does not change the order of plans. It corrects the seconds that are shown. If a chip's rates are unknown,
like those of a CPU, plans are ordered by assumed rates. Their modeled seconds are absolute only with a calibration.
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

MODEL = 2
"""Version of the modeled seconds of a processor; a factor that was measured beside another version does not count."""
LEAST_STEPS = 20
"""Least number of measured steps of a calibration."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A factor by which modeled seconds are multiplied, and where it was measured.

    Args:
        factor: measured seconds divided by modeled seconds.
        steps: number of measured steps.
        experiment: name of the experiment that was measured.
        jaxlib: version of jaxlib that ran the experiment.
        model: version of the modeled seconds; 1 in files that do not state it.
    """

    factor: float
    steps: int
    experiment: str
    jaxlib: str
    model: int = 1

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
    entry = _stored_entries(path).get(_chip_name(platform))
    if entry is None:
        return None
    calibration = from_json(Calibration, entry, str(path))
    if not (math.isfinite(calibration.factor) and calibration.factor > 0):
        raise UserError(f"{path}: got a factor of {calibration.factor}, expected a number above 0; remove the file")
    has_other_model = platform.chip.kind == "cpu" and calibration.model != MODEL
    is_of_this_version = calibration.jaxlib == importlib.metadata.version("jaxlib") and not has_other_model
    return calibration if is_of_this_version else None


def calibrated_seconds(seconds: StepSeconds, platform: Platform) -> StepSeconds:
    """Return modeled seconds multiplied by the factor of the platform's calibration, or unchanged if there is none.

    Args:
        seconds: modeled seconds without a calibration.
        platform: platform to plan for.
    """
    calibration = calibration_of(platform)
    return seconds if calibration is None else seconds.scaled(calibration.factor)


def is_timed(platform: Platform) -> bool:
    """Return whether modeled seconds are absolute rather than only relative.

    They are absolute if the chip's rates are known, or if there is a calibration.
    """
    return has_rates(platform) or calibration_of(platform) is not None


def calibrate(experiment: Experiment, plan: Plan, platform: Platform, measured_seconds: Sequence[float]) -> str:
    """Compute a chip's calibration from the steps of a run, store it, and return a sentence about it.

    Args:
        experiment: the experiment that ran.
        plan: plan of the run, with a mesh and a resolved memory rule.
        platform: platform on which the experiment ran.
        measured_seconds: measured seconds of each step of the run.

    Raises:
        UserError: there are fewer than `LEAST_STEPS` steps, the costs of the plan's memory rule are unknown, or the
            file of calibrations cannot be written.
    """
    check_step_count(len(measured_seconds))
    path = calibration_file()
    if path is None:
        raise UserError("recalibrate: there is no folder for the calibration; set JAXSCALE_CACHE to a writable folder")
    used_platform = platform
    if platform.chip.kind != "tpu" and plan.mesh is not None:  # a run may use some of the devices
        used_platform = dataclasses.replace(platform, chips=max(1, plan.mesh.devices // platform.chip.devices))
    model_seconds, median_seconds = (
        modeled_seconds(experiment, used_platform, plan).total,
        statistics.median(measured_seconds),
    )
    jaxlib_version = importlib.metadata.version("jaxlib")
    step_count = len(measured_seconds)
    calibration = Calibration(median_seconds / model_seconds, step_count, experiment.name, jaxlib_version, MODEL)
    entry_by_chip = _stored_entries(path) | {_chip_name(platform): to_json(calibration)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(entry_by_chip, indent=2) + "\n")
    except OSError as error:
        raise UserError(
            f"recalibrate: {path} cannot be written: {error.strerror}; set JAXSCALE_CACHE to a writable folder"
        ) from error
    return (
        f"measured {duration(median_seconds)} a step, modeled {duration(model_seconds)}: stored the factor "
        f"{calibration.factor:.3g} for {_chip_name(platform)} and jaxlib {jaxlib_version} in {path}"
    )


def check_step_count(step_count: int) -> None:
    """Check that there are enough measured steps for a calibration.

    Raises:
        UserError: there are fewer than `LEAST_STEPS` steps.
    """
    if step_count < LEAST_STEPS:
        raise UserError(
            f"recalibrate: got {step_count} measured steps, expected at least {LEAST_STEPS}; train more steps, with "
            "--log-every 1"
        )


def calibration_file() -> Path | None:
    """Return the path of the file with the calibrations of all chips; `None` if there is no folder for it."""
    folder_text = os.environ.get("JAXSCALE_CACHE")
    try:
        return (Path(folder_text) if folder_text else Path.home() / ".cache" / "jaxscale") / "calibration.json"
    except RuntimeError:  # there is no home directory
        return None


def _stored_entries(path: Path) -> dict[str, Any]:
    """Return the entries of the file of calibrations, by chip; empty if there is no file."""
    entry_by_chip = read_json(path) if path.exists() else {}
    if not isinstance(entry_by_chip, dict):
        raise UserError(f"{path}: got a {type(entry_by_chip).__name__}, expected calibrations by chip; remove the file")
    return entry_by_chip


def _chip_name(platform: Platform) -> str:
    """Return the name of a platform's chip in the file of calibrations: its kind and name, such as "tpu v5e"."""
    return " ".join(dict.fromkeys((platform.chip.kind, platform.chip.name)))
