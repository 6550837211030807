"""Command lines that run in a fork of a process that has imported everything, with a limit of their time.

The file of a tiny experiment of three kinds, on two of four virtual CPU devices, is here too.
"""

import contextlib
import dataclasses
import json
import os
import re
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

EXPERIMENT = """
from pathlib import Path

from jaxscale import Experiment
from jaxscale.data import Text
from jaxscale.models import Decoder
from jaxscale.optim import Optimizer
from jaxscale.recipe.experiment import Checkpointing, Evaluation, Samples
from jaxscale.recipe.plan import Plan, StatePlan

TEXT = Path(__file__).parent / "text.txt"


def experiment(embed=8, **plan):
    return Experiment(
        name="tiny",
        model=Decoder(vocab=VOCAB, context=16, layers=1, embed=embed, heads=2, mlp=2 * embed),
        data=Text(TEXT, context=16, tokenizer="char"),
        optimizer=Optimizer(warmup=3, learning_rate=1e-2),
        steps=10,
        batch=4,
        evaluation=Evaluation(every=5, batches=1),
        samples=Samples(every=5, prompts=("line ",), tokens=4),
        checkpoint=Checkpointing(every=2, keep=5, minutes=None),
        plan=Plan(**{"mesh": "data:2"} | plan),
    )


VARIANTS = {
    "plain": experiment,
    "int8": lambda: experiment(embed=64, state=StatePlan("int8")),
    "diloco": lambda: experiment(mesh="replica:2", diloco="every=3"),
}
"""
"""An experiment file; states of fewer than 4,096 numbers stay float32, so the variant int8 is wider."""
STEPS = 10
"""Updates of the experiment."""
FLAGS = (
    "--xla_force_host_platform_device_count=4 --xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0 "
    "--xla_disable_hlo_passes=all-reduce-promotion"
)


def write_experiment(folder: Path) -> Path:
    """Write the experiment file and its text to a folder, and return the file's path."""
    text = "\n\n".join(f"line {i * i % 97} of the text, with some words." for i in range(200))
    (folder / "text.txt").write_text(text)
    file = folder / "tiny.py"
    file.write_text(EXPERIMENT.replace("VOCAB", str(len(set(text)))))
    return file


