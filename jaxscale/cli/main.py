"""Run a command line, and return its exit code.

The code is 0 if all went well, 1 if the doctor reports a missing item, 2 after a mistake of the user, which one message
reports, and 3 if the step does not fit. It is 4 if the loss diverged, 75 if the run was interrupted and saved, 130 if
it was interrupted with nothing to save, and 141 if the reader of the output, such as `head`, ended first. Any other
error is a crash, with its traceback.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from jaxscale.cli import arguments
from jaxscale.cli.commands import COMMANDS, TAKES_FIELDS
from jaxscale.cli.experiment_commands import load_experiment
from jaxscale.errors import Diverged, Preempted, UserError

MISTAKE, DIVERGED, PREEMPTED, INTERRUPTED, UNREAD = 2, 4, 75, 130, 141
CODES = {UserError: MISTAKE, Diverged: DIVERGED, Preempted: PREEMPTED, KeyboardInterrupt: INTERRUPTED}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    previous_formatter = warnings.formatwarning
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # without the line of code
    try:
        code = _run(arguments.read(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the exit of Python writes nothing more
        return UNREAD
    except tuple(CODES) as error:
        print(f"jaxscale: {str(error) or 'interrupted'}", file=sys.stderr)
        return next(code for error_type, code in CODES.items() if isinstance(error, error_type))
    except SystemExit as system_exit:  # help was shown
        return system_exit.code if isinstance(system_exit.code, int) else 0
    finally:
        warnings.formatwarning = previous_formatter


def _run(request: arguments.Arguments) -> int:
    """Show the help or run the subcommand, and return the exit code."""
    if request.shows_help:
        _show_help(request)
        return 0
    assert request.command is not None
    command = COMMANDS[request.command](**request.values)
    return (command.run(request.fields) if isinstance(command, TAKES_FIELDS) else command.run()) or 0


def _show_help(request: arguments.Arguments) -> None:
    """Show the help of the program, of a subcommand, or of a subcommand with the fields of its experiment."""
    from jaxscale.cli import usage

    if request.command is None:
        return usage.show_all()
    if "file" in request.values:
        from jaxscale.records.outline import outline

        command: Any = COMMANDS[request.command](**request.values)
        file_outline = outline(command.file, command.variant)
        experiment, _ = load_experiment(command, request.fields)
        return usage.show(request.command, experiment, file_outline.variants)
    return usage.show(request.command)
