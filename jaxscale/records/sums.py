"""sums.json: the SHA-256 of each file from which the model of a run is rebuilt, so that a flipped bit does not pass.

Checkpoints have checksums of their own, and a continued run compares its experiment with experiment.json. Other
commands rebuild the model from the plan, the overrides and the tokenizer in the run directory.
"""

import hashlib
import json
from typing import Any

from jaxscale.errors import UserError
from jaxscale.records.storage import run_path, write_whole
from jaxscale.values.as_json import read_json
from jaxscale.values.read_files import read_bytes

FILE = "sums.json"
NAMES = ("experiment.json", "plan.json", "tokenizer.json", "chat_template.json", "source/source.json")
"""The files, where they exist. source.json holds the hash of the experiment file."""


def write_sums(run_dir: Any) -> None:
    """Write the hashes of a run's files, after they were written."""
    folder = run_path(run_dir)
    sums = {name: _sha256(folder / name) for name in NAMES if (folder / name).exists()}
    write_whole(folder / FILE, json.dumps(sums, indent=2) + "\n")


def check_sums(run_dir: Any, *names: str) -> None:
    """Check files of a run before they are used; runs of earlier versions have no hashes.

    Args:
        run_dir: directory of a run.
        names: some of `NAMES`.

    Raises:
        UserError: a file is not what the run wrote, or sums.json cannot be read.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "plan.json").write_text("{}")
        >>> write_sums(folder)
        >>> check_sums(folder, "plan.json")
        >>> _ = (folder / "plan.json").write_text("[]")
        >>> check_sums(folder, "plan.json")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        jaxscale.errors.UserError: .../plan.json is not what the run wrote: its SHA-256 is not the one in sums.json...
    """
    folder = run_path(run_dir)
    if not (folder / FILE).exists():
        return
    sums = read_json(folder / FILE)
    for name in names:
        expected = sums.get(name) if isinstance(sums, dict) else ""
        if expected is not None and (folder / name).exists() and _sha256(folder / name) != expected:
            raise UserError(
                f"{folder / name} is not what the run wrote: its SHA-256 is not the one in {FILE}. Restore it from a "
                "copy, or start the run again, which writes it again"
            )


def _sha256(path: Any) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(read_bytes(path)).hexdigest()
