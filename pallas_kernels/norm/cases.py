"""Cases of RMS norm and layer norm that tests, benchmarks and compilers run: named shapes and options."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of RMS norm or layer norm.

    Args:
        name: name of the case, in test ids and rows of tables.
        rows: number R of rows.
        width: number D of elements of a row.
        dtype: dtype of x and the residual.
        center: True for layer norm, False for RMS norm.
        bias: whether there is a bias.
        residual: whether there is a residual.
        tags: "small" runs in the interpreter (only in the slow tests if "slow" is a tag, too), "aot" is compiled
            for absent chips, "bench" is timed on a device.
    """

    name: str
    rows: int
    width: int
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    center: bool = False
    bias: bool = False
    residual: bool = False
    tags: tuple[str, ...] = ("small",)


CASES = (
    Case("rms", 24, 512, tags=("small", "slow")),
    Case("rms_f32", 16, 512, "float32", tags=("small", "slow")),
    Case("rms_residual", 40, 512, residual=True),
    Case("layer", 24, 512, center=True, bias=True, tags=("small", "slow")),
    Case("layer_residual_f32", 37, 1024, "float32", center=True, bias=True, residual=True),
    Case("layer_no_bias", 5, 512, center=True, tags=("small", "slow")),
    Case("rms_residual_wide", 3, 4608, residual=True, tags=("small", "slow")),
    Case("rms_4k", 8192, 4096, tags=("aot", "bench")),
    Case("rms_residual_4k", 8192, 4096, residual=True, tags=("aot", "bench")),
    Case("layer_residual_4k", 8192, 4096, center=True, bias=True, residual=True, tags=("aot", "bench")),
    Case("rms_residual_8k", 65536, 8192, residual=True, tags=("bench",)),
)
