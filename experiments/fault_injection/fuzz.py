"""Every reader of files under Atheris, which follows the branches that an input takes and keeps inputs with new ones.

Each target (`readers.py`, `run_readers.py`) runs in a process of its own. A tenth of the mutations change bytes, the
others change the values in the file (`mutate.py`); a share goes through libFuzzer's mutations, too. A warning counts as
a fault, as do more than 2 GB of memory and an input that takes more than 10 s. One input, without Atheris:

    PYTHONPATH=experiments python -m fault_injection.fuzz "plan.json" path/of/input
"""

import contextlib
import importlib
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fault_injection.chat_readers import CHAT_TARGETS
from fault_injection.mutate import mutated
from fault_injection.planted import PLANTED
from fault_injection.readers import TARGETS, Target, words_of
from fault_injection.run_readers import RUN_TARGETS

INSTALL = "pip install 'jaxscale[fuzz]'"
TARGET_BY_NAME: dict[str, Target] = {target.name: target for target in (*TARGETS, *CHAT_TARGETS, *RUN_TARGETS)}
SECONDS = 600
"""Longest time of a target."""
MEMORY_MB = 2048
INPUT_SECONDS = 10
MAX_INPUT_BYTES = 65_536
PLANTED_RUNS = 50_000
"""Runs in which a planted fault must be found."""
RESULT, INPUT = "result.json", "input"


