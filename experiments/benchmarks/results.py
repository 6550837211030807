"""The results file: one line of JSON per run of a benchmark, with its command, day and machine.

    BENCHMARK_RESULTS=append python experiments/benchmarks/chain.py

appends to `results.jsonl`, of which `page.py` writes the page of figures. A line says what was measured, where and with
which versions; it holds no host name and no path outside the repository. A run at the small size is not a result.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("results.jsonl")
VARIABLE = "BENCHMARK_RESULTS"
PACKAGES = ("jax", "jaxlib", "libtpu", "nvidia-cuda-nvcc")
"""Whose versions a line holds where they are installed: JAX, and the compilers of TPUs and GPUs."""


def asked() -> bool:
    """Whether this run was asked to append its figures."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "append"):
        raise ValueError(f"{VARIABLE} is {value!r}; set it to 'append', or leave it unset")
    return value == "append"


def append(file: Path, title: str, figures: Iterable[dict[str, Any]], arguments: Sequence[str]) -> None:
    """Append a line.

    Args:
        file: of the results.
        title: of the table.
        figures: `name`, `value`, `unit`, `bar`, `compare` and `holds` of each.
        arguments: the script and its arguments, as in `sys.argv`.

    Raises:
        ValueError: if the run was at the small size.
    """
    if any("--tiny".startswith(word) for word in arguments if word.startswith("--t")):  # argparse takes --ti too
        raise ValueError(f"the figures of a run with --tiny are no results: leave out --tiny, or {VARIABLE}")
    entry = {
        "command": command(arguments),
        "title": title,
        "date": datetime.date.today().isoformat(),
        "machine": f"{cores()} of {processor()}, {accelerator()}",
        "versions": versions(),
        "figures": list(figures),
    }
    with file.open("a") as lines:
        lines.write(json.dumps(entry) + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """Every entry, in the order of the file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def newest(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest entry of each command, in the order of the commands; of one day the last."""
    latest = {entry["command"]: entry for entry in sorted(entries, key=lambda entry: entry["date"])}
    return [latest[name] for name in sorted(latest)]


def command(arguments: Sequence[str]) -> str:
    """How a benchmark was started, from the root of the repository.

    Example:
        >>> command([str(ROOT / "experiments/benchmarks/peer.py"), "--seeds", "3", "--torch=/opt/torch/bin/python"])
        'python experiments/benchmarks/peer.py --seeds 3 --torch=python'
    """
    return shlex.join(["python", *map(portable, arguments)])


def portable(word: str) -> str:
    """An argument with a path inside the repository relative to it, and of another path its last part."""
    flag, equals, text = word.rpartition("=")
    path = Path(text)
    if not path.is_absolute() and ".." not in path.parts:
        return word
    path = path.resolve()
    return flag + equals + (path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name)


def cores() -> str:
    """How many cores this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{count} core" + "s" * (count != 1)


def processor() -> str:
    """The model of the processor, or its instruction set where the system does not name the model."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def accelerator() -> str:
    """The devices of JAX if the benchmark imported it, such as "8 x TPU v5 lite"."""
    jax = sys.modules.get("jax")
    devices = [] if jax is None else [device for device in jax.devices() if device.platform != "cpu"]
    return f"{len(devices)} x {devices[0].device_kind}" if devices else "no accelerator"


def versions() -> dict[str, str]:
    """Of Python and of the packages that are installed."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed
