"""Cases of cross-entropy that tests, benchmarks and compilers run: named shapes and options."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of cross-entropy.

    Args:
        name: name of the case, in test ids and rows of tables.
        rows: number M of rows of x.
        width: number D of elements of a row.
        head: number of rows of the head on a device.
        vocab: number of words; None if every row of the head is a word.
        dtype: dtype of x and the head.
        soft_cap, z_loss: as in `cross_entropy`.
        ignored: if n > 0, every n-th row has the label -1.
        tags: "small" runs in the interpreter (only in the slow tests if "slow" is a tag, too), "aot" is compiled
            for absent chips, "bench" is timed on a device.
    """

    name: str
    rows: int
    width: int
    head: int
    vocab: int | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    soft_cap: float | None = None
    z_loss: float = 0.0
    ignored: int = 0
    tags: tuple[str, ...] = ("small",)


CASES = (
    Case("plain", 256, 128, 512, tags=("small", "slow")),
    Case("f32", 128, 128, 512, dtype="float32", ignored=7, tags=("small", "slow")),
    Case("cap", 256, 128, 512, soft_cap=20.0, ignored=7, tags=("small", "slow")),
    Case("edge", 256, 128, 600, dtype="float32", soft_cap=20.0, z_loss=1e-3, ignored=5),
    Case("padded_vocab", 256, 128, 640, vocab=601, dtype="float32", z_loss=1e-3, tags=("small", "slow")),
    Case("llama3", 8192, 4096, 128256, tags=("aot", "bench")),
    Case("gemma", 8192, 2304, 256000, soft_cap=30.0, tags=("bench",)),
)
