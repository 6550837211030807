"""Cases of 8-bit AdamW that tests, benchmarks and tuning run: named shapes and options."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of 8-bit AdamW.

    Args:
        name: name of the case, in test ids and rows of tables.
        layers: number L of stacked matrices.
        rows: number R of rows of each matrix, a multiple of the block.
        cols: number C of columns of each matrix.
        block: number of consecutive elements of a column that share a scale.
        map: name of the map between moments and codes, in `maps.MAPS`.
        gradient: dtype of the gradient.
        weight_decay: factor of the decoupled weight decay.
        varying: whether the arrays' types vary over mesh axes, as they do by default in `jax.shard_map`.
        tags: "small" runs in the interpreter (only in the slow tests if "slow" is a tag, too), "aot" is compiled
            for absent chips, "bench" is timed on a device.
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
