"""Wild command lines: each ends with a documented exit code, and none with a traceback.

Each runs in the process of the test, in a new folder with finished runs (`command_folder.py`, `command_lines.py`).
"""

import contextlib
import io
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fault_injection.command_folder import write_template
from fault_injection.command_lines import draw_line
from fault_injection.draws import run_draws
from fault_injection.values import prepare, rows_of

REFUSAL_SECONDS, WORK_SECONDS = 10.0, 90.0
"""Longest time of a line that is refused, and of one that trains, plans or evaluates."""
CACHE = Path(tempfile.gettempdir()) / f"jaxscale-lines-{os.getpid()}"
"""Folder of compiled programs and tokens, which all lines share."""
CODES = {
    0: "done",
    2: "refused",
    3: "does not fit",
    4: "diverged",
    5: "gave up",
    6: "mostly skipped",
    130: "interrupted",
}
"""Documented exit codes; 1 is documented for `doctor` and for errors in the user's own code."""


def train_template(folder: Path) -> tuple[str, str]:
    """Train the finished runs of the template, in a child."""
    code, output = run_line(["train", "exp.py", "--out", "run"], folder)
    piped_code, piped_output = run_line(["train", "exp.py", "piped", "--out", "piped_run", "--profile", "2:3"], folder)
    return ("done" if code == piped_code == 0 else "fault"), (output + piped_output)[-2000:]


def run_line(words: list[str], folder: Path) -> tuple[int, str]:
    """Run a command line in a folder, and return its exit code and what it wrote to stderr."""
    from jaxscale.cli.main import main

    os.chdir(folder)
    os.environ |= {"HOME": str(folder / "home"), "JAXSCALE_CACHE": str(CACHE)}
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(words)
    return code, errors.getvalue()


@contextlib.contextmanager
def copied(template: Path) -> Iterator[Path]:
    """Provide a copy of the template, whose folder is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="line-", ignore_cleanup_errors=True) as name:
        folder = Path(name) / "work"
        shutil.copytree(template, folder, symlinks=True)
        try:
            yield folder
        finally:
            os.chdir("/")


def run_one(number: int, seed: int, template: Path) -> tuple[str, str]:
    """Run the line of a number, and return its outcome."""
    command, words = draw_line(number, seed)
    start_time = time.monotonic()
    with copied(template) as folder:
        os.environ["JAXSCALE_TRUST"] = str(folder) if number % 5 else ""
        code, errors = run_line(words, folder)
    seconds = time.monotonic() - start_time
    if "Traceback" in errors:
        return "fault", f"a traceback on stderr: {errors[-600:]}"
    if code == 1 and (command == "doctor" or "Calls in your code" in errors):
        return "reported", command
    if code not in CODES and not (command in ("watch", "retry") and 0 <= code < 256):
        return "fault", f"exit code {code}: {errors[-600:]}"
    if code == 2 and not errors.strip():
        return "fault", "exit code 2 without a message"
    if code == 2 and seconds > REFUSAL_SECONDS:
        return "fault", f"refused after {seconds:.0f} s: {errors[-300:]}"
    return CODES.get(code, f"code {code}"), command


def run_commands(count: int, seed: int, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run `count` command lines, and return a row for each subcommand and each fault.

    Args:
        count: number of lines.
        seed: seed of the draws.
        only: numbers of lines; empty for all.
    """
    prepare()
    numbers = list(map(int, only)) or list(range(count))
    with tempfile.TemporaryDirectory(prefix="lines-") as name:
        template = Path(name) / "template"
        template.mkdir()
        write_template(template)
        (trained,) = run_draws(lambda _: train_template(template), [0], 300.0, 1)
        assert trained.outcome == "done", trained.detail
        try:
            outcomes = list(run_draws(lambda number: run_one(number, seed, template), numbers, WORK_SECONDS, 50))
        finally:
            shutil.rmtree(CACHE, ignore_errors=True)

        def described(number: int) -> tuple[str, str]:
            command, words = draw_line(number, seed)
            return command, "jaxscale " + " ".join(map(ascii, words))

        return rows_of(outcomes, "commands", seed, described)
