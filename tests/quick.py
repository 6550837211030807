"""How tests trace and compile many tiny programs quickly: flags of XLA, and contexts of MLIR that modules share."""

import os
import threading
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
    """Make modules of a thread share contexts, as JAX 0.12 does: creating one takes longer than lowering a sum."""
    from jax._src.interpreters import mlir

    original_init, of_thread = mlir.ModuleContext.__init__, threading.local()

    def init_in_shared(self: Any, *, context: Any = None, **fields: Any) -> None:
        if context is None:
            number = getattr(of_thread, "number", 0)
            if number % MODULES_OF_A_CONTEXT == 0:
                of_thread.context = mlir.make_ir_context()
            of_thread.number, context = number + 1, of_thread.context
        original_init(self, context=context, **fields)

    mlir.ModuleContext.__init__ = init_in_shared
