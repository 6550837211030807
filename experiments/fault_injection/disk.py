"""A disk that is full, read-only or over a quota at chosen moments of a run, and with room again.

The run directory, and in some cases the cache of tokens, lie on a file system in memory of limited size, which needs
root; it is filled just before a chosen call of a function. Sound is one error with exit code 2, or a run that ends well
because the file was not essential. Every checkpoint that was committed before is then as it was, and the same command,
with room again, ends with the log lines and the arrays of an undisturbed run, bit for bit.

A limit of the size of files (EFBIG) is set with RLIMIT_FSIZE. Quotas need a kernel and a file system with them: the
error EDQUOT of a write is faked, for the log and for whole files alone.
"""

import contextlib
import dataclasses
import errno
import functools
import importlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fault_injection.damage import array_sums, judge, snapshot, words_of
from fault_injection.forks import STEPS, Worker, run_command, warm_up, write_experiment
from fault_injection.kills import described, last_lines

LIMIT_SECONDS = 120.0
DISK_BYTES = 24 << 20


@dataclasses.dataclass(frozen=True)
class Moment:
    """A moment at which the disk is spoiled.

    Args:
        name: name of the moment.
        function: module, and name of a function or of a method, before whose call it happens; "" for before the run.
        number: number of the call, from 1.
        fault: "full", "read-only", "too large" (EFBIG) or "quota" (EDQUOT).
        left_bytes: bytes that are left on a full disk, or in a file that may not grow.
        is_continued: whether a run that stopped at step 6 is continued.
        has_cache: whether the cache of tokens lies on the disk, too.
        has_output: whether stdout and stderr are files on the disk, too.
    """

    name: str
    function: str = ""
    number: int = 1
    fault: str = "full"
    left_bytes: int = 0
    is_continued: bool = False
    has_cache: bool = False
    has_output: bool = False


LOG, STORE = "jaxscale.records.metrics", "jaxscale.checkpoint.store"
FILES, PAGE = "jaxscale.records.directory", "jaxscale.report.page"
MOMENTS = (
    Moment("before the run"),
    Moment("before the run, 40 KB left", left_bytes=40_000),
    Moment("before the run, 150 KB left", left_bytes=150_000),
    Moment("lock", f"{FILES}:lock_run"),
    Moment("experiment.json", f"{FILES}:write_values"),
    Moment("plan.json", f"{FILES}:write_json", 2),
    Moment("tokenizer.json", "jaxscale.training.loop:write_text_files"),
    Moment("source", "jaxscale.records.source:Source.write"),
    Moment("sums.json", "jaxscale.records.source:write_sums"),
    Moment("the log is opened", f"{LOG}:MetricsLog.__init__"),
    Moment("first line of the log", f"{LOG}:MetricsLog.append"),
    Moment("a line of the log", f"{LOG}:MetricsLog.append", 9),
    Moment("a line of the log, 100 bytes left", f"{LOG}:MetricsLog.append", 12, left_bytes=100),
    Moment("TensorBoard", f"{LOG}:_EventFile.flush"),
    Moment("layout.json", f"{FILES}:write_json", 3),
    Moment("first save", f"{STORE}:Checkpoints.save_arrays"),
    Moment("second save", f"{STORE}:Checkpoints.save_arrays", 2),
    Moment("second save, 8 KB left", f"{STORE}:Checkpoints.save_arrays", 2, left_bytes=8_000),
    Moment("third save, 40 KB left", f"{STORE}:Checkpoints.save_arrays", 3, left_bytes=40_000),
    Moment("last save", f"{STORE}:Checkpoints.save_arrays", 6),
    Moment("a save in the background", f"{STORE}:Checkpoints.wait", 4),
    Moment("rotation", f"{STORE}:Checkpoints._prune", 3),
    Moment("samples", "jaxscale.records.samples:append_sample"),
    Moment("report", f"{PAGE}:write_report"),
    Moment("report, 4 KB left", f"{PAGE}:write_report", left_bytes=4_000),
    Moment("the output, while logging", f"{LOG}:MetricsLog.append", 9, has_output=True),
    Moment("the output alone", f"{PAGE}:write_report", has_output=True),
    Moment("heartbeat", "jaxscale.heartbeat:Writer._write", 2),
    Moment("cache of tokens", "jaxscale.data.cache:_encode", has_cache=True),
    Moment("cache of tokens is renamed", "jaxscale.data.cache:_load", 2, has_cache=True),
    Moment("a continued run", is_continued=True),
    Moment("restore", f"{STORE}:Checkpoints.restore_arrays", is_continued=True),
    Moment("evaluation of a continued run", "jaxscale.training.pauses:Pauses._evaluate", is_continued=True),
    Moment("read-only before the run", fault="read-only"),
    Moment("read-only before a continued run", fault="read-only", is_continued=True),
    Moment("no large file, in the log", f"{LOG}:MetricsLog.append", 9, "too large", 200),
    Moment("no large file, in a save", f"{STORE}:Checkpoints.save_arrays", 2, "too large", 10_000),
    Moment("no large file, in the report", f"{PAGE}:write_report", 1, "too large", 4_000),
    Moment("quota, in the log", f"{LOG}:MetricsLog.append", 9, "quota"),
    Moment("quota, in a whole file", f"{FILES}:write_values", 1, "quota"),
    Moment("quota, in the report", f"{PAGE}:write_report", 1, "quota"),
)