def warm_up(folder: Path) -> None:
    """Import what commands need, and set the environment; the backend stays unstarted.

    Args:
        folder: holds the compiled programs, unless the environment names another folder.
    """
    import importlib

    tempfile.tempdir = str(folder)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "programs"))
    os.environ |= {
        "TMPDIR": str(folder),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": FLAGS,
        "NPROC": "8",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAXSCALE_CACHE": str(folder / "cache"),
        "JAXSCALE_MEMORY": str(folder / "memory"),
        "JAXSCALE_TRUST": str(folder),
        "TERM": "dumb",
        "COLUMNS": "100",
    }
    for name in (
        "grain", "orbax.checkpoint", "jaxscale.models.decoder_module", "jaxscale.report.page", "jaxscale.cli.main",
        "jaxscale.training.loop", "jaxscale.training.generate", "jaxscale.training.evaluate",
        "jaxscale.generation.generator", "jaxscale.checkpoint.export", "jaxscale.models.huggingface",
        "jaxscale.launch.status", "jaxscale.step.build", "rich.console", "rich.table", "tensorboardX.proto.event_pb2",
    ):  # fmt: skip
        importlib.import_module(name)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended.

    Args:
        code: exit code; `None` if it hung and was killed.
        text: what it printed to stdout and stderr.
        seconds: seconds that it took.
        peak_bytes: largest resident memory of its process.
        result: what the worker returned besides.
    """

    code: int | None
    text: str
    seconds: float
    peak_bytes: int
    result: Any = None


Act = Callable[[list[str]], tuple[int, Any]]
"""A function of the words of a request, which returns an exit code and JSON values."""


class Worker:
    """A fork of this process, which started no backend, that serves one request after another.

    The worker keeps the steps that it has built and compiled. It is forked again once it hung or died.

    Args:
        act: serves a request; an error that it raises is printed and gives code 1.
        folder: for the output, and the working directory.
        limit_bytes: address space of the worker; `None` for no limit.
    """

    def __init__(self, act: Act, folder: Path, limit_bytes: int | None = None) -> None:
        self._act, self._folder, self._limit_bytes = act, folder, limit_bytes
        self._pid = 0

    def __call__(self, words: Sequence[str], seconds: float, during: Callable[[], None] | None = None) -> Ended:
        """Serve a request, and return how it ended.

        Args:
            words: words of the request.
            seconds: limit, after which the worker is killed.
            during: called every few milliseconds meanwhile.
        """
        if not self._pid:
            self._start()
        start_time = time.monotonic()
        self._requests.write(json.dumps(list(words)) + "\n")
        self._requests.flush()
        line = ""
        while time.monotonic() < start_time + seconds:
            if during is not None:
                during()
            if select.select([self._replies], [], [], 0.005)[0]:
                line = self._replies.readline()
                break
        duration = time.monotonic() - start_time
        code, peak_bytes, result = None, 0, None
        if line:
            code, peak_bytes, result = json.loads(line)
        else:
            status = self.close()
            code = status if duration < seconds else None
        text = (self._folder / "output.txt").read_text(errors="replace")
        return Ended(code, text, duration, peak_bytes, result)

    def close(self) -> int:
        """End the worker, and return its exit code: -9 if it still lived."""
        if not self._pid:
            return 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        for file in (self._requests, self._replies):
            with contextlib.suppress(OSError):
                file.close()
        return os.waitstatus_to_exitcode(status)

    def _start(self) -> None:
        """Fork."""
        request_read, request_write = os.pipe()
        reply_read, reply_write = os.pipe()
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(request_write)
                os.close(reply_read)
                self._serve(os.fdopen(request_read), os.fdopen(reply_write, "w"))
            finally:  # the child of a fork must not go on in its parent's program
                os._exit(1)
        os.close(request_read)
        os.close(reply_write)
        self._requests, self._replies = os.fdopen(request_write, "w"), os.fdopen(reply_read)

    def _serve(self, requests: Any, replies: Any) -> None:
        """Serve requests in the fork, until its parent ends it."""
        os.chdir(self._folder)
        _keep_steps()
        for line in requests:
            with (self._folder / "output.txt").open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
            code, result = 1, None
            try:
                code, result = self._act(json.loads(line))
            except (Exception, SystemExit):  # the error is reported, and the fork serves the next request
                traceback.print_exc()
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
            peak_bytes = int(match[1]) * 1024 if match else 0
            replies.write(json.dumps([code, peak_bytes, result]) + "\n")
            replies.flush()


def _keep_steps() -> None:
    """Make this process build and compile each step once; files are read as often as ever."""
    from jaxscale import values
    from jaxscale.step import build as build_module
    from jaxscale.step.train_step import TrainStep

    build, compile_step = build_module.build, TrainStep.compile
    steps: dict[str, Any] = {}
    compiled: dict[Any, Any] = {}
    count_model_flop = TrainStep.model_flop
    model_flop: dict[Any, Any] = {}

    def build_once(experiment: Any, plan: Any = None, *, devices: Any = None) -> Any:
        experiment_json, plan_json = values.to_json(experiment), None if plan is None else values.to_json(plan)
        key = json.dumps([experiment_json, plan_json, list(map(str, devices or ()))])
        if key not in steps:
            steps[key] = build(experiment, plan, devices=devices)
        return steps[key]

    def model_flop_once(self: Any, batch: Any) -> Any:
        if self not in model_flop:
            model_flop[self] = count_model_flop(self, batch)
        return model_flop[self]

    def compile_once(self: Any, batch: Any) -> Any:
        if self not in compiled:
            compiled[self] = compile_step(self, batch)
        return compiled[self]

    build_module.build = build_once
    step_class: Any = TrainStep
    step_class.compile, step_class.model_flop = compile_once, model_flop_once


def run_command(words: Sequence[str]) -> int:
    """Run a command line of jaxscale in this process, and return its exit code."""
    from jaxscale.cli.main import main

    return main(list(words))


def drop_root_reading() -> None:
    """Take from this process, if it is root, the right to read and write files whatever their modes."""
    import ctypes

    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    class Data(ctypes.Structure):
        _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))

    header, data = Header(0x20080522, 0), (Data * 2)()  # the header of _LINUX_CAPABILITY_VERSION_3
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0 and libc.capget(ctypes.byref(header), data) == 0:
        mask = ~((1 << 1) | (1 << 2)) & 0xFFFFFFFF  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        data[0].effective &= mask
        data[0].permitted &= mask
        libc.capset(ctypes.byref(header), data)
