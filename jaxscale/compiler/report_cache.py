"""Reports on compiled programs, on disk, by a hash of what determines them: program, platform, versions and options.

JAX's compilation cache writes programs for absent devices but cannot read them, so the reports are stored, not the
programs. Several processes may use one folder: a report is written completely or not at all.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from jaxscale.compat import jit_options
from jaxscale.compiler.described import LoweredFor
from jaxscale.compiler.report import CompileReport
from jaxscale.errors import UserError
from jaxscale.platforms.platform import Platform
from jaxscale.values import read_json

FORMAT = 7
"""Version of the format of reports; increased when the meaning of reports changes."""


def report_key(
    lowered: Any,
    platform: Platform,
    versions: Mapping[str, str],
    options: Mapping[str, Any],
    explain: bool,
    attached: bool,
) -> str:
    """Return the key of a report: the SHA-256 hash of everything that determines it.

    Args:
        lowered: the program, a `jax.stages.Lowered`; with `explain`, the key also depends on its source lines and
            names.
        platform: platform that the program is compiled for.
        versions: versions of the compiler and of JAX, by package.
        options: compiler options.
        explain: whether the report lists live buffers.
        attached: whether the devices are attached.
    """
    options = {**jit_options(lowered.lowered if isinstance(lowered, LoweredFor) else lowered), **options}
    facts = {
        "format": FORMAT,
        "platform": str(platform),
        "versions": dict(versions),
        "options": {name: repr(value) for name, value in sorted(options.items())},
        "environment": {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")},
        "explain": explain,
        "attached": attached,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(lowered.as_text(debug_info=explain).encode())
    return digest.hexdigest()


def read_report(folder: pathlib.Path, key: str) -> CompileReport | None:
    """Return the report stored under a key; None if the report is missing or unreadable."""
    try:
        report = CompileReport.from_json(read_json(folder / f"{key}.json"), str(folder))
    except UserError:  # missing, truncated, or of another version of jaxscale
        return None
    return dataclasses.replace(report, cached=True) if report.key == key else None


def store_report(folder: pathlib.Path, report: CompileReport) -> None:
    """Store a report under its key; if the disk is full or not writable, do nothing."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
            unfinished_file = pathlib.Path(file.name)
            try:
                json.dump(report.json(), file)
                file.flush()
                os.replace(unfinished_file, folder / f"{report.key}.json")
            finally:
                unfinished_file.unlink(missing_ok=True)
    except OSError:
        return
