"""How tests trace and compile many tiny programs quickly: flags of XLA, and contexts of MLIR that modules share."""

import itertools
import os
from importlib.metadata import version
from typing import Any

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


MODULES_OF_A_CONTEXT = 50
"""Number of modules that are lowered in one context of MLIR before there is another, which frees their constants."""


def share_contexts() -> None:
    """Make modules share a context, as they do from JAX 0.12: to create one takes longer than to lower an addition."""
    from jax._src.interpreters import mlir

    initialize, numbers, contexts = mlir.ModuleContext.__init__, itertools.count(), [None]

    def initialize_in_shared(self: Any, *, context: Any = None, **fields: Any) -> None:
        if context is None and next(numbers) % MODULES_OF_A_CONTEXT == 0:
            contexts[0] = mlir.make_ir_context()
        initialize(self, context=context or contexts[0], **fields)

    mlir.ModuleContext.__init__ = initialize_in_shared
