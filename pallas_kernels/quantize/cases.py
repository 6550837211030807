"""Cases of quantization that tests, benchmarks and tuning run: named shapes and options."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Case:
    """A matrix to quantize.

    Args:
        name: name of the case, in test ids and rows of tables.
        rows: number R of rows.
        cols: number C of columns.
        bits: bits of a code, 8 or 4.
        block: number of consecutive elements that share a scale; a divisor of the dim `axis`.
        axis: the dim along which blocks lie: -2 (down the columns) or -1 (along the rows).
        dtype: dtype of the matrix.
        tags: "small" runs in the interpreter (only in the slow tests if "slow" is a tag, too), "aot" is compiled
            for absent chips, "bench" is timed on a device.
    """

    name: str
    rows: int
    cols: int
    bits: Literal[8, 4] = 8
    block: int = 128
    axis: Literal[-1, -2] = -2
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    tags: tuple[str, ...] = ("small",)


CASES = (
    Case("columns8", 384, 64),
    Case("columns4_f32", 256, 128, bits=4, dtype="float32"),
    Case("rows8", 192, 256, block=256, axis=-1, dtype="float32"),
    Case("rows4", 128, 256, bits=4, block=256, axis=-1, dtype="float32"),
    Case("rows8_uneven", 1300, 128, block=128, axis=-1, tags=("small", "slow")),
    Case("columns8_uneven", 640, 200, block=64, dtype="float32", tags=("small", "slow")),
    Case("columns8_4k", 8192, 4096, tags=("aot", "bench")),
    Case("columns4_4k", 8192, 4096, bits=4, tags=("aot", "bench")),
    Case("rows8_32m", 131072, 256, block=256, axis=-1, dtype="float32", tags=("aot", "bench")),
    Case("rows4_32m", 131072, 256, bits=4, block=256, axis=-1, dtype="float32", tags=("aot", "bench")),
)