def run_fuzz(count: int, seed: int, only: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield a row for each target, run `count` times or for `SECONDS`, and for each planted fault.

    Args:
        count: runs of each target.
        seed: of the mutations.
        only: names of targets or planted faults; empty for all.
    """
    if importlib.util.find_spec("atheris") is None:
        print(f"faults: the part fuzz needs the package atheris, which is not installed: {INSTALL}", file=sys.stderr)
        raise SystemExit(2)
    for name in TARGET_BY_NAME:
        if not only or name in only:
            yield _row(name, "", count, seed)
    for name in PLANTED:
        if not only or name in only:
            yield _row(PLANTED[name].target, name, PLANTED_RUNS, seed)


def _row(target: str, planted: str, count: int, seed: int) -> dict[str, Any]:
    """Run a target in a process of its own, and return the row about it; a planted fault must be found."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    root = Path(__file__).parents[2]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root / "experiments"), str(root)))}
    variables |= {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "0"}
    start_time = time.monotonic()
    with (folder / "log.txt").open("wb") as log, _work_folder() as work:
        words = [sys.executable, "-m", "fault_injection.fuzz", "--fuzz", target, str(folder), str(work)]
        words += [str(count), str(seed), planted]
        code = subprocess.run(words, env=variables, stdout=log, stderr=subprocess.STDOUT).returncode
    seconds = time.monotonic() - start_time
    log_text = (folder / "log.txt").read_text(errors="replace")
    result_path = folder / RESULT
    result = json.loads(result_path.read_text()) if result_path.exists() else {}
    coverages = [int(edges) for edges in re.findall(r"cov: (\d+)", log_text)]
    peaks = [int(megabytes) for megabytes in re.findall(r"rss: (\d+)Mb", log_text)]
    runs = result.get("runs") or max(map(int, re.findall(r"^#(\d+)", log_text, re.MULTILINE)), default=0)
    edges_text = f"{coverages[0]:,} to {coverages[-1]:,} edges" if coverages else "no coverage"
    detail = f"{runs:,} runs in {seconds:.0f} s, {edges_text}, at most {max(peaks, default=0):,} MB"
    error = ""
    if code != 0:
        error = result.get("error") or next(iter(re.findall(r"ERROR: libFuzzer: (.*)", log_text)), f"code {code}")
        detail = f"{error}; {detail}"
    if code != 0 and not planted:
        inputs = [path for path in folder.iterdir() if path.name.startswith((INPUT, "crash-", "timeout-", "oom-"))]
        input_text = f"'{inputs[0]}'" if inputs else f"(no input; the log is {folder / 'log.txt'})"
        detail += f"\n     one input: PYTHONPATH=experiments python -m fault_injection.fuzz '{target}' {input_text}"
    has_found = bool(planted) and re.match(PLANTED[planted].error, error) is not None
    is_sound = has_found if planted else code == 0 and runs > 0
    if is_sound:
        shutil.rmtree(folder)
    return {
        "name": f"{target}, planted: {planted}" if planted else target,
        "tried": runs,
        "outcome": ("found" if has_found else "NOT FOUND") if planted else "sound" if is_sound else "fault",
        "detail": detail,
        "is_sound": is_sound,
        "seconds": round(seconds, 1),
        "edges": coverages[-1] if coverages else 0,
        "megabytes": max(peaks, default=0),
        "replay": f"--part fuzz --only '{planted or target}' --count {count} --seed {seed}",
    }


@contextlib.contextmanager
def _work_folder() -> Iterator[Path]:
    """Yield an empty folder, in memory where that is possible."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=parent) as name:
        yield Path(name)


def _fuzz(name: str, out: Path, work: Path, count: int, seed: int, planted: str) -> None:
    """Run a target under libFuzzer, which ends the process.

    Args:
        name: name of the target.
        out: folder for the corpus, inputs that fail, and the result.
        work: folder in which files are read.
        count: number of runs.
        seed: of the mutations.
        planted: name of a fault to plant first; "" for none.
    """
    atheris: Any = importlib.import_module("atheris")
    target = TARGET_BY_NAME[name]
    with atheris.instrument_imports(include=["jaxscale"]):
        import jaxscale

        run, files = target.prepare(work)
        for file in files:
            run(file)
    if planted:
        PLANTED[planted].plant()
    corpus = out / "corpus"
    corpus.mkdir()
    for number, file in enumerate(files):
        (corpus / f"seed-{number}").write_bytes(file)
    words = words_of(target, files)
    package = os.path.dirname(jaxscale.__file__ or "") + os.sep
    run_count = 0

    def write_result(error: str) -> None:
        (out / RESULT).write_text(json.dumps({"runs": run_count, "error": error}))

    def test_one_input(data: bytes) -> None:
        nonlocal run_count
        run_count += 1
        try:
            run(data)
        except BaseException as error:
            frames = [
                frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(package)
            ]
            place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
            (out / INPUT).write_bytes(data)
            write_result(f"{type(error).__name__}{place}: {str(error)[:200]}")
            raise
        if run_count == count:
            write_result("")

    def mutate(data: bytes, max_bytes: int, mutation_seed: int) -> bytes:
        rng = random.Random(mutation_seed)
        mutation = mutated(data, target.form, words, rng)
        if rng.random() < 0.1:
            mutation = atheris.Mutate(mutation[:max_bytes], max_bytes)
        return mutation[:max_bytes]

    options = {
        "runs": count,
        "max_total_time": SECONDS,
        "rss_limit_mb": MEMORY_MB,
        "timeout": INPUT_SECONDS,
        "max_len": MAX_INPUT_BYTES,
        "mutate_depth": 1,
        "len_control": 0,
        "seed": seed % 2**31 or 1,
        "artifact_prefix": f"{out}{os.sep}",
    }
    arguments = [sys.argv[0], *(f"-{option}={value}" for option, value in options.items()), str(corpus)]
    atheris.Setup(arguments, test_one_input, custom_mutator=mutate)
    atheris.Fuzz()


def main(arguments: Sequence[str]) -> None:
    """Run a target on one input, or under libFuzzer in the process that `run_fuzz` starts."""
    warnings.simplefilter("error")
    if arguments[:1] == ["--fuzz"]:
        _, name, out, work, count, seed, planted = arguments
        _fuzz(name, Path(out), Path(work), int(count), int(seed), planted)
        return
    if len(arguments) != 2 or arguments[0] not in TARGET_BY_NAME:
        sys.exit(f"usage: python -m fault_injection.fuzz TARGET INPUT, with a target of {', '.join(TARGET_BY_NAME)}")
    with _work_folder() as folder:
        run, _ = TARGET_BY_NAME[arguments[0]].prepare(folder)
        run(Path(arguments[1]).read_bytes())
        print(f"{arguments[0]}: the file is read, or refused with a message")


if __name__ == "__main__":
    main(sys.argv[1:])
