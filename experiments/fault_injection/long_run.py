"""A run of many steps, watched from outside: memory, threads, open files, files of the run, and time of a step.

Each figure of the last quarter of the steps is compared with the quarter before the middle, when everything that a run
allocates once is there. The run saves, evaluates and draws samples at the usual intervals, and logs every step.
"""

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

STEPS_PER_SAVE = 500
SECONDS_PER_LOOK = 0.25
KEEP = 2
"""Number of checkpoints to keep; the best and the last good one may be older."""
GROWTH = {"RSS MiB": 1.02, "threads": 1.0, "open files": 1.0, "processor ms a step": 1.25, "log bytes a step": 1.1}
"""Largest ratio of each figure in the last quarter to that in the second one."""


@dataclasses.dataclass(frozen=True)
class Look:
    """What the system reports of a process at a moment.

    Args:
        time: seconds since 1970.
        rss: resident memory in MiB.
        threads: number of threads.
        files: number of open files.
        processor_seconds: user and system time so far.
    """

    time: float
    rss: float
    threads: int
    files: int
    processor_seconds: float


def train_long(folder: Path, steps: int) -> None:
    """Train a tiny decoder for many steps in a folder."""
    from fault_injection.kills import experiment_of

    from jaxscale.recipe.experiment import Checkpointing, Evaluation, Samples
    from jaxscale.recipe.plan import Plan
    from jaxscale.training.loop import train

    experiment = dataclasses.replace(
        experiment_of("plain", folder, steps),
        checkpoint=Checkpointing(every=STEPS_PER_SAVE, keep=KEEP, minutes=None),
        evaluation=Evaluation(every=2 * STEPS_PER_SAVE, batches=2),
        samples=Samples(prompts=("line",), every=4 * STEPS_PER_SAVE, tokens=8),
    )
    train(experiment, Plan(mesh="data:2"), out=folder / "run", quiet=True)


def look_at(pid: int) -> Look | None:
    """Return what the system reports of a process; `None` if it has ended."""
    process = Path("/proc") / str(pid)
    try:
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        times = (process / "stat").read_text().rpartition(")")[2].split()
        file_count = len(list((process / "fd").iterdir()))
        rss = int(status["VmRSS"].split()[0]) / 1024
    except (OSError, KeyError):
        return None
    seconds = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
    return Look(time.time(), rss, int(status["Threads"]), file_count, seconds)


def quarter_figures(
    looks: Sequence[Look], lines: Sequence[tuple[dict[str, Any], int]], quarter: int
) -> dict[str, float]:
    """Return the figures of a quarter of the steps.

    Args:
        looks: what the system reported, in order.
        lines: the log line of each step, and its bytes with those of the lines before it.
        quarter: number of the quarter, from 0.
    """
    piece = lines[len(lines) * quarter // 4 : len(lines) * (quarter + 1) // 4]
    start_time, end_time = piece[0][0]["time"], piece[-1][0]["time"]
    inside = [look for look in looks if start_time <= look.time <= end_time]
    step_count = len(piece) * (inside[-1].time - inside[0].time) / (end_time - start_time)
    return {
        "RSS MiB": max(look.rss for look in inside),
        "threads": median(look.threads for look in inside),  # a save and an evaluation have threads of their own
        "open files": median(look.files for look in inside),
        "processor ms a step": 1000 * (inside[-1].processor_seconds - inside[0].processor_seconds) / step_count,
        "log bytes a step": sum(byte_count for _, byte_count in piece) / len(piece),
    }


def read_lines(path: Path) -> list[tuple[dict[str, Any], int]]:
    """Return the log line of each step, and its bytes with those of the lines of other kinds before it."""
    lines, byte_count = [], 0
    for text in path.read_text().splitlines(keepends=True):
        byte_count += len(text)
        row = json.loads(text)
        if row["kind"] == "train":
            lines.append((row, byte_count))
            byte_count = 0
    return lines


def run_long(count: int, seed: int, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Train `count` steps, and return a row for each figure and one for the files.

    Args:
        count: number of steps, at least 2,000.
        seed: not used; the run is the same every day.
        only: names of rows to return; empty for all.
    """
    with tempfile.TemporaryDirectory(prefix="long-") as name:
        folder = Path(name)
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "2",
            "JAXSCALE_CACHE": str(folder / "cache"),
        }
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(__file__).parents[level]) for level in (1, 2))
        process = subprocess.Popen([sys.executable, __file__, name, str(count)], env=environment)
        looks: list[Look] = []
        while process.poll() is None:
            if (look := look_at(process.pid)) is not None:
                looks.append(look)
            time.sleep(SECONDS_PER_LOOK)
        if process.returncode != 0:
            detail = f"the run ended with {process.returncode}"
            return [{"name": "long run", "outcome": "failed", "detail": detail, "is_sound": False}]
        run = folder / "run"
        lines = read_lines(run / "metrics.jsonl")
        rows = [_row_of_files(run, lines, count)]
        early, late = (quarter_figures(looks, lines, quarter) for quarter in (1, 3))
    rows += [
        {
            "name": name,
            "outcome": f"{early[name]:.4g}, at the end {late[name]:.4g}",
            "detail": f"at most {limit:g} times",
            "is_sound": late[name] <= limit * early[name],
        }
        for name, limit in GROWTH.items()
    ]
    return [row for row in rows if not only or row["name"] in only]


def _row_of_files(run: Path, lines: Sequence[tuple[dict[str, Any], int]], count: int) -> dict[str, Any]:
    """Return the row about the files of a run: checkpoints, unfinished files, steps in the log, losses."""
    checkpoint_names = sorted(path.name for path in (run / "checkpoints").iterdir())
    unfinished = [path.name for path in run.rglob("*") if path.suffix == ".half" or "tmp" in path.name]
    is_complete = [row["step"] for row, _ in lines] == list(range(1, count + 1))
    is_finite = all(math.isfinite(row["loss"]) for row, _ in lines if row["loss"] is not None)
    file_count = sum(path.is_file() for path in run.rglob("*"))
    return {
        "name": "files",
        "outcome": f"{file_count} files, {len(checkpoint_names)} checkpoints, {len(unfinished)} unfinished",
        "detail": ("every step is logged once" if is_complete else "steps are missing in the log")
        + ("" if is_finite else ", losses are not finite"),
        "is_sound": is_complete and is_finite and not unfinished and len(checkpoint_names) <= KEEP + 2,
        "tried": count,
    }


if __name__ == "__main__":
    train_long(Path(sys.argv[1]), int(sys.argv[2]))