class Disk:
    """A file system of limited size.

    Args:
        path: folder to mount it at.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self) -> None:
        """Mount it, empty."""
        self.path.mkdir(exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.path)]
        subprocess.run(words, check=True, capture_output=True)

    def unmount(self) -> None:
        """Unmount it."""
        subprocess.run(["umount", "-l", str(self.path)], check=True, capture_output=True)

    def fill(self, left_bytes: int) -> None:
        """Fill it, except for some bytes."""
        filler = self.path / "filler"
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
            for piece_bytes in (1 << 16, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(piece_bytes)) == piece_bytes:
                        pass
        os.truncate(filler, max(0, filler.stat().st_size - left_bytes))

    def remount(self, mode: str) -> None:
        """Make it read-only ("ro") or writable ("rw")."""
        subprocess.run(["mount", "-o", f"remount,{mode}", str(self.path)], check=True, capture_output=True)

    def free(self) -> None:
        """Give room again."""
        self.remount("rw")
        (self.path / "filler").unlink(missing_ok=True)


def act(words: list[str]) -> tuple[int, Any]:
    """Serve a request in a worker: run `train`, spoil the disk meanwhile, and read the last checkpoint.

    Args:
        words: the fields of the moment as JSON or "", path of the disk, step to stop at or "", folder of the cache, and
            the words of the command.
    """
    moment_json, disk_path, stop_step, cache, *command = words
    os.environ["JAXSCALE_CACHE"] = cache
    run = Path(command[command.index("--out") + 1])
    is_reached: list[int] = []
    with contextlib.ExitStack() as stack:
        if moment_json:
            moment = Moment(**json.loads(moment_json))
            stack.enter_context(_output(Path(disk_path) / "output.txt" if moment.has_output else None))
            stack.enter_context(_spoiled(moment, Disk(Path(disk_path)), is_reached))
        if stop_step:
            stack.enter_context(_stopping(int(stop_step)))
        code = run_command(command)
    sums = array_sums(run, STEPS) if code == 0 and not stop_step else None
    return code, [len(is_reached), sums]


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[None]:
    """Collect the output in a file, or in a pipe, to which a limit of the size of files does not apply."""
    streams = (1, 2)
    saved = [os.dup(stream) for stream in streams]
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    target = write_end if path is None else os.open(path, os.O_WRONLY | os.O_CREAT)
    for stream in streams:
        os.dup2(target, stream)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        for number, stream in zip(saved, streams, strict=True):
            os.dup2(number, stream)
        data = path.read_bytes() if path is not None else b""
        with contextlib.suppress(BlockingIOError):
            data += os.read(read_end, 1 << 16)
        os.write(1, data)
        for number in (*saved, read_end, write_end, *([target] if path is not None else [])):
            os.close(number)


@contextlib.contextmanager
def _spoiled(moment: Moment, disk: Disk, is_reached: list[int]) -> Iterator[None]:
    """Spoil the disk at a moment while the context is open; limits of this process end with it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.ExitStack() as stack:

        def spoil() -> None:
            is_reached.append(1)
            if moment.fault == "full":
                disk.fill(moment.left_bytes)
            elif moment.fault == "read-only":
                disk.remount("ro")
            elif moment.fault == "too large":
                resource.setrlimit(resource.RLIMIT_FSIZE, (moment.left_bytes, limits[1]))
            else:
                _fake_quota(stack)

        stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        if moment.function:
            stack.enter_context(_before_call(moment.function, moment.number, spoil))
        else:
            spoil()
        yield


@contextlib.contextmanager
def _before_call(function: str, number: int, action: Callable[[], None]) -> Iterator[None]:
    """Run an action before the call of a number of a function of a module, or of a method of a class there."""
    module_name, _, path = function.partition(":")
    module: Any = importlib.import_module(module_name)
    owner_name, _, name = path.rpartition(".")
    owner = getattr(module, owner_name) if owner_name else module
    inner, calls = getattr(owner, name), []

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            action()
        return inner(*args, **kwargs)

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, inner)


def _stopping(step: int) -> contextlib.AbstractContextManager[None]:
    """Send this process SIGTERM before a step."""
    return _before_call("jaxscale.step.train_step:TrainStep.__call__", step, lambda: os.kill(os.getpid(), 15))


