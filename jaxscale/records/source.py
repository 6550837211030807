"""The source of an experiment: the file, variant and overrides from which the same experiment can be built again.

An experiment file is a Python file with a function `experiment()` and, if there are variants, a literal
`VARIANTS = {"name": function}`. The file's text is checked (`outline.py`) before JAX is imported. A run keeps a copy of
the file under `source/`. The copy runs under the path of the original file, so that `Path(__file__).parent` and imports
of files in the same folder work. Those other files and data are not copied.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import linecache
import os
import platform
import subprocess
import sys
import traceback
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxscale
from jaxscale import values
from jaxscale.errors import UserError
from jaxscale.records.moved_modules import new_import_path, provide_old_paths
from jaxscale.records.outline import MAX_SOURCE_BYTES, no_variant_error, outline
from jaxscale.records.storage import run_path, write_whole
from jaxscale.records.sums import check_sums, write_sums
from jaxscale.records.trusted_sources import check_trust, record_trust
from jaxscale.values.limits import MAX_NAME_BYTES
from jaxscale.values.read_files import read_bytes
from jaxscale.values.user_frames import advice_on, frames_and_lines_of, place_of

if TYPE_CHECKING:
    from jaxscale.recipe.experiment import Experiment
    from jaxscale.recipe.plan import Plan

FOLDER, SOURCE_JSON = "source", "source.json"


@dataclasses.dataclass(frozen=True)
class Source:
    """The origin of an experiment, stored with its run.

    Args:
        name: name of the experiment.
        text: text of the experiment file; `None` if there is no file (for an experiment from a script or notebook).
        path: absolute path of the experiment file.
        relative: path of the experiment file relative to the working directory, if the file is below that directory.
        variant: name of the file's variant; `None` stands for `experiment()`.
        overrides: texts of the fields that the command line set, by dotted path.
        plan: the plan that replaced the experiment's plan, as JSON; `None` if the plan was not replaced.
        seed: seed of the experiment.
        versions: versions of Python and of the packages that a step's results depend on.
        command: the command line that made the experiment; `None` for `jaxscale train` with an experiment file.
    """

    name: str
    text: str | None = None
    path: str | None = None
    relative: str | None = None
    variant: str | None = None
    overrides: dict[str, str] = dataclasses.field(default_factory=dict)
    plan: dict[str, Any] | None = None
    seed: int = 0
    versions: dict[str, str] = dataclasses.field(default_factory=lambda: versions())
    command: str | None = None

    @property
    def sha256(self) -> str | None:
        """SHA-256 of the experiment file's text; `None` without a file."""
        return None if self.text is None else hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def file(self) -> str | None:
        """Name of the copied file; `None` without a file."""
        return None if self.path is None else Path(self.path).name

    @property
    def module(self) -> str | None:
        """Name of the module that the experiment file becomes when it runs; `None` without a file."""
        return None if self.path is None else f"experiment.{Path(self.path).stem}"

    def remake(self) -> "Experiment":
        """Run the experiment file again, perhaps in another process, and return the same experiment."""
        from jaxscale.recipe.plan import Plan

        assert self.path is not None
        plan = None if self.plan is None else values.from_json(Plan, self.plan, "the plan")
        return load_file(self.path, self.variant, self.overrides, plan)[0]

    def with_batch(self, batch: int) -> "Source":
        """Return the source of the same experiment with `batch` rows in its global batch."""
        return dataclasses.replace(self, overrides={**self.overrides, "batch": str(batch)})

    def trust(self) -> None:
        """Record that the user trusts the experiment file, so that runs with it may be opened again."""
        if self.sha256 is not None:
            record_trust(self.sha256, Path(str(self.path)))

    def write(self, run_dir: Any) -> None:
        """Write a copy of the experiment file, and source.json, to the folder `source/` of a run directory.

        Call this after the run's other files are written, because it also writes `sums.json`. It records the experiment
        file as trusted, since the user trains with it.
        """
        folder = run_path(run_dir) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        if self.text is not None:
            assert self.file is not None
            write_whole(folder / self.file, self.text)
        source_json = dataclasses.asdict(self)
        del source_json["text"]
        source_json |= {"file": self.file, "sha256": self.sha256, "git": git_commit(self.path), "platform": host_text()}
        write_whole(folder / SOURCE_JSON, json.dumps(source_json, indent=2) + "\n")
        write_sums(run_dir)
        self.trust()

    @classmethod
    def read(cls, run_dir: Any) -> "Source":
        """Read the source that `write` stored in a run directory.

        Raises:
            UserError: no source is stored, the source cannot be read, or the copied file has changed since the run.
        """
        folder = run_path(run_dir) / FOLDER
        source_json = values.read_json(folder / SOURCE_JSON)
        if not isinstance(source_json, dict):
            raise UserError(f"{folder / SOURCE_JSON}: got a {type(source_json).__name__}, expected a JSON object")
        file_name, stored_sha256 = source_json.pop("file", None), source_json.pop("sha256", None)
        for name in ("git", "platform"):  # only reports read these
            source_json.pop(name, None)
        text = None
        if file_name is not None:
            if not _is_plain_name(file_name):
                raise UserError(
                    f"{folder / SOURCE_JSON}: file: got {file_name!r:.200}, expected the name of a file in source/"
                )
            if not (folder / file_name).exists():
                raise UserError(
                    f"{folder / file_name} is missing: the run cannot be rebuilt without its experiment file; restore "
                    "the file"
                )
            text = read_bytes(folder / file_name, MAX_SOURCE_BYTES).decode("utf-8", "replace")
        source = values.from_json(cls, {**source_json, "text": text}, str(folder / SOURCE_JSON))
        if source.file != file_name:  # messages would show one name, while the file with the other name is executed
            raise UserError(
                f"{folder / SOURCE_JSON}: file: got {file_name!r:.200}, expected {source.file!r:.200}, the name in path"
            )
        if source.sha256 != stored_sha256:
            raise UserError(
                f"{folder / str(file_name)} was changed since the run (sha256 {str(source.sha256)[:12]}, expected "
                f"{str(stored_sha256)[:12]}): restore the file, or train again from the changed file"
            )
        return source


