"""The command line: `jaxscale train | generate | evaluate | export | report | doctor`.

`commands.py` lists the subcommands, which are dataclasses; `arguments.py` parses the words and reports mistakes before
anything heavy is imported; `usage.py` writes the help with tyro; `main.py` runs the command and sets the exit code.
"""

from jaxscale.cli.main import main

__all__ = ["main"]
