"""PlanLock: a plan with the bytes and collectives of its compiled step, to be compared with a later compilation.

A lock belongs to an experiment file. A test that runs `jaxscale check plan.lock` fails when a change to the model, to
jaxscale or to the rules makes the step need more memory or send more bytes. Another version of the compiler may have
the same effect; differences are then reported only as notes.
"""

import collections
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscale.errors import UserError
from jaxscale.values import from_json, read_json, to_json
from jaxscale.values.units import size

if TYPE_CHECKING:
    from jaxscale.compiler.report import CompileReport
    from jaxscale.recipe.experiment import Experiment
    from jaxscale.recipe.plan import Plan

LOCK_VERSION = 1
TOLERANCE = 0.05
"""Relative difference of bytes above which a step counts as changed."""
SMALL_SHARE = 0.01
"""Share of all sent bytes below which the collectives of one kind, over the same axes, are not compared."""


@dataclasses.dataclass(frozen=True)
class PlanLock:
    """A plan of an experiment file, with the bytes that its compiled step needs and sends per device.

    Args:
        file: path of the experiment file, relative to the folder of the lock.
        variant: name of one of the file's `VARIANTS`; `None` for `experiment()`.
        overrides: new text of each field of the experiment that was changed, by the field's path.
        platform: text form of the platform that the step was compiled for.
        plan: JSON of the plan.
        parameters: number of parameters of the model.
        device_bytes: bytes of device memory.
        host_bytes: bytes of host memory.
        sent_bytes: bytes of collectives in a step, by their kind and mesh axes, such as "all-gather over fsdp".
        versions: versions of jax, jaxlib and the compiler, by package.
    """

    file: str
    variant: str | None
    overrides: dict[str, str]
    platform: str
    plan: dict[str, Any]
    parameters: int
    device_bytes: int
    host_bytes: int
    sent_bytes: dict[str, int]
    versions: dict[str, str]

    def write(self, path: str | Path) -> None:
        """Write the lock to a JSON file.

        Raises:
            UserError: the file cannot be written.
        """
        from jaxscale.figures.markup import write_text

        write_text(path, json.dumps({"version": LOCK_VERSION, **to_json(self)}, indent=2) + "\n")

    def differences(self, other: "PlanLock") -> tuple[str, ...]:
        """Return one sentence for each difference in memory or communication between this lock and a later compilation.

        Args:
            other: the lock of the later compilation.
        """
        old_and_new_by_name = {
            "device memory": (self.device_bytes, other.device_bytes),
            "host memory": (self.host_bytes, other.host_bytes),
        }
        total_bytes = max(sum(self.sent_bytes.values()), sum(other.sent_bytes.values()))
        for name in sorted({*self.sent_bytes, *other.sent_bytes}):
            old_and_new_bytes = (self.sent_bytes.get(name, 0), other.sent_bytes.get(name, 0))
            if max(old_and_new_bytes) >= SMALL_SHARE * total_bytes:
                old_and_new_by_name[name] = old_and_new_bytes
        return tuple(
            f"{name}: {size(old_bytes)} in the lock, {size(new_bytes)} now"
            for name, (old_bytes, new_bytes) in old_and_new_by_name.items()
            if abs(new_bytes - old_bytes) > TOLERANCE * max(old_bytes, 1)
        )


def read_lock(path: str | Path) -> PlanLock:
    """Read a lock.

    Raises:
        UserError: the file does not exist, is not a lock, or has an unsupported version.
    """
    fields = read_json(Path(path))
    if not isinstance(fields, dict) or "sent_bytes" not in fields:
        raise UserError(f"{path}: expected a lock, as jaxscale plan FILE --lock {Path(path).name} writes it")
    version = fields.pop("version", None)
    if version != LOCK_VERSION:
        raise UserError(
            f"{path}: got lock version {version!r}, expected {LOCK_VERSION}; write it again with jaxscale plan --lock"
        )
    return from_json(PlanLock, fields, str(path))