def git_commit(path: str | None) -> str | None:
    """Return the commit hash of the git repository that contains `path`; `None` outside a repository.

    If `path` is `None`, it stands for the working directory. "with changes" follows the hash if tracked files differ
    from the commit.
    """
    folder = Path.cwd() if path is None else Path(path).parent
    output_texts: list[str] = []
    for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no")):
        try:
            process = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=5)
        except (OSError, ValueError, subprocess.TimeoutExpired):  # git is not installed, or the disk is slow
            return output_texts[0] if output_texts else None
        if process.returncode:
            return None
        output_texts.append(process.stdout.strip())
    return output_texts[0] + " with changes" * bool(output_texts[1])


def host_text() -> str:
    """Return a text with this machine's system, architecture and core count, such as "Linux x86_64, 8 cores"."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"


def _is_plain_name(name: Any) -> bool:
    """Return whether a JSON value is a valid file name without a folder."""
    is_name = isinstance(name, str) and Path(name).name == name and name not in ("", "..")
    return is_name and len(name.encode(errors="replace")) <= MAX_NAME_BYTES


def written_sha256(run_dir: Any) -> str | None:
    """Return the SHA-256 of the experiment file from a run's source.json; `None` if no hash is stored."""
    try:
        source_json = values.read_json(run_path(run_dir) / FOLDER / SOURCE_JSON)
    except UserError:
        return None
    stored_sha256 = source_json.get("sha256") if isinstance(source_json, dict) else None
    return stored_sha256 if isinstance(stored_sha256, str) else None


