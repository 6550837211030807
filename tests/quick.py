"""Flags under which XLA compiles tiny programs quickly, in the tests and in the processes that they start."""

import os
from importlib.metadata import version

FLAGS = " ".join(
    [
        # compiling is most of what these tests do, and code of the first level runs tiny models as well
        "--xla_backend_optimization_level=0",
        # the other cores have a test of their own: one piece costs a tenth less than the sum of many
        "--xla_cpu_parallel_codegen_split_count=1",
        # three times faster to compile; later versions have no such flag
        *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib") < "0.11" else []),
    ]
)


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process that starts a backend of CPU devices of its own, with further variables."""
    inherited = {name: text for name, text in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    return inherited | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS} | variables