def lock_of(
    experiment: "Experiment", source: Any, plan: "Plan", platform_text: str, report: "CompileReport", folder: Path
) -> PlanLock:
    """Return the lock of a compiled plan.

    Args:
        experiment: the experiment.
        source: the `Source` of the experiment.
        plan: plan whose step was compiled.
        platform_text: text form of the platform.
        report: the compiler's report.
        folder: folder of the lock; the path of the experiment file is stored relative to it.

    Raises:
        UserError: the compiler reported no bytes.
    """
    from jaxscale.planning.program import described_step
    from jaxscale.platforms.platform import Platform

    if report.device_bytes is None:
        raise UserError(f"--lock: the compiler reported no bytes: {report.crashed or report.oom}")
    assert plan.mesh is not None, "a chosen plan has a mesh"
    sent_bytes: dict[str, int] = collections.defaultdict(int)
    for collective in report.collectives:
        sent_bytes[f"{collective.kind} over {'+'.join(collective.axes or ('other groups',))}"] += (
            collective.bytes * collective.count
        )
    step = described_step(experiment, Platform.parse(platform_text), plan, plan.mesh.devices)
    return PlanLock(
        file=os.path.relpath(Path(source.path).resolve(), folder.resolve()),
        variant=source.variant,
        overrides=dict(source.overrides),
        platform=platform_text,
        plan=to_json(plan),
        parameters=step.parameters,
        device_bytes=report.device_bytes,
        host_bytes=report.host_bytes or 0,
        sent_bytes=dict(sent_bytes),
        versions=dict(report.versions),
    )


@dataclasses.dataclass(frozen=True)
class LockCheck:
    """The result of compiling the plan of a lock again.

    Args:
        lock: the lock.
        new_lock: the lock of the new compilation.
        path: path of the lock, for display.
    """

    lock: PlanLock
    new_lock: PlanLock
    path: str

    @property
    def differences(self) -> tuple[str, ...]:
        """One sentence for each difference in memory or communication."""
        return self.lock.differences(self.new_lock)

    @property
    def is_same_compiler(self) -> bool:
        """Whether both steps were compiled by the same versions of jax, jaxlib and the compiler."""
        return self.lock.versions == self.new_lock.versions

    @property
    def holds(self) -> bool:
        """Whether there are no differences, or a different version of the compiler may explain them."""
        return not self.differences or not self.is_same_compiler

    def __str__(self) -> str:
        answer = "holds" if not self.differences else ("is changed" if self.is_same_compiler else "holds, with notes")
        lines = [f"{self.path} {answer}: {size(self.new_lock.device_bytes)} per device on {self.new_lock.platform}"]
        lines += [f"  {difference}" for difference in self.differences]
        if not self.is_same_compiler:
            lines.append(
                f"  compiled by {_versions_text(self.new_lock.versions)}, "
                f"the lock by {_versions_text(self.lock.versions)}"
            )
        return "\n".join(lines)

    __repr__ = __str__


def check_lock(path: str | Path) -> LockCheck:
    """Compile the plan of a lock again, and compare bytes and collectives.

    Args:
        path: path of the lock; the experiment file is found relative to it.

    Raises:
        UserError: the lock cannot be read, its experiment file is missing, the number of the model's parameters has
            changed, or the step does not compile.
    """
    from jaxscale.compiler.compile import compile_report
    from jaxscale.planning.program import described_step, step_recipe
    from jaxscale.platforms.platform import Platform
    from jaxscale.recipe.plan import Plan
    from jaxscale.records.source import load_file

    lock, folder = read_lock(path), Path(path).resolve().parent
    experiment, source = load_file(folder / lock.file, lock.variant, lock.overrides)
    plan = from_json(Plan, dict(lock.plan), str(path))
    platform, mesh = Platform.parse(lock.platform), plan.mesh
    assert mesh is not None, "a lock's plan has a mesh"
    parameter_count = described_step(experiment, platform, plan, mesh.devices).parameters
    if parameter_count != lock.parameters:  # checked before the step is compiled
        raise UserError(
            f"{path} is the lock of a model with {lock.parameters:,} parameters, but {lock.file} has "
            f"{parameter_count:,} now; write a new lock with jaxscale plan --lock"
        )
    report = compile_report(step_recipe(experiment, plan, source.remake), platform)
    return LockCheck(lock, lock_of(experiment, source, plan, lock.platform, report, folder), str(path))


def _versions_text(version_by_package: Mapping[str, str]) -> str:
    """Return versions as text, such as "jax 0.7.0, jaxlib 0.7.0"."""
    return ", ".join(f"{package} {version}" for package, version in version_by_package.items())