def versions() -> dict[str, str]:
    """Return the versions of Python, jaxscale, JAX, Flax and optax, by name, without importing the last three."""
    version_by_name = {"python": platform.python_version(), "jaxscale": jaxscale.__version__}
    return version_by_name | {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")}


def load_file(
    path: str | Path,
    variant: str | None = None,
    overrides: Mapping[str, str] | None = None,
    plan: "Plan | None" = None,
) -> "tuple[Experiment, Source]":
    """Run an experiment file, and return its experiment and its source.

    Args:
        path: the experiment file, or the name of an example of the package, such as "shakespeare".
        variant: name of one of the file's `VARIANTS`; `None` runs `experiment()`.
        overrides: texts of new values, by the dotted paths of the fields: `{"model.embed": "256"}`. The overrides are
            applied after `plan`.
        plan: plan that replaces the experiment's plan.

    Returns:
        The experiment, and the `Source` from which it can be built again.

    Raises:
        UserError: the file is not an experiment file, raises an error, or does not return an Experiment; or an override
            is not valid.

    Example:
        >>> experiment, source = load_file("shakespeare", overrides={"steps": "20"})
        >>> experiment.steps, source.name
        (20, 'shakespeare')
    """
    file_outline = outline(path, variant)
    file_path = file_outline.path
    base_experiment = _make_experiment(file_outline.text, file_path, origin=file_path, variant=variant)
    experiment = _apply_changes(base_experiment, plan, overrides or {})
    is_below_cwd = file_path.resolve().is_relative_to(Path.cwd())
    source = Source(
        name=experiment.name,
        text=file_outline.text,
        path=str(file_path),
        relative=os.path.relpath(file_path.resolve()) if is_below_cwd else None,
        variant=variant,
        overrides={name.replace("-", "_"): text for name, text in (overrides or {}).items()},
        plan=None if plan is None else values.to_json(plan),
        seed=experiment.seed,
    )
    return experiment, source


def trust_run(run_dir: Any) -> None:
    """Record that the user trusts the experiment file of a run. Opening the run executes this file.

    Raises:
        UserError: the source cannot be read, or the copied file has changed since the run.
    """
    folder = run_path(run_dir)
    if (folder / FOLDER / SOURCE_JSON).exists():
        source = Source.read(folder)
        if source.sha256 is not None:
            record_trust(source.sha256, _origin(source, folder))


def load_experiment(run_dir: Any) -> "Experiment":
    """Rebuild the experiment of a run directory, from the copy of its experiment file, with the plan of the run.

    The copy runs under the file's original path, or under a new path if the file has moved together with the run (in a
    copied repository). Without an experiment file, the values come from experiment.json.

    Raises:
        UserError: the directory contains no run, its experiment file is not trusted or raises an error, or there is no
            experiment file and the experiment contains code.
    """
    from jaxscale.recipe.experiment import Experiment
    from jaxscale.recipe.plan import Plan, ignoring_moved_fields, read_plan

    folder = run_path(run_dir)
    check_sums(folder, "plan.json")
    run_plan = read_plan(folder / "plan.json") if (folder / "plan.json").exists() else None
    source = Source.read(folder) if (folder / FOLDER / SOURCE_JSON).exists() else None
    if source is None or source.text is None:
        check_sums(folder, "experiment.json", f"{FOLDER}/{SOURCE_JSON}")
        experiment_json = values.read_json(folder / "experiment.json")
        if values.has_code(experiment_json):
            raise UserError(
                f"{folder} was made in Python by an experiment that holds code, which cannot be restored from "
                "experiment.json: pass the experiment again from Python, or train from an experiment file"
            )
        experiment = values.from_json(Experiment, experiment_json, str(folder / "experiment.json"))
        return experiment if run_plan is None else dataclasses.replace(experiment, plan=run_plan)
    assert source.path is not None
    origin = _origin(source, folder)
    check_trust(str(source.sha256), origin, folder, folder / FOLDER / str(source.file))
    check_sums(folder, f"{FOLDER}/{SOURCE_JSON}")
    source_plan = None
    if source.plan is not None:
        source_plan = values.from_json(Plan, source.plan, str(folder / FOLDER / SOURCE_JSON))
    moved_note = ""
    if not origin.exists():
        moved_note = (
            f"{folder} was made by {origin}, which is no longer there. Files in the same folder (data, tokenizer, "
            "modules) are not found: put them back if the experiment needs them"
        )
    try:
        provide_old_paths(source.text)
        # the run's plan replaces the plan of the file, which may be in an earlier format
        with ignoring_moved_fields() if run_plan is not None else contextlib.nullcontext():
            base_experiment = _make_experiment(source.text, folder / FOLDER / str(source.file), origin, source.variant)
        overrides = {
            name: text for name, text in source.overrides.items() if run_plan is None or not name.startswith("plan.")
        }
        experiment = _apply_changes(base_experiment, source_plan, overrides)
    except UserError as error:
        raise UserError(f"{error}\n{moved_note}" if moved_note else str(error)) from None
    if moved_note:
        warnings.warn(moved_note, stacklevel=2)
    return experiment if run_plan is None else dataclasses.replace(experiment, plan=run_plan)


def _origin(source: Source, folder: Any) -> Path:
    """Return the path under which the copy of an experiment file runs.

    If the original file still exists, this is its path. Otherwise, the relative path is tried below the working
    directory and below each parent folder of the run. If no file is found, the original path is returned.
    """
    assert source.path is not None
    origin = Path(source.path)
    if origin.exists() or source.relative is None:
        return origin
    parents = Path(os.fspath(folder)).absolute().parents
    candidate_paths = (parent / source.relative for parent in (Path.cwd(), *parents))
    return next((path for path in candidate_paths if path.is_file()), origin)


def _apply_changes(experiment: "Experiment", plan: "Plan | None", overrides: Mapping[str, str]) -> "Experiment":
    """Replace the experiment's plan, unless `plan` is `None`, then apply the overrides, and return the experiment."""
    planned_experiment = experiment if plan is None else dataclasses.replace(experiment, plan=plan)
    return values.override(planned_experiment, overrides) if overrides else planned_experiment


def _make_experiment(text: str, file: Any, origin: Path, variant: str | None) -> "Experiment":
    """Run an experiment file, and return the experiment.

    Args:
        text: content of the file.
        file: path of the file, for error messages.
        origin: path under which the file runs, as `__file__`.
        variant: name of the variant to run; `None` runs `experiment()`.
    """
    from jaxscale.recipe.experiment import Experiment

    module = types.ModuleType(f"experiment.{origin.stem}")
    module.__file__ = str(origin)
    # dataclasses and pickle find a module by its name
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(origin.parent))
    # tracebacks then show the lines of the file, even if it has moved
    linecache.cache[str(file)] = (len(text), None, text.splitlines(keepends=True), str(file))
    definition: Any = None
    action = "importing the file"  # the current action, for error messages
    try:
        exec(compile(text, str(file), "exec", dont_inherit=True), module.__dict__)
        definition = getattr(module, "experiment", None)
        action = "experiment()"
        if variant is not None:
            variants = getattr(module, "VARIANTS", {})
            if variant not in variants:
                raise no_variant_error(file, variant, variants)
            definition, action = variants[variant], f"the variant {variant}"
        is_experiment = isinstance(definition, Experiment)
        if not is_experiment and not callable(definition):
            raise UserError(
                f"{file}: got {definition!r} for {action}, expected an Experiment, or a function without "
                "parameters that returns one"
            )
        experiment = definition if is_experiment else definition()
    except UserError as error:
        location, _ = _error_location(error, str(file))
        raise UserError(f"{location}: {error}" if location else f"{place_of(definition)}{error}") from None
    except (Exception, SystemExit) as error:
        location, code_text = _error_location(error, str(file))
        if isinstance(error, ImportError) and (new_path := new_import_path(error)) is not None:
            raise UserError(f"{location or file}: {error.name} has moved: import {new_path}") from None
        error_text = f"{type(error).__name__}: {error}{_advice(error)}"
        place = place_of(definition) or f"{file}: "  # the call itself failed, before any line of the function ran
        raise UserError(f"{f'{location}: ' if location else place}{action} raised {error_text}{code_text}") from error
    finally:
        sys.path.remove(str(origin.parent))
    if not isinstance(experiment, Experiment):
        raise UserError(
            f"{place_of(definition) or f'{file}: '}{action} returned a {type(experiment).__name__}, expected an "
            f"Experiment{': return it' if experiment is None else ''}"
        )
    return experiment


def _advice(error: BaseException) -> str:
    """Return advice about an error in an experiment file, to append to the error message."""
    frames_and_lines = frames_and_lines_of(error.__traceback__)
    return advice_on(error, frames_and_lines[-1][0] if frames_and_lines else None)


def _error_location(error: BaseException, file: str) -> tuple[str, str]:
    """Return two texts about the line of the experiment file that raised an error: "FILE, line N", and the line's code.

    Both texts are empty if no line of the file was running.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if not frames:
        return "", ""
    return f"{file}, line {frames[-1].lineno}", f"\n    {frames[-1].line}" if frames[-1].line else ""
