"""Where an experiment came from: its file, variant and overrides, enough to make the same experiment again.

An experiment file is Python with a function `experiment()` and, where it has variants, a literal
`VARIANTS = {"name": function}`. What can be wrong with a file is found by reading it (`outline.py`), before anything
heavy is imported. A run keeps a copy of the text under `source/`; the copy is run again as if it lay where it came
from, so that `Path(__file__).parent` and imports of its neighbours resolve. Left out: copies of the neighbours and of
the data.
"""

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
from jaxscale.training.outline import no_variant, outline
from jaxscale.training.storage import run_path

if TYPE_CHECKING:
    from jaxscale.step.experiment import Experiment
    from jaxscale.step.plan import Plan

FOLDER, FACTS = "source", "source.json"


@dataclasses.dataclass(frozen=True)
class Source:
    """What made an experiment, to be kept with its run.

    Args:
        name: the experiment's.
        text: of the experiment file; `None` where there is none (an experiment made in a script or notebook).
        path: where that file lies, absolute.
        relative: the same as seen from the working directory, where it lies below it.
        variant: which of the file's variants; `None` is `experiment()`.
        overrides: fields set on the command line: text by dotted path.
        plan: the plan that replaced the experiment's, as JSON.
        seed: the experiment's.
        versions: of Python and the packages that decide what a step computes.
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
        """Of the text."""
        return None if self.text is None else hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def file(self) -> str | None:
        """Name of the copy."""
        return None if self.path is None else Path(self.path).name

    @property
    def module(self) -> str | None:
        """Name of the module that the text runs as."""
        return None if self.path is None else _module(Path(self.path))

    def remake(self) -> "Experiment":
        """The same experiment made again, in this process or another one."""
        from jaxscale.step.plan import Plan

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
        """The source that `write` put there.

        Raises:
            UserError: there is none, it cannot be read, or the copy is not what was run.
        """
        folder = run_path(run_dir) / FOLDER
        facts = values.read_json(folder / FACTS)
        if not isinstance(facts, dict):
            raise UserError(f"{folder / FACTS}: got a {type(facts).__name__}, expected the facts of a source")
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
                f"{str(digest)[:12]}): put it back, or train anew from the changed file"
            )
        return source


def written_sha256(run_dir: Any) -> str | None:
    """Hash of the experiment file in source.json of a run; `None` where that has none, or cannot be read."""
    try:
        facts = values.read_json(run_path(run_dir) / FOLDER / FACTS)
    except UserError:
        return None
    found = facts.get("sha256") if isinstance(facts, dict) else None
    return found if isinstance(found, str) else None


def versions() -> dict[str, str]:
    """Versions of Python, JAX, Flax, optax and this package; none of them is imported for it."""
    found = {"python": platform.python_version(), "jaxscale": jaxscale.__version__}
    return found | {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")}


def load(
    path: str | Path,
    variant: str | None = None,
    overrides: Mapping[str, str] | None = None,
    plan: "Plan | None" = None,
) -> "tuple[Experiment, Source]":
    """The experiment of a file, and where it came from.

    Args:
        path: the experiment file.
        variant: one of its `VARIANTS`.
        overrides: text by dotted path, set last: `{"model.embed": "256"}`.
        plan: takes the place of the experiment's.

    Raises:
        UserError: what `outline` finds; the file raises; it returns no Experiment; an override does not fit.
    """
    seen = outline(path, variant)
    made = _call(seen.text, seen.path, seen.path, variant)
    experiment = _apply(made, plan, overrides or {})
    below = seen.path.resolve().is_relative_to(Path.cwd())
    source = Source(
        name=experiment.name,
        text=seen.text,
        path=str(seen.path),
        relative=os.path.relpath(seen.path.resolve()) if below else None,
        variant=variant,
        overrides={name.replace("-", "_"): text for name, text in (overrides or {}).items()},
        plan=None if plan is None else values.to_json(plan),
        seed=experiment.seed,
    )
    return experiment, source


def load_experiment(run_dir: Any) -> "Experiment":
    """The experiment of a run directory, made again by the copy of its file, with the plan that ran.

    The copy runs as if it lay where it came from; where that file has moved together with the run (a repository that
    was copied elsewhere), as if it lay there. Without a file, experiment.json gives the values.

    Raises:
        UserError: the directory holds no run; its file raises here; it was made by code that no file holds.
    """
    from jaxscale.step.experiment import Experiment
    from jaxscale.step.plan import Plan, read_plan

    folder = run_path(run_dir)
    ran = read_plan(folder / "plan.json") if (folder / "plan.json").exists() else None
    source = Source.read(folder) if (folder / FOLDER / FACTS).exists() else None
    if source is None or source.text is None:
        data = values.read_json(folder / "experiment.json")
        if values.has_code(data):
            raise UserError(
                f"{folder} was made in Python by an experiment that holds code, which experiment.json cannot give "
                "back: give the experiment again from Python, or train it from an experiment file"
            )
        experiment = values.from_json(Experiment, data, str(folder / "experiment.json"))
        return experiment if ran is None else dataclasses.replace(experiment, plan=ran)
    assert source.path is not None
    origin = _origin(source, folder)
    plan = None if source.plan is None else values.from_json(Plan, source.plan, str(folder / FOLDER / FACTS))
    gone = (
        ""
        if origin.exists()
        else f"{folder} was made by {origin}, which is no longer there: what lies beside it (data, tokenizer, modules) "
        "is not found unless it is put back"
    )
    try:
        made = _call(source.text, folder / FOLDER / str(source.file), origin, source.variant)
        # the plan that ran takes the place of any other
        kept = {path: text for path, text in source.overrides.items() if ran is None or not path.startswith("plan.")}
        experiment = _apply(made, plan, kept)
    except UserError as error:
        raise UserError(f"{error}\n{gone}" if gone else str(error)) from None
    if gone:
        warnings.warn(gone, stacklevel=2)
    return experiment if ran is None else dataclasses.replace(experiment, plan=ran)


def _origin(source: Source, folder: Any) -> Path:
    """Where the experiment file lies now: its old place, or the same place seen from here or from above the run."""
    assert source.path is not None
    origin = Path(source.path)
    if origin.exists() or source.relative is None:
        return origin
    above = Path(os.fspath(folder)).absolute().parents
    moved = (base / source.relative for base in (Path.cwd(), *above))
    return next((path for path in moved if path.is_file()), origin)


def _apply(experiment: "Experiment", plan: "Plan | None", overrides: Mapping[str, str]) -> "Experiment":
    if plan is not None:
        experiment = dataclasses.replace(experiment, plan=plan)
    return values.override(experiment, overrides) if overrides else experiment


def _module(origin: Path) -> str:
    return f"experiment.{origin.stem}"


def _call(text: str, shown: Any, origin: Path, variant: str | None) -> "Experiment":
    """Run the text as the module at `origin` and call its function; `shown` is the file that messages name."""
    from jaxscale.step.experiment import Experiment

    module = types.ModuleType(_module(origin))
    module.__file__ = str(origin)
    # dataclasses and pickles look their module up by name
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(origin.parent))
    # so that a traceback shows the lines that ran, wherever the file is by then
    linecache.cache[str(shown)] = (len(text), None, text.splitlines(keepends=True), str(shown))
    step = "importing it"
    try:
        exec(compile(text, str(shown), "exec", dont_inherit=True), module.__dict__)
        function = getattr(module, "experiment", None)
        step = "experiment()"
        if variant is not None:
            known = getattr(module, "VARIANTS", {})
            if variant not in known:
                raise no_variant(shown, variant, known)
            function, step = known[variant], f"the variant {variant}"
        if not callable(function):
            raise UserError(f"{shown}: {step} is a {type(function).__name__}, expected a function that takes nothing")
        made = function()
    except UserError as error:
        where = _where(error, str(shown))
        raise UserError(f"{where}: {error}" if where else str(error)) from None
    except Exception as error:
        where = _where(error, str(shown)) or str(shown)
        line = _line(error, str(shown))
        raise UserError(f"{where}: {step} raised {type(error).__name__}: {error}{line}") from error
    finally:
        sys.path.remove(str(origin.parent))
    if not isinstance(made, Experiment):
        raise UserError(f"{shown}: {step} returned a {type(made).__name__}, expected an Experiment")
    return made


def _frame(error: BaseException, shown: str) -> traceback.FrameSummary | None:
    """The last frame of the experiment file itself."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == shown]
    return frames[-1] if frames else None


def _where(error: BaseException, shown: str) -> str:
    frame = _frame(error, shown)
    return f"{shown}, line {frame.lineno}" if frame else ""


def _line(error: BaseException, shown: str) -> str:
    frame = _frame(error, shown)
    return f"\n    {frame.line}" if frame and frame.line else ""
