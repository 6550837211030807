"""Cases of block top-k that tests, benchmarks and tuning run: named shapes and options."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Case:
    """A matrix to select from.

    Args:
        name: name of the case, in test ids and rows of tables.
        rows: number R of rows.
        cols: number C of columns.
        k: number of elements to select from each block.
        block: number of elements of a block; a divisor of the dim `axis`.
        axis: the dim along which blocks lie: -2 (down the columns) or -1 (along the rows).
        dtype: dtype of the matrix.
        tags: "small" runs in the interpreter (only in the slow tests if "slow" is a tag, too), "aot" is compiled
            for absent chips, "bench" is timed on a device.
    """

    name: str
    rows: int
    cols: int
    k: int
    block: int = 128
    axis: Literal[-1, -2] = -2
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    tags: tuple[str, ...] = ("small",)


CASES = (
    Case("columns", 256, 64, 4),
    Case("rows_f32", 96, 256, 10, block=256, axis=-1, dtype="float32"),
    Case("columns_f32_uneven", 640, 200, 3, block=64, dtype="float32", tags=("small", "slow")),
    Case("rows_of_two_f32", 11, 2048, 10, block=1024, axis=-1, dtype="float32"),
    Case("rows_uneven", 300, 128, 5, axis=-1, tags=("small", "slow")),
    Case("rows_of_two", 301, 192, 9, block=96, axis=-1, tags=("small", "slow")),
    Case("columns_4k", 8192, 4096, 4, tags=("aot", "bench")),
    Case("rows_32m", 32768, 1024, 10, block=1024, axis=-1, dtype="float32", tags=("aot", "bench")),
)
