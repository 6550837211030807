"""Cases of grouped matmul that tests, benchmarks and compilers run: named shapes and options."""

import dataclasses
from typing import Literal

ROW_MULTIPLE = 8
"""Rows of a tile that Mosaic GPU copies: the kernel takes a multiple of them, and its copies start at one,
which the interpreter does not check."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of grouped matmul.

    Args:
        name: name of the case, in test ids and rows of tables.
        rows: number M of rows of x.
        inner: number D of columns of x.
        outer: number F of columns of the result.
        sizes: number of rows of each group.
        dtype: dtype of x and the matrices.
        tags: "small" runs in the interpreter (only in the slow tests if "slow" is a tag, too), "aot" is compiled
            for absent chips, "bench" is timed on a device.
    """

    name: str
    rows: int
    inner: int
    outer: int
    sizes: tuple[int, ...]
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    tags: tuple[str, ...] = ("small",)


CASES = (
    Case("least", 128, 128, 128, (50, 70)),
    Case("empty_group", 512, 128, 128, (100, 0, 211, 201), tags=("small", "slow")),
    Case("tail", 512, 128, 128, (1, 2, 300, 9), tags=("small", "slow")),
    Case("one_group", 256, 128, 256, (256, 0), tags=("small", "slow")),
    Case("nothing", 128, 128, 128, (0, 0, 0), tags=("small", "slow")),
    Case("ragged_rows", 300, 256, 128, (130, 170), "float16", tags=("small", "slow")),
    Case("mixtral", 8192, 4096, 2048, (1024,) * 8, tags=("aot", "bench")),
    Case("mixtral_uneven", 8192, 4096, 2048, (3000, 0, 77, 1200, 2048, 500, 1000, 300), tags=("bench",)),
    Case("many_experts", 16384, 2048, 1024, (256,) * 64, tags=("bench",)),
)
