"""Reports on disk, known by everything that decides them: program, platform, versions and options.

JAX's own compilation cache writes programs for absent devices but cannot read them back, so the reports are kept, not
the programs. Several processes may use one folder: a report appears whole or not at all.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from jaxscale.errors import UserError
from jaxscale.platforms.platform import Platform
from jaxscale.platforms.report import CompileReport

FORMAT = 5
"""Counts up when reports of the same program mean something else than before."""


def key(
    lowered: Any,
    platform: Platform,
    versions: Mapping[str, str],
    options: Mapping[str, Any],
    explain: bool,
    attached: bool,
) -> str:
    """The name of a report: the SHA-256 of all that decides it.

    Args:
        lowered: the program, `jax.stages.Lowered`; with `explain` also by the names in it.
        platform: what it is compiled for.
        versions: of the compiler and of JAX.
        options: the compiler's.
        explain: the report lists who is alive.
        attached: the devices are there.
    """
    facts = {
        "format": FORMAT,
        "platform": str(platform),
        "versions": dict(versions),
        "options": {name: repr(value) for name, value in sorted(options.items())},
        "environment": {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")},
        "explain": explain,
        "attached": attached,
    }
    hashed = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    hashed.update(lowered.as_text(debug_info=explain).encode())
    return hashed.hexdigest()


def find(folder: pathlib.Path, name: str) -> CompileReport | None:
    """The report kept under a key; None where there is none that can be read."""
    try:
        data = json.loads((folder / f"{name}.json").read_bytes())
        report = CompileReport.from_json(data, str(folder))
    except (OSError, ValueError, UserError):  # none, cut short, or of another version of ours
        return None
    return dataclasses.replace(report, cached=True) if report.key == name else None


def keep(folder: pathlib.Path, report: CompileReport) -> None:
    """Keep a report under its key. A disk that is full or cannot be written keeps nothing: a cache is no duty."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
            draft = pathlib.Path(file.name)
            try:
                json.dump(report.json(), file)
                file.flush()
                os.replace(draft, folder / f"{report.key}.json")
            finally:
                draft.unlink(missing_ok=True)
    except OSError:
        return
