"""`python -m jaxscale` runs the command `jaxscale`."""

import sys

from jaxscale.cli import main

sys.exit(main())
