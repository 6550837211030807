"""sums.json: the SHA-256 of each file from which a run's model is rebuilt. It reveals damaged files.

Commands such as `generate` rebuild the model from the plan, the overrides and the tokenizer in the run directory.
Checkpoints have checksums of their own, and a continued run compares its experiment with experiment.json.
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
"""Names of the hashed files; a run need not have all of them. source.json holds the hash of the experiment file."""


def write_sums(run_dir: Any) -> None:
    """Write sums.json with the hashes of a run's files. Call this after these files are written."""
    folder = run_path(run_dir)
    sha256_by_name = {name: _sha256(folder / name) for name in NAMES if (folder / name).exists()}
    write_whole(folder / FILE, json.dumps(sha256_by_name, indent=2) + "\n")


def check_sums(run_dir: Any, *names: str) -> None:
    """Check files of a run against sums.json before they are used. Without sums.json (early runs), check nothing.

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
    sums_json = read_json(folder / FILE)
    for name in names:
        expected_sha256 = sums_json.get(name) if isinstance(sums_json, dict) else ""
        if expected_sha256 is not None and (folder / name).exists() and _sha256(folder / name) != expected_sha256:
            raise UserError(
                f"{folder / name} is not what the run wrote: its SHA-256 is not the one in {FILE}. Restore it from a "
                "copy, or start the run again, which writes it again"
            )


def _sha256(path: Any) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(read_bytes(path)).hexdigest()
