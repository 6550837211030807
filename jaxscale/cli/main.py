"""Run a command line, and return its exit code.

The exit code is 0 on success, 1 if the doctor reports a missing item, 2 after a user's mistake, which a message
reports, and 3 if the step does not fit. It is 4 if the loss diverged, 5 if `launch` gave up, 6 if too many steps were
skipped, 7 if a step never ends, 75 if the run was interrupted and has a checkpoint, 130 if it was interrupted with
nothing to save, and 141 if the reader of the output, such as `head`, ended first. Any other error is a crash with exit
code 1. A crash in the user's code prints a report; any other crash prints a traceback.
"""

import contextlib
import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxscale import heartbeat
from jaxscale.cli import arguments, user_code
from jaxscale.cli.commands import COMMANDS, TAKES_FIELDS
from jaxscale.cli.experiment_commands import load_experiment
from jaxscale.errors import CRASHED, EXIT_CODES, MISTAKE, PREEMPTED, STOP_CODES, Preempted, UserError
from jaxscale.records.directory import explain_file_errors, is_disk_full
from jaxscale.values.user_frames import place_in

UNREAD = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return the exit code.

    If one of several processes fails, this function ends the process at once, after its traceback. Otherwise, Python's
    exit handlers would wait in JAX's shutdown barrier for the other processes, for minutes. Rank 0 first waits for a
    second: JAX aborts the other processes when rank 0's service ends, and they may be about to report the same failure.
    If a signal stopped a process before its first step, the process also ends at once. Otherwise, Python's exit
    handlers would wait for threads that still read a checkpoint.

    Args:
        argv: words of the command line; `None` takes the words of this process. A caller that passes `argv` continues
            afterwards.
    """
    try:
        code = _main(argv)
    except Exception:
        if not _has_peers():
            raise
        traceback.print_exc()
        code = CRASHED
    if code not in (0, PREEMPTED) and _has_peers():
        _end_now(code)
    return code


def _end_now(code: int) -> NoReturn:
    """Flush the output and exit at once (`os._exit`), without Python's exit handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    if _has_peers() and sys.modules["jax"].process_index() == 0:
        time.sleep(1)
    os._exit(code)


def _has_peers() -> bool:
    """Return whether this process is one of several that have joined through JAX's coordination service."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1


def _main(argv: Sequence[str] | None) -> int:
    """Run a command line, and return the exit code. Raise errors that the user did not cause."""
    previous_formatter = warnings.formatwarning
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # leaves out the line of code
    try:
        code = _run(arguments.read(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python must not write to it again at its exit
        return UNREAD
    except tuple(EXIT_CODES) as error:
        heartbeat.fail(error)
        place = place_in(error) if isinstance(error, UserError) else ""
        print(f"jaxscale: {place}{str(error) or 'interrupted'}", file=sys.stderr)
        code = next(code for error_type, code in EXIT_CODES.items() if isinstance(error, error_type))
        is_saved = isinstance(error, Preempted) and error.is_saved
        if code in STOP_CODES and not is_saved and argv is None:
            _end_now(code)
        return code
    except Exception as error:
        heartbeat.fail(error)
        if is_disk_full(error):
            return _end_on_full_disk(error)
        user_code_report = user_code.report(error)
        if user_code_report is None:
            raise
        print(f"jaxscale: {user_code_report}", file=sys.stderr)
        return CRASHED
    except SystemExit as system_exit:  # tyro has shown the help
        return system_exit.code if isinstance(system_exit.code, int) else 0
    finally:
        warnings.formatwarning = previous_formatter


def _end_on_full_disk(error: Any) -> int:
    """Report a full disk, and return the exit code. The output may go to a file on the same disk."""
    with contextlib.suppress(OSError):
        path = error.filename or "the output"
        print(f"jaxscale: cannot write {path}: {error.strerror}. Free some space, and start again", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):  # Python must not write the remaining output at its exit
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return MISTAKE


def _run(parsed_line: arguments.Arguments) -> int:
    """Show the help or run the subcommand, and return the exit code."""
    if parsed_line.is_help:
        _show_help(parsed_line)
        return 0
    assert parsed_line.command is not None
    command = COMMANDS[parsed_line.command](**parsed_line.values)
    run_dir = getattr(command, "run_dir", None)
    with contextlib.nullcontext() if run_dir is None else explain_file_errors(run_dir):
        return (command.run(parsed_line.fields) if isinstance(command, TAKES_FIELDS) else command.run()) or 0


def _show_help(parsed_line: arguments.Arguments) -> None:
    """Show the help of the program, of a subcommand, or of a subcommand with the fields of an experiment."""
    from jaxscale.cli import usage

    if parsed_line.command is None:
        return usage.show_all()
    if "file" in parsed_line.values:
        from jaxscale.records.outline import outline

        command: Any = COMMANDS[parsed_line.command](**parsed_line.values)
        file_outline = outline(command.file, command.variant)
        experiment, _ = load_experiment(command, parsed_line.fields)
        return usage.show(parsed_line.command, experiment, file_outline.variants)
    return usage.show(parsed_line.command)
