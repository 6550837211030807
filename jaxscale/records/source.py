"""Source: the file, variant and overrides of an experiment, from which the same experiment can be made again.

An experiment file is Python with a function `experiment()` and, if it has variants, a literal
`VARIANTS = {"name": function}`. Its text is checked (`outline.py`) before anything heavy is imported. A run
keeps a copy of the text under `source/`; the copy runs under its original path, so that `Path(__file__).parent` and
imports of neighbouring files resolve. Copies of those files and of the data are left out.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import linecache
import os
import platform
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
from jaxscale.records.moved_modules import new_path, provide
from jaxscale.records.outline import no_variant, outline
from jaxscale.records.storage import run_path

if TYPE_CHECKING:
    from jaxscale.recipe.experiment import Experiment
    from jaxscale.recipe.plan import Plan

FOLDER, FACTS = "source", "source.json"


@dataclasses.dataclass(frozen=True)
class Source:
    """The origin of an experiment, stored with its run.

    Args:
        name: name of the experiment.
        text: text of the experiment file; `None` without one (an experiment made in a script or notebook).
        path: absolute path of that file.
        relative: its path relative to the working directory, if the file lies below that.
        variant: name of the file's variant; `None` stands for `experiment()`.
        overrides: text of each field set on the command line, by dotted path.
        plan: the plan that replaced the experiment's, as JSON.
        seed: seed of the experiment.
        versions: versions of Python and of the packages that a step's results depend on.
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

    @property
    def sha256(self) -> str | None:
        """SHA-256 of the text."""
        return None if self.text is None else hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def file(self) -> str | None:
        """File name of the copy."""
        return None if self.path is None else Path(self.path).name

    @property
    def module(self) -> str | None:
        """Name of the module that the text runs as."""
        return None if self.path is None else f"experiment.{Path(self.path).stem}"

    def remake(self) -> "Experiment":
        """Run the experiment file again, in this or another process, and return the same experiment."""
        from jaxscale.recipe.plan import Plan

        assert self.path is not None
        plan = None if self.plan is None else values.from_json(Plan, self.plan, "the plan")
        return load(self.path, self.variant, self.overrides, plan)[0]

    def write(self, run_dir: Any) -> None:
        """Write `source/` of a run directory: the copy of the file, and source.json."""
        folder = run_path(run_dir) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        if self.text is not None:
            assert self.file is not None
            (folder / self.file).write_bytes(self.text.encode())
        facts = dataclasses.asdict(self)
        del facts["text"]
        facts |= {"file": self.file, "sha256": self.sha256}
        (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n")

    @classmethod
    def read(cls, run_dir: Any) -> "Source":
        """The source that `write` stored.

        Raises:
            UserError: no source is stored, it cannot be read, or the copy has changed since the run.
        """
        folder = run_path(run_dir) / FOLDER
        facts = values.read_json(folder / FACTS)
        if not isinstance(facts, dict):
            raise UserError(f"{folder / FACTS}: got a {type(facts).__name__}, expected a JSON object")
        file, digest = facts.pop("file", None), facts.pop("sha256", None)
        text = None
        if file is not None:
            if not (folder / file).exists():
                raise UserError(f"{folder / file} is gone: the run cannot be rebuilt without its experiment file")
            text = (folder / file).read_bytes().decode("utf-8", "replace")
        source = values.from_json(cls, {**facts, "text": text}, str(folder / FACTS))
        if source.sha256 != digest:
            raise UserError(
                f"{folder / str(file)} was changed since the run (sha256 {str(source.sha256)[:12]}, expected "
                f"{str(digest)[:12]}): restore it, or train again from the changed file"
            )
        return source


def written_sha256(run_dir: Any) -> str | None:
    """SHA-256 of the experiment file in a run's source.json; `None` without one, or if it cannot be read."""
    try:
        facts = values.read_json(run_path(run_dir) / FOLDER / FACTS)
    except UserError:
        return None
    digest = facts.get("sha256") if isinstance(facts, dict) else None
    return digest if isinstance(digest, str) else None


def versions() -> dict[str, str]:
    """Versions of Python, JAX, Flax, optax and this package, none of which is imported."""
    runtime = {"python": platform.python_version(), "jaxscale": jaxscale.__version__}
    return runtime | {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")}


def load(
    path: str | Path,
    variant: str | None = None,
    overrides: Mapping[str, str] | None = None,
    plan: "Plan | None" = None,
) -> "tuple[Experiment, Source]":
    """Run an experiment file, and return its experiment and its source.

    Args:
        path: the experiment file.
        variant: one of its `VARIANTS`.
        overrides: text of each field to set last, by dotted path, such as `{"model.embed": "256"}`.
        plan: plan that replaces the experiment's.

    Raises:
        UserError: the file is no experiment file, it raises an error or returns no Experiment, or an override does not
            fit.
    """
    file = outline(path, variant)
    experiment = _apply(_call(file.text, file.path, file.path, variant), plan, overrides or {})
    is_below_cwd = file.path.resolve().is_relative_to(Path.cwd())
    source = Source(
        name=experiment.name,
        text=file.text,
        path=str(file.path),
        relative=os.path.relpath(file.path.resolve()) if is_below_cwd else None,
        variant=variant,
        overrides={name.replace("-", "_"): text for name, text in (overrides or {}).items()},
        plan=None if plan is None else values.to_json(plan),
        seed=experiment.seed,
    )
    return experiment, source


def load_experiment(run_dir: Any) -> "Experiment":
    """Make the experiment of a run directory again by the copy of its file, with the plan of the run.

    The copy runs under the file's original path, or its new one if it has moved together with the run (a copied
    repository). Without a file, the values come from experiment.json.

    Raises:
        UserError: the directory holds no run, its file raises an error, or no file defines code that the experiment
            holds.
    """
    from jaxscale.recipe.experiment import Experiment
    from jaxscale.recipe.plan import Plan, read_plan, superseded

    folder = run_path(run_dir)
    run_plan = read_plan(folder / "plan.json") if (folder / "plan.json").exists() else None
    source = Source.read(folder) if (folder / FOLDER / FACTS).exists() else None
    if source is None or source.text is None:
        content = values.read_json(folder / "experiment.json")
        if values.has_code(content):
            raise UserError(
                f"{folder} was made in Python by an experiment that holds code, which cannot be restored "
                "from experiment.json: pass the experiment again from Python, or train it from an experiment file"
            )
        experiment = values.from_json(Experiment, content, str(folder / "experiment.json"))
        return experiment if run_plan is None else dataclasses.replace(experiment, plan=run_plan)
    assert source.path is not None
    origin = _origin(source, folder)
    plan = None if source.plan is None else values.from_json(Plan, source.plan, str(folder / FOLDER / FACTS))
    moved_note = ""
    if not origin.exists():
        moved_note = (
            f"{folder} was made by {origin}, which is no longer there: files beside it (data, tokenizer, modules) "
            "are not found unless they are put back"
        )
    try:
        provide(source.text)
        # the plan of the run replaces any other
        with superseded() if run_plan is not None else contextlib.nullcontext():
            base_experiment = _call(source.text, folder / FOLDER / str(source.file), origin, source.variant)
        overrides = {
            name: text for name, text in source.overrides.items() if run_plan is None or not name.startswith("plan.")
        }
        experiment = _apply(base_experiment, plan, overrides)
    except UserError as error:
        raise UserError(f"{error}\n{moved_note}" if moved_note else str(error)) from None
    if moved_note:
        warnings.warn(moved_note, stacklevel=2)
    return experiment if run_plan is None else dataclasses.replace(experiment, plan=run_plan)


def _origin(source: Source, folder: Any) -> Path:
    """Path of the experiment file: the original one, or its relative path below the working or a parent directory."""
    assert source.path is not None
    origin = Path(source.path)
    if origin.exists() or source.relative is None:
        return origin
    parents = Path(os.fspath(folder)).absolute().parents
    candidates = (base / source.relative for base in (Path.cwd(), *parents))
    return next((path for path in candidates if path.is_file()), origin)


def _apply(experiment: "Experiment", plan: "Plan | None", overrides: Mapping[str, str]) -> "Experiment":
    """The experiment with another plan, if there is one, and with overrides."""
    if plan is not None:
        experiment = dataclasses.replace(experiment, plan=plan)
    return values.override(experiment, overrides) if overrides else experiment


def _call(text: str, file: Any, origin: Path, variant: str | None) -> "Experiment":
    """Run the text as the module at `origin`, and return the experiment that it makes; messages name `file`."""
    from jaxscale.recipe.experiment import Experiment

    module = types.ModuleType(f"experiment.{origin.stem}")
    module.__file__ = str(origin)
    # dataclasses and pickles look their module up by name
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(origin.parent))
    # a traceback then shows these lines, even where the file has moved
    linecache.cache[str(file)] = (len(text), None, text.splitlines(keepends=True), str(file))
    action = "importing it"
    try:
        exec(compile(text, str(file), "exec", dont_inherit=True), module.__dict__)
        function = getattr(module, "experiment", None)
        action = "experiment()"
        if variant is not None:
            variants = getattr(module, "VARIANTS", {})
            if variant not in variants:
                raise no_variant(file, variant, variants)
            function, action = variants[variant], f"the variant {variant}"
        if not callable(function):
            raise UserError(f"{file}: {action} is a {type(function).__name__}, expected a function without parameters")
        experiment = function()
    except UserError as error:
        location, _ = _location(error, str(file))
        raise UserError(f"{location}: {error}" if location else str(error)) from None
    except Exception as error:
        location, line = _location(error, str(file))
        if isinstance(error, ImportError) and new_path(error) is not None:
            raise UserError(f"{location or file}: {error.name} has moved: import {new_path(error)}") from None
        raise UserError(f"{location or file}: {action} raised {type(error).__name__}: {error}{line}") from error
    finally:
        sys.path.remove(str(origin.parent))
    if not isinstance(experiment, Experiment):
        raise UserError(f"{file}: {action} returned a {type(experiment).__name__}, expected an Experiment")
    return experiment


def _location(error: BaseException, file: str) -> tuple[str, str]:
    """File and line number in the experiment file at which an error arose, and the code of that line.

    Both are empty if no line of the file was running.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if not frames:
        return "", ""
    return f"{file}, line {frames[-1].lineno}", f"\n    {frames[-1].line}" if frames[-1].line else ""
