"""Runs of earlier code: interrupted after two updates, with the losses that followed.

    python -m tests.system.earlier_runs NAME ...       records runs that `earlier_runs/` lacks; all of them by default

A run is recorded once, by the code of its day, and never again: later code has to open it.
"""

import importlib
import json
import shlex
import shutil
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("earlier_runs")
HERE = Path(__file__).parent
LEFT_OUT = ("report.html", "tensorboard", "profile")
"""Of an archive: what is made of the rest."""
SMALL = "--model.embed 8 --model.heads 2 --model.mlp 16"
RUNS = {
    "decoder": SMALL,
    "vit": "vit",
    "resnet": "resnet",
    "foreign": "foreign",
    "linen": "linen_net",
    "powersgd": f"{SMALL} --plan.mesh replica:2 --plan.reduce powersgd:2",
    "topk": f"{SMALL} --plan.mesh replica:2,fsdp:2 --plan.zero 2 --plan.reduce topk:0.25",
    "diloco": f"{SMALL} --plan.mesh replica:2 --plan.diloco every=2",
    "2bw": f"{SMALL} --plan.pipeline 2bw:2x4 --plan.mesh data:2",
    "pipemare": f"{SMALL} --plan.pipeline pipemare:2 --plan.mesh replica:2 --plan.reduce int8",
    "one_bit_adam": f"{SMALL} --plan.mesh replica:2 --optimizer one_bit_adam --optimizer.freeze 1",
    "state_int8": "--plan.mesh fsdp:2 --plan.zero 1 --plan.state.moments int8",
    "split": "--plan.mesh data:2 --plan.state.master split --plan.precision bfloat16 --plan.state.moments int4",
    "host": f"{SMALL} --plan.mesh fsdp:2 --plan.offload.optimizer-state host --plan.memory full",
    "chimera": f"{SMALL} --plan.pipeline chimera:2x4 --plan.mesh data:2",
    "soap": f"{SMALL} --optimizer soap --plan.mesh fsdp:2 --plan.zero 2",
}
"""Variant of `tiny.py`, and flags, as they are spelled today. Each model family, each kind of state."""


def words(name: str, folder: Path) -> list[str]:
    """The command that trains a run, but for `--out`."""
    return ["train", str(folder / "tiny.py"), *shlex.split(RUNS[name]), "--steps", "4"]


def opened(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A run unpacked into a folder, as if it had been made there, and what was recorded: losses by step, versions."""
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    source = folder / "run" / "source" / "source.json"
    origin = Path(json.loads(source.read_text())["path"]).parent
    for file in (source, folder / "run" / "experiment.json"):
        file.write_text(file.read_text().replace(str(origin), str(folder)))
    return folder / "run", json.loads((folder / "expected.json").read_text())


def main(names: list[str]) -> None:
    """Record runs."""
    from tests.system.data import write_data
    from tests.system.whole import MIDDLE, command, compiled_once, stopped_after
    from tests.training.watching import last_lines

    FOLDER.mkdir(exist_ok=True)
    for name in names or [name for name in RUNS if not (FOLDER / f"{name}.tar.xz").exists()]:
        with tempfile.TemporaryDirectory() as place, compiled_once():
            folder = Path(place)
            write_data(folder)
            shutil.copy(HERE / "tiny.py", folder)
            command(*words(name, folder), "--out", str(folder / "undisturbed"))
            with stopped_after(MIDDLE):
                command(*words(name, folder), "--out", str(folder / "run"), codes=(75,))
            lines = last_lines(folder / "undisturbed")
            expected = {"lines": lines, "jax": version("jax")}
            (folder / "expected.json").write_text(json.dumps(expected))
            for left in LEFT_OUT:
                path = folder / "run" / left
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            with tarfile.open(FOLDER / f"{name}.tar.xz", "w:xz", preset=9) as archive:
                for part in ("run", "expected.json"):
                    archive.add(folder / part, part)
        print(f"{name:14} {(FOLDER / f'{name}.tar.xz').stat().st_size / 1024:7.1f} KiB", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    importlib.import_module("tests.conftest")  # sets the backend's flags, before JAX is imported
    main(sys.argv[1:])
