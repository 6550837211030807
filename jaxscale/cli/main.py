"""From the words of the command line to an exit code.

0 done; 1 the doctor found something missing; 2 the user's mistake, told in one message; 3 it does not fit; 4 the loss
diverged; 75 interrupted and saved; 130 interrupted before there was anything to save. Anything else is a crash, with
its traceback.
"""

import sys
import warnings
from collections.abc import Sequence
from typing import Any

from jaxscale.cli import arguments
from jaxscale.cli.commands import COMMANDS, Draw, Explain, Fit, Train
from jaxscale.errors import Diverged, Preempted, UserError

MISTAKE, DIVERGED, PREEMPTED, INTERRUPTED = 2, 4, 75, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and give back the exit code."""
    plain = warnings.formatwarning
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # the line of code is no news to a user
    try:
        return _run(arguments.read(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        _say(error)
        return MISTAKE
    except Diverged as error:
        _say(error)
        return DIVERGED
    except Preempted as error:
        _say(error)
        return PREEMPTED
    except KeyboardInterrupt as error:
        _say(str(error) or "interrupted")
        return INTERRUPTED
    except SystemExit as exit:  # help was shown
        return exit.code if isinstance(exit.code, int) else 0
    finally:
        warnings.formatwarning = plain


def _run(given: arguments.Arguments) -> int:
    if given.help:
        _help(given)
        return 0
    assert given.command is not None
    COMMANDS[given.command](**given.early).check()
    from jaxscale.cli.usage import parse

    command = parse(given.command, given.own)
    code = command.run(given.fields) if isinstance(command, Train | Fit | Explain | Draw) else command.run()
    return code or 0


def _help(given: arguments.Arguments) -> None:
    from jaxscale.cli import usage

    if given.command is None:
        return usage.show_all()
    if getattr(COMMANDS[given.command], "takes_fields", False) and "file" in given.early:
        from jaxscale.training.outline import outline

        command: Any = COMMANDS[given.command](**given.early)
        seen = outline(command.file, command.variant)
        experiment, _ = command.load(given.fields)
        return usage.show(given.command, experiment, seen.variants)
    return usage.show(given.command)


def _say(message: object) -> None:
    print(f"jaxscale: {message}", file=sys.stderr)
