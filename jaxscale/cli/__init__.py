"""The command line, `jaxscale COMMAND ...`, with subcommands such as `train`, `generate` and `doctor`.

`commands.py` lists the subcommands, which are dataclasses. `arguments.py` parses the words and reports mistakes before
JAX is imported. `usage.py` prints the help with tyro. `main.py` runs the subcommand and returns the exit code.
"""

from jaxscale.cli.main import main

__all__ = ["main"]
