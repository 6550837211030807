"""Compile a program with the platform's own compiler, also for devices that are not attached, and report on it.

libtpu compiles for TPU v4, v5e, v5p, v6e and 7x, the CUDA plugin for A100, H100, H200 and B200, on any Linux machine
without the device. Every compilation runs in a child process, because libtpu is killed by a signal on some programs.
After a crash, a time-out or a lack of memory the caller gets a report of the failure. A program reaches the child as a
*recipe*, a function that both processes can import. Reports are cached on disk; compiling a program again costs only
its tracing.

If the platform's devices are attached, programs are compiled for them directly. If not, the compiler gets a
description of the devices. The bytes that libtpu reports are trusted from version 0.0.51 on. The versions 0.0.42 and
0.0.50, which `jax[tpu]` installs, report up to one and a half times the right number.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxscale.compiler import trust
from jaxscale.compiler.report import CompileReport
from jaxscale.compiler.target import Target, target
from jaxscale.errors import UserError, near_miss
from jaxscale.platforms.detect import accelerators
from jaxscale.platforms.platform import Platform

TIMEOUT = 3600.0
"""Seconds that a compilation may take by default."""

_CHILD_CODE = (
    "import json,sys; sys.path[:] = json.loads(sys.argv[1]); from jaxscale.compiler.compile_child import main; main()"
)


@dataclasses.dataclass(frozen=True)
class ProgramRecipe:
    """A program to compile, as a function's name and arguments, from which another process can build the program.

    The function takes a sequence of the platform's devices (`Platform.devices` is their number), then `args`. It
    returns the program to compile: a `jax.stages.Lowered` or `jax.stages.Traced` whose arguments have shardings over
    these devices.

    Args:
        function: module and name of the function, as "module:name".
        args: arguments of the function after the devices; it must be possible to pickle them.
    """

    function: str
    args: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        module, colon, name = self.function.partition(":")
        if not (module and colon and name):
            raise UserError(f"recipe {self.function!r}: expected MODULE:FUNCTION, such as 'package.module:step'")

    def __call__(self, devices: Sequence[Any]) -> Any:
        """Build the program to compile, for these devices; return a `jax.stages.Lowered` or `Traced`.

        Raises:
            UserError: the module or the function does not exist.
        """
        module, _, name = self.function.partition(":")
        try:
            member: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            raise UserError(f"recipe {self.function!r}: there is no module {error.name!r} to import") from None
        for attribute_name in name.split("."):
            if not hasattr(member, attribute_name):
                raise UserError(f"recipe {self.function!r}: {module} has no {name!r}{near_miss(name, vars(member))}")
            member = getattr(member, attribute_name)
        return member(devices, *self.args)


class RecipeFailed(RuntimeError):
    """The recipe raised an error in the child process; the message is its traceback."""


def compile_report(
    recipe: Callable[[Sequence[Any]], Any],
    platform: Platform | str,
    *,
    options: Mapping[str, str | int | bool | float] | None = None,
    explain: bool = False,
    cache: bool = True,
    timeout: float = TIMEOUT,
) -> CompileReport:
    """Compile a recipe's program with the compiler of `platform`, and return its report.

    Args:
        recipe: a `ProgramRecipe`, or another function of the devices that can be pickled, such as a function of a
            module or a `functools.partial` of one. It runs in another process.
        platform: a `Platform` or its text; "local" and "cpu x N" compile for N virtual CPU devices.
        options: compiler options, passed to `compile(compiler_options=...)`.
        explain: whether the report also lists the buffers alive at the peak, and the timeline.
        cache: whether to read and store the report in `$JAXSCALE_CACHE/reports`, or `~/.cache/jaxscale/reports` if the
            variable is not set.
        timeout: seconds after which the child is stopped.

    Returns:
        The report. If the program does not fit, the compiler dies or the time is up, the report gives the cause.

    Raises:
        UserError: the platform's compiler is missing or untrusted; its hardware is unknown; the recipe cannot be
            pickled, or does not build a program for these devices; or the compiler rejects an option.
        RecipeFailed: the recipe raised another error.

    Example:
        >>> report = compile_report(ProgramRecipe("jaxscale.compiler.compile_child:example"), "cpu x 2", cache=False)
        >>> report.argument_bytes, report.flop  # half of a (256, 128) array and a whole (128, 64) array; their product
        (98304, 2097152)
    """
    platform = Platform.parse(platform) if isinstance(platform, str) else platform
    recipe_bytes = _pickle(recipe)
    child_target = target(platform, accelerators())
    request: dict[str, Any] = {
        "recipe": recipe_bytes,
        "main": _main_file(recipe_bytes),
        "platform": platform,
        "options": dict(options or {}),
        "explain": explain,
        "cache": str(folder) if cache and (folder := _cache_folder()) is not None else None,
    }
    _check_libtpu(child_target, timeout)
    report = _run_request(platform, request, child_target, timeout)
    if report is None:  # another process holds the devices, or they are not those of the platform
        child_target = target(platform, frozenset())
        report = _run_request(platform, request, child_target, timeout)
    assert report is not None, "a described device is always available"
    return report


def _check_libtpu(child_target: Target, timeout: float) -> None:
    """Check that libtpu reports the right bytes. An untested version is tested once, and the bytes are stored.

    Raises:
        UserError: the bytes that libtpu reports for a known program are wrong or missing.
    """
    libtpu_identity = child_target.compiler.get("libtpu", trust.TRUSTED)
    if libtpu_identity == trust.TRUSTED:
        return
    folder = _cache_folder()
    verdict_file = None if folder is None else trust.verdict_file(folder, libtpu_identity)
    device_bytes = None if verdict_file is None else trust.read_verdict(verdict_file)
    if device_bytes is None:
        test_platform = Platform.parse("tpu v5e:2x2")
        request: dict[str, Any] = {"recipe": pickle.dumps(trust.program), "main": None, "platform": test_platform}
        request |= {"options": {}, "explain": False, "cache": None}
        report = _run_request(test_platform, request, target(test_platform, frozenset()), timeout)
        device_bytes = None if report is None else report.device_bytes
        if device_bytes is None:
            raise UserError(
                f"libtpu {libtpu_identity} is not trusted: {report}; install libtpu=={trust.TRUSTED} "
                "(jaxscale[aot-tpu])"
            )
        if verdict_file is not None:
            with contextlib.suppress(OSError):
                verdict_file.write_text(json.dumps({"libtpu": libtpu_identity, "device_bytes": device_bytes}))
    if not trust.is_right(device_bytes):
        raise UserError(
            f"libtpu {libtpu_identity} is not trusted: it reports {device_bytes / trust.MIB:.0f} MiB for a program of "
            f"{trust.KNOWN_BYTES / trust.MIB:.0f} MiB; install libtpu=={trust.TRUSTED} (jaxscale[aot-tpu])"
        )


def _run_request(
    platform: Platform, request: Mapping[str, Any], child_target: Target, timeout: float
) -> CompileReport | None:
    """Run a child process that makes the requested report; return it, or None if attached devices are unavailable."""
    with tempfile.TemporaryDirectory(prefix="jaxscale-compile-") as folder:
        request_folder = pathlib.Path(folder)
        (request_folder / "request").write_bytes(pickle.dumps({**request, "target": child_target}))
        exit_code = _run_child(request_folder, child_target.environment, timeout)
        if exit_code is None:
            return CompileReport(str(platform), crashed=f"still running after {timeout:g} s: pass a longer timeout")
        try:
            reply = json.loads((request_folder / "result").read_bytes())
        except (FileNotFoundError, json.JSONDecodeError):
            log_text = (request_folder / "log").read_text("utf-8", "replace")
            return CompileReport(str(platform), crashed=_cause_of_failure(exit_code, log_text))
    if "mistake" in reply:
        raise UserError(reply["mistake"])
    if "failed" in reply:
        raise RecipeFailed(f"the recipe failed while it made a program for {platform}:\n{reply['failed']}")
    return None if "unavailable" in reply else CompileReport.from_json(reply["report"], "the compiler's child process")


def _run_child(folder: pathlib.Path, environment: Mapping[str, str], timeout: float) -> int | None:
    """Run a child process with the request in `folder`; return its exit code, or None after a time-out."""
    paths_json = json.dumps([path or os.getcwd() for path in sys.path])
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD_CODE, paths_json, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            return child.wait(timeout)
        except BaseException as error:
            # the compiler may have children of its own (ptxas)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return None


def _cause_of_failure(exit_code: int, log_text: str) -> str:
    """Return a text that explains why a child process ended without writing a reply."""
    last_lines = "\n".join([line for line in log_text.splitlines() if line.strip()][-8:])
    log_part = f"; the last lines of its log:\n{last_lines}" if last_lines else ""
    if exit_code < 0:
        signal_name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
        likely_cause = "; most likely this machine ran out of memory" if -exit_code == signal.SIGKILL else ""
        return f"the compiler died by {signal_name}{likely_cause}{log_part}"
    return f"the compiler's process ended with exit code {exit_code}{log_part}"


def _pickle(recipe: Any) -> bytes:
    """Pickle a recipe, and return the bytes.

    Raises:
        UserError: the recipe cannot be pickled.
    """
    try:
        return pickle.dumps(recipe)
    except Exception as error:  # a value that does not pickle may raise anything
        raise UserError(
            f"recipe {recipe!r} cannot be sent to another process: {error}; expected a function of a module, a "
            "functools.partial of one, or a ProgramRecipe, with arguments that pickle"
        ) from None


def _main_file(recipe_bytes: bytes) -> str | None:
    """Return the file of the running script if the recipe refers to it; the child process imports this file."""
    if b"__main__" not in recipe_bytes:
        return None
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None:
        raise UserError(
            "a recipe from a notebook or an interactive session cannot be imported by another process: define it in a "
            "module"
        )
    return os.path.abspath(path)


def _cache_folder() -> pathlib.Path | None:
    """Return the folder of the cached reports; None if it is not writable."""
    base_folder_text = os.environ.get("JAXSCALE_CACHE")
    try:
        folder = (
            pathlib.Path(base_folder_text) if base_folder_text else pathlib.Path.home() / ".cache" / "jaxscale"
        ) / "reports"
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    return folder
