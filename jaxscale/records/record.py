"""Read a run from its files, without JAX, for reports.

Any file may be missing, or come from an older version of jaxscale: reports matter most for runs that failed early.
"""

import dataclasses
import math
import os
import shlex
import time
from typing import Any, Literal

import numpy as np

from jaxscale.errors import UserError
from jaxscale.recipe.kernels import platform_and_kernels
from jaxscale.recipe.plan_json import upgrade
from jaxscale.records.metrics import MetricsRows, read_metrics, unreadable_lines_note
from jaxscale.records.samples import Sample, read_samples
from jaxscale.records.storage import is_remote, run_path
from jaxscale.values.limits import MAX_INT32, MAX_INT64
from jaxscale.values.read_files import parse_json, read_bytes

Status = Literal["finished", "preempted", "diverged", "stuck", "running", "stopped", "empty"]

# a run without a final event counts as stopped if its last line is older than this
_SILENT_SECONDS = 600.0
# fields of train rows that may hold the device memory in use, the preferred one first
_MEMORY_FIELDS = ("memory_bytes", "device_memory", "peak_memory_bytes", "peak_bytes", "bytes_in_use")


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The content of a run's files.

    Args:
        directory: the run's folder, as passed to `read`.
        metrics: the valid rows of metrics.jsonl.
        experiment: content of experiment.json. If a file is missing, its dict (this one or the next three) is empty.
        plan: content of plan.json.
        layout: content of layout.json (mesh, parameters, memory by kind).
        source: content of source/source.json (path, variant, overrides, seed, versions).
        samples: the samples in samples.txt.
        unread: a line of text about each file that exists but cannot be read.
    """

    directory: str
    metrics: MetricsRows
    experiment: dict[str, Any]
    plan: dict[str, Any]
    layout: dict[str, Any]
    source: dict[str, Any]
    samples: tuple[Sample, ...]
    unread: tuple[str, ...] = ()

    @classmethod
    def read(cls, directory: Any) -> "RunRecord":
        """Read the files in a run's folder."""
        folder = run_path(directory)
        unread_lines: list[str] = []
        file_names = ("experiment.json", "plan.json", "layout.json", "source/source.json")
        experiment, plan, layout, source = (_read_json(folder / name, unread_lines) for name in file_names)
        metrics, samples = MetricsRows(), list[Sample]()
        try:
            metrics, metrics_note = read_metrics(directory), unreadable_lines_note(directory)
            unread_lines += [metrics_note] if metrics_note else []
        except (OSError, UserError) as error:
            unread_lines.append(f"metrics.jsonl: {error}")
        try:
            samples = read_samples(directory)
        except (OSError, UserError) as error:
            unread_lines.append(f"samples.txt: {error}")
        return cls(
            directory=str(directory),
            metrics=metrics,
            experiment=experiment,
            plan=upgrade(plan),
            layout=_valid_layout(layout, unread_lines),
            source=source,
            samples=tuple(samples),
            unread=tuple(unread_lines),
        )

    @property
    def name(self) -> str:
        """Name of the experiment, or of the folder if experiment.json is missing."""
        return str(self.experiment.get("name") or run_path(self.directory).resolve().name or "run")

    def rows(self, kind: str) -> MetricsRows:
        """Return the valid rows of one kind: "train", "eval" or "event"."""
        return MetricsRows(row for row in self.metrics if row["kind"] == kind)

    def events(self, name: str) -> MetricsRows:
        """Return the rows of the events named `name`, such as "compile"."""
        return MetricsRows(row for row in self.metrics if row["kind"] == "event" and row.get("name") == name)

    @property
    def initial_weights(self) -> str | None:
        """A text about the weights of another run from which this run started; `None` for its own initial weights."""
        rows = self.events("init_from")
        return f"{rows[-1].get('source')}: {rows[-1].get('summary')}" if rows else None

    @property
    def step(self) -> int:
        """Number of updates so far."""
        return max((row["step"] for row in self.metrics), default=0)

    @property
    def steps(self) -> int | None:
        """Number of updates that the experiment specifies; `None` if unknown."""
        steps = self.experiment.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def status(self) -> Status:
        """Status of the run, derived from its last start or end event, its steps, and the age of its last row."""
        if not self.metrics:
            return "empty"
        for row in reversed(self.metrics):
            if row["kind"] == "event" and row.get("name") in ("finished", "preempted", "diverged", "stuck"):
                return row["name"]
            if row["kind"] == "event" and row.get("name") in ("resume", "compile"):
                break
        if self.steps is not None and self.rows("train") and self.step >= self.steps:
            return "finished"
        last_time = self.metrics[-1].get("time")
        is_silent = isinstance(last_time, int | float) and time.time() - last_time > _SILENT_SECONDS
        return "stopped" if is_silent else "running"

    @property
    def measure(self) -> str:
        """Name of the held-out loss that selects the best checkpoint, such as "loss" or "news/loss"."""
        evaluation = self.experiment.get("evaluation")
        name = evaluation.get("best") if isinstance(evaluation, dict) else None
        return name if isinstance(name, str) and any(name in row for row in self.rows("eval")) else "loss"

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and value of the lowest held-out loss named `measure`; `None` if no such loss was measured."""
        losses_and_steps = [(loss, step) for step, loss in self._held_out_losses() if np.isfinite(loss)]
        return (min(losses_and_steps)[1], min(losses_and_steps)[0]) if losses_and_steps else None

    @property
    def final(self) -> tuple[int, float] | None:
        """Step and value of the last held-out loss named `measure`; `None` if no such loss was measured."""
        steps_and_losses = self._held_out_losses()
        return steps_and_losses[-1] if steps_and_losses else None

    @property
    def loss_unit(self) -> str:
        """Unit of the loss, such as "nats per target token"; "" if the user's own loss does not declare a unit."""
        model = self.experiment.get("model")
        while isinstance(model, dict) and isinstance(model.get("model"), dict):  # adapters around a model
            model = model["model"]
        if isinstance(model, dict) and isinstance(unit := model.get("unit"), str) and unit:
            return unit
        score = model.get("score") if isinstance(model, dict) else None
        is_own = score is not None and not (isinstance(score, dict) and score.get("type") == "models.CrossEntropy")
        return "" if is_own else "nats per target token"

    @property
    def own_metric_names(self) -> list[str]:
        """Names of the other metrics that evaluations report besides `measure`, such as "accuracy" or "news/loss"."""
        metric_names = {
            name for row in self.rows("eval") for name, value in row.items() if isinstance(value, int | float)
        }
        return sorted(
            name for name in metric_names - {"step", "time", self.measure} if name.rpartition("/")[2] != "targets"
        )

    def _held_out_losses(self) -> list[tuple[int, float]]:
        """Return pairs of the step and the value of each held-out loss, in the order of their rows."""
        rows = self.rows("eval")
        return list(zip(rows.column("step").astype(int).tolist(), rows.column(self.measure).tolist(), strict=True))

    @property
    def tokens(self) -> float | None:
        """Number of target tokens so far; `None` if the number was not logged."""
        token_counts = self.rows("train").column("tokens")
        return float(np.nanmax(token_counts)) if np.isfinite(token_counts).any() else None

    @property
    def tokens_per_second(self) -> float | None:
        """Median of target tokens per second. If there are more than twenty rows, the first ten are left out."""
        rates = self.rows("train").column("tokens_per_second")
        return _median(rates[10:] if len(rates) > 20 else rates)

    @property
    def mfu(self) -> float | None:
        """Median model FLOP utilization, from 0 to 1; `None` if the chip's peak is unknown."""
        return _median(self.rows("train").column("mfu"))

    @property
    def seconds(self) -> float | None:
        """Seconds from the first row of metrics to the last one, without the pauses between a stop and a restart."""
        working_seconds, previous_time = 0.0, None
        for row in self.metrics:
            row_time = row.get("time")
            if not isinstance(row_time, int | float):
                continue
            if previous_time is not None and row.get("name") != "resume":
                working_seconds += max(0.0, row_time - previous_time)
            previous_time = row_time
        return working_seconds if previous_time is not None else None

    @property
    def memory(self) -> dict[str, float]:
        """Bytes per device of the compiled step, by kind of tensor."""
        if self.layout.get("memory"):
            return _number_fields(self.layout["memory"])
        events = self.events("compile")
        if not events:
            return {}
        field_by_kind = {
            "parameters, optimizer state, batch": "argument_bytes",
            "gradients and activations": "temp_bytes",
        }
        return _number_fields({kind: events[-1].get(field) for kind, field in field_by_kind.items()})

    @property
    def host_memory(self) -> dict[str, float]:
        """Bytes of host memory per device, by kind of tensor; an empty dict if all tensors are on the device."""
        return _number_fields(self.layout.get("host_memory"))

    @property
    def device_memory(self) -> tuple[str, np.ndarray] | None:
        """Pair of the field that logs the device memory in use, and its bytes in each train row, float64 [rows]."""
        rows = self.rows("train")
        for name in _MEMORY_FIELDS:
            bytes_by_row = rows.column(name)
            if np.isfinite(bytes_by_row).any():
                return name, bytes_by_row
        return None

    @property
    def kernels(self) -> tuple[str, str] | None:
        """Pair of texts on the last compiled step: its platform, and the implementations of its kernels."""
        events = self.events("kernels")
        return platform_and_kernels(events[-1]) if events else None

    @property
    def step_seconds(self) -> tuple[float | None, float | None]:
        """Median measured step time in seconds, and the last compiled step's modeled time; either may be `None`."""
        measured_seconds = _median(self.rows("train").column("step_seconds"))
        modeled_column = self.events("predicted").column("step_seconds")
        modeled_seconds = float(modeled_column[-1]) if len(modeled_column) and np.isfinite(modeled_column[-1]) else None
        return measured_seconds, modeled_seconds

    @property
    def parameters(self) -> int | None:
        """Number of trained parameters; `None` if unknown."""
        parameter_counts = [row["parameters"] for row in self.events("predicted") if type(row.get("parameters")) is int]
        if parameter_counts:  # the last compiled step counts
            return parameter_counts[-1]
        entries = self.layout.get("parameters", [])
        shapes = [entry["shape"] for entry in entries]
        return sum(math.prod(shape) for shape in shapes) or None

    @property
    def path(self) -> str:
        """Path of the experiment file, relative to the run's working directory if that is known; "" without a file."""
        return next((str(self.source[key]) for key in ("relative", "path", "file") if self.source.get(key)), "")

    @property
    def origin(self) -> dict[str, str]:
        """The recorded environment of the run, as texts by title: folder, commit, devices, host and versions."""
        text_by_title = {"Folder": self.directory, "File": self.path, "Variant": str(self.source.get("variant") or "")}
        text_by_title["Git commit"] = str(self.source.get("git") or "")
        device_count = self.layout.get("devices")
        if device_count is not None and self.layout.get("kind"):
            text_by_title["Devices"] = f"{device_count:,} \N{MULTIPLICATION SIGN} {self.layout['kind']}"
        text_by_title["Host"] = str(self.source.get("platform") or "")
        if self.kernels is not None:
            text_by_title["Kernels"] = f"{self.kernels[1]}, on {self.kernels[0]}"
        versions = self.source.get("versions")
        text_by_title |= (
            {str(name): str(version) for name, version in versions.items()} if isinstance(versions, dict) else {}
        )
        return {title: text[:400] for title, text in text_by_title.items() if text}

    @property
    def command(self) -> str | None:
        """The command that repeats this run; `None` if it was started from Python, without a command."""
        if isinstance(self.source.get("command"), str):
            return self.source["command"]
        if not self.path:
            return None
        variant = str(self.source.get("variant") or "")
        words = [self.path, variant, *_override_words(self.source.get("overrides"))]
        return "jaxscale train " + " ".join(shlex.quote(word) for word in words if word)


