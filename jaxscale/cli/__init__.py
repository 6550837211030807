"""The command line: `jaxscale train | generate | evaluate | export | report | doctor`.

`commands.py` says what there is, as dataclasses; `arguments.py` answers mistakes before anything heavy is imported;
`usage.py` hands the dataclasses to tyro, which parses and writes the help; `main.py` runs it all and sets the exit
code.
"""

from jaxscale.cli.main import main

__all__ = ["main"]
