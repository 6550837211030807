"""The command line: `jaxscale train | generate | evaluate | export | report | doctor`.

`commands.py` defines the subcommands as dataclasses; `arguments.py` reports mistakes before anything heavy is imported;
`usage.py` passes the dataclasses to tyro, which parses and writes the help; `main.py` runs the command and sets the
exit code.
"""

from jaxscale.cli.main import main

__all__ = ["main"]