def _override_words(overrides: Any) -> list[str]:
    """Return the words of a command line that set `overrides`, which in source.json is a dict or a list of words."""
    if isinstance(overrides, dict):
        return [word for name, value in overrides.items() for word in (f"--{name}", str(value))]
    return [str(word) for word in overrides] if isinstance(overrides, list | tuple) else []


def _read_json(path: Any, unread_lines: list[str]) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty dict if the file does not exist or cannot be read.

    If the file exists but cannot be read, also append a line with the reason to `unread_lines`.
    """
    try:
        if not os.path.lexists(path) and not (is_remote(path) and path.exists()):
            return {}
        content = parse_json(read_bytes(path), "the file")
    except (OSError, ValueError) as error:
        unread_lines.append(f"{path.name}: {error}")
        return {}
    if not isinstance(content, dict):
        unread_lines.append(f"{path.name}: expected a JSON object")
        return {}
    return content


def _number_fields(content: Any) -> dict[str, float]:
    """Return the fields of a JSON object that are numbers, by name; for any other JSON value, an empty dict."""
    names_and_values = content.items() if isinstance(content, dict) else ()
    return {str(name): float(value) for name, value in names_and_values if _is_amount(value)}


def _is_amount(value: Any) -> bool:
    """Return whether a JSON value is a number that may count bytes, devices or elements."""
    return type(value) in (int, float) and 0 <= value <= MAX_INT64


def _valid_layout(layout: dict[str, Any], unread_lines: list[str]) -> dict[str, Any]:
    """Return the fields of layout.json whose values have the types that a run writes.

    For every other field, append a line to `unread_lines`.
    """
    parameters, mesh, unsplit_names = layout.get("parameters", []), layout.get("mesh"), layout.get("unsplit", [])
    is_valid_by_field = {
        "mesh": mesh is None or isinstance(mesh, str | dict),
        "devices": type(layout.get("devices", 1)) is int and 1 <= layout.get("devices", 1) <= MAX_INT32,
        "parameters": isinstance(parameters, list) and all(map(_is_parameter, parameters)),
        "unsplit": isinstance(unsplit_names, list) and all(isinstance(name, str) for name in unsplit_names),
        "capacity_bytes": layout.get("capacity_bytes") is None or _is_amount(layout["capacity_bytes"]),
    }
    invalid_fields = [name for name, is_valid in is_valid_by_field.items() if not is_valid]
    if invalid_fields:
        unread_lines.append(f"layout.json: {', '.join(invalid_fields)}: got other values than a run writes")
    return {name: value for name, value in layout.items() if name not in invalid_fields}


def _is_parameter(entry: Any) -> bool:
    """Return whether a JSON value describes a parameter in layout.json."""
    if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list):
        return False
    byte_counts = [entry.get(name, 0) for name in ("bytes", "bytes_per_device")]
    spec = entry.get("spec") or []
    axes = (
        [axis for dim_axes in spec for axis in (dim_axes if isinstance(dim_axes, list) else [dim_axes])]
        if isinstance(spec, list)
        else [0]
    )
    return (
        all(type(dim_size) is int and 0 <= dim_size <= MAX_INT64 for dim_size in entry["shape"])
        and all(map(_is_amount, byte_counts))
        and all(axis is None or isinstance(axis, str) for axis in axes)
    )


def _median(column: np.ndarray) -> float | None:
    """Return the median of a column, float64 [rows], ignoring NaN; `None` if no element is finite."""
    return float(np.nanmedian(column)) if np.isfinite(column).any() else None
