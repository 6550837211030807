"""Named shapes of 8-bit Adam: what tests, benchmarks and tuning run."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Case:
    """One use of 8-bit Adam.

    Args:
        name: in ids of tests and rows of tables.
        layers: L, stacked matrices.
        rows: R of each, which the block divides.
        cols: C.
        block: rows of a column that share a scale.
        map: of the codes, a name of `maps.MAPS`.
        gradient: dtype of the gradient.
        weight_decay: decoupled.
        varying: whether types of arrays carry the mesh axes over which they vary, the default of `jax.shard_map`.
        tags: "small" runs in the interpreter, "aot" is compiled for absent chips, "bench" is timed on a device.
    """

    name: str
    layers: int
    rows: int
    cols: int
    block: int = 128
    map: Literal["soft8", "dynamic8"] = "soft8"
    gradient: Literal["bfloat16", "float32"] = "float32"
    weight_decay: float = 0.1
    varying: bool = False
    tags: tuple[str, ...] = ("small",)


CASES = (
    Case("soft", 1, 256, 64),
    Case("dynamic_bf16", 2, 128, 32, map="dynamic8", gradient="bfloat16", weight_decay=0.0),
    Case("soft_256", 1, 256, 32, block=256, gradient="bfloat16", tags=("small", "slow")),
    Case("many_blocks", 2, 640, 160, tags=("small", "slow")),
    Case("uneven_cols", 1, 384, 136, block=64, tags=("small", "slow")),
    Case("dynamic_columns", 1, 256, 136, map="dynamic8", tags=("small", "slow")),
    Case("dynamic_stacked", 2, 512, 256, map="dynamic8", gradient="bfloat16", tags=("small", "slow")),
    Case("soft_4k", 1, 8192, 4096, tags=("aot", "bench")),
    Case("soft_4k_bf16", 1, 8192, 4096, gradient="bfloat16", tags=("aot", "bench")),
    Case("soft_256_stacked", 3, 2048, 1408, block=256, tags=("aot",)),
    Case("dynamic_4k", 1, 8192, 4096, map="dynamic8", tags=("aot", "bench")),
    Case("soft_1b", 16, 8192, 8192, tags=("bench",)),
)