def _fake_quota(stack: contextlib.ExitStack) -> None:
    """Let the log and whole files fail with EDQUOT until the stack is closed."""
    from jaxscale.records import storage

    def fail(*_: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    storage_module: Any = storage
    fsync, write = os.fsync, storage.LocalAppender.write

    def write_nothing(self: Any, data: bytes) -> None:
        with storage_module._add_path_to_errors(self.path):
            fail()

    appender: Any = storage.LocalAppender
    os.fsync, appender.write = fail, write_nothing
    stack.callback(setattr, os, "fsync", fsync)
    stack.callback(setattr, storage.LocalAppender, "write", write)


def try_moment(moment: Moment, home: Path, disk: Disk, twin: Path, sums: Any, work: Worker) -> dict[str, Any]:
    """Spoil the disk at a moment of a run, give room again and finish the run; return the row about it."""
    run = disk.path / "run"
    cache = str(disk.path / "cache" if moment.has_cache else home / "cache")
    words = words_of("train", home / "run", "plain")
    words[words.index("--out") + 1] = str(run)
    faults: list[str] = []
    output = ""
    disk.mount()
    try:
        if moment.is_continued:
            ended = work(["", "", "6", cache, *words], LIMIT_SECONDS)
            faults += [] if ended.code == 75 else [f"the first part ended with {ended.code}"]
        before: dict[str, str] = {}
        committed: list[Path] = []

        def look() -> None:
            """Take note of the checkpoints that are whole."""
            for path in sorted((run / "checkpoints").glob("[0-9]" * 8)):
                if path not in committed:
                    committed.append(path)
                    before.update({f"{path.name}/{name}": word for name, word in snapshot(path).items()})

        look()
        moment_json = json.dumps(dataclasses.asdict(moment))
        ended = work([moment_json, str(disk.path), "", cache, *words], LIMIT_SECONDS, look)
        code = ended.code
        faults += judge(ended)
        output += f"--- code {code}\n{ended.text}\n"
        if ended.result is None or not ended.result[0]:
            faults.append("the moment was not reached")
        if ended.text.count("jaxscale: ") > 1:
            faults.append("more than one message")
        disk.free()
        after = {
            f"{path.name}/{name}": word for path in committed if path.exists() for name, word in snapshot(path).items()
        }
        newest_names = sorted(path.name for path in committed)[-5:]  # the run itself removes older ones
        changed_names = [name for name in before if name[:8] in newest_names and before[name] != after.get(name)]
        faults += [f"{changed_names[0]} of a checkpoint was lost or changed"] if changed_names else []
        message = next((line for line in ended.text.splitlines() if "jaxscale: " in line), "")
        again = work(["", "", "", cache, *words], LIMIT_SECONDS)
        output += f"--- again: code {again.code}\n{again.text}\n"
        faults += [f"again: {text}" for text in judge(again, (0,))]
        if not faults:
            faults += _differences(run, twin, again.result[1], sums)
    finally:
        disk.unmount()
    if faults:
        print(f"FAIL {moment.name}: {'; '.join(faults)}\n{output}", flush=True)
    return {
        "name": moment.name,
        "outcome": "; ".join(faults) or f"code {code}, then equal bit for bit",
        "detail": message.replace(str(disk.path), "DISK")[:240],
        "is_sound": not faults,
        "replay": f"--part disk --only '{moment.name}'",
    }


def _differences(run: Path, twin: Path, run_sums: Any, twin_sums: Any) -> list[str]:
    """Return how a finished run differs from its twin."""
    lines, twin_lines = last_lines(run), last_lines(twin)
    wrong_steps = [step for step in range(1, STEPS + 1) if lines.get(step) != twin_lines.get(step)]
    texts = [f"{len(wrong_steps)} log lines from step {wrong_steps[0]} on differ"] if wrong_steps else []
    texts += [] if run_sums == twin_sums else ["other arrays"]
    texts += [] if described(run, STEPS)["data"] == described(twin, STEPS)["data"] else ["other state of the data"]
    texts += [f"{path.name} is left" for path in run.rglob("*") if path.name.endswith(".half") or "tmp" in path.name]
    return texts


def run_disk(count: int, seed: int, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Spoil the disk at moments of a run, and return a row for each.

    Args:
        count: number of moments; a smaller number than all takes a random choice.
        seed: of the choice.
        only: names of moments; empty for a choice.
    """
    if os.geteuid():
        detail = "a file system of limited size is mounted, which needs root"
        return [{"name": "disk", "tried": 0, "outcome": "skipped", "detail": detail, "is_sound": True}]
    moments = [moment for moment in MOMENTS if not only or moment.name in only]
    if count < len(moments):
        moments = random.Random(seed).sample(moments, count)
    with tempfile.TemporaryDirectory(prefix="disk-") as name:
        root = Path(name)
        warm_up(root)
        home = root / "home"
        home.mkdir()
        write_experiment(home)
        work = Worker(act, root)
        twin = home / "twin"
        words = words_of("train", home / "run", "plain")
        words[words.index("--out") + 1] = str(twin)
        ended = work(["", "", "", str(home / "cache"), *words], 300)
        assert ended.code == 0, ended.text
        disk = Disk(root / "disk")
        rows = [try_moment(moment, home, disk, twin, ended.result[1], work) for moment in moments]
        work.close()
        shutil.rmtree(home)
    return rows
