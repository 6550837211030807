"""Cases of attention that tests, benchmarks and tuning run: named shapes and options."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of attention.

    Args:
        name: name of the case, in test ids and rows of tables.
        T: number of queries.
        S: number of keys.
        N: number of query heads.
        K: number of key heads.
        H: width of a head.
        B: number of rows.
        dtype: dtype of the queries, keys and values.
        causal, window: as in `attention`.
        soft_cap: the parameter `logit_soft_cap` of `attention`.
        offset: position of the first query, which the kernel learns only at run time.
        segments: number of documents of equal length in a row, followed by one whose queries see no key; 0 for no
            segment ids.
        tile: queries and keys per tile when the TPU kernel is interpreted.
        tags: "small" runs in the interpreter (only in the slow tests if "slow" is a tag, too), "aot" is compiled
            for absent chips, "bench" is timed on a device.
    """

    name: str
    T: int
    S: int
    N: int
    K: int
    H: int
    B: int = 1
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    offset: int = 0
    segments: int = 0
    tile: int = 128
    tags: tuple[str, ...] = ("small",)

    @property
    def options(self) -> dict[str, bool | int | float | None]:
        """The keyword arguments of `attention` for this case."""
        position_options = {"causal": self.causal, "window": self.window, "query_offset": self.offset}
        return {**position_options, "logit_soft_cap": self.soft_cap}


_SLOW = ("small", "slow")
"""Tags of a case that only the slow tests interpret."""
_COMPILED = ("aot", "bench")
"""Tags of a case that is compiled for absent chips and timed on a device."""
CASES = (
    Case("causal", 256, 256, 2, 1, 64),
    Case("all", 128, 256, 2, 2, 64, causal=False, soft_cap=5.0, segments=3, tile=256),
    Case("part", 128, 256, 2, 1, 64, offset=70),
    Case("full", 256, 384, 2, 2, 128, causal=False, tags=_SLOW),
    Case("causal_f32", 256, 256, 2, 2, 64, dtype="float32", tags=_SLOW),
    Case("window", 512, 512, 2, 1, 64, B=2, window=100, soft_cap=5.0, segments=3, tile=256, tags=_SLOW),
    Case("window_f32", 384, 384, 1, 1, 128, dtype="float32", window=200, tags=_SLOW),
    Case("two_keys", 256, 256, 2, 1, 64, window=2, tags=_SLOW),
    Case("more_keys", 128, 384, 2, 1, 64, tags=_SLOW),
    Case("more_queries", 384, 128, 2, 1, 64, tags=_SLOW),
    Case("ragged", 200, 200, 2, 1, 64, tags=_SLOW),
    Case("ragged_long", 1100, 1100, 2, 1, 64, tile=256, tags=_SLOW),
    Case("ragged_long_full", 1100, 1100, 1, 1, 64, dtype="float32", causal=False, tile=256, tags=_SLOW),
    Case("ragged_full", 72, 200, 2, 1, 64, causal=False, tags=_SLOW),
    Case("ragged_more_queries", 300, 130, 2, 1, 64, segments=2, tags=_SLOW),
    Case("narrow", 128, 128, 2, 2, 48, tags=_SLOW),
    Case("wide", 128, 256, 2, 1, 256, soft_cap=5.0, segments=2, tags=_SLOW),
    Case("wide_window", 256, 256, 4, 1, 192, window=130, tags=_SLOW),
    Case("half", 256, 256, 2, 1, 64, dtype="float16", tags=_SLOW),
    Case("large_tiles", 512, 512, 1, 1, 64, window=300, tile=256, tags=_SLOW),
    Case("part_of_four", 256, 512, 2, 1, 64, offset=130, tags=_SLOW),
    Case("part_f32", 128, 384, 2, 1, 64, dtype="float32", offset=256, tags=_SLOW),
    Case("part_all", 256, 512, 2, 1, 64, B=2, window=100, soft_cap=5.0, offset=200, segments=3, tags=_SLOW),
    Case("part_past_the_keys", 384, 256, 2, 1, 64, window=130, offset=100, tags=_SLOW),
    Case("part_beyond", 128, 256, 2, 1, 64, window=64, offset=320, tags=_SLOW),
    Case("part_ragged", 200, 300, 2, 1, 64, offset=130, tags=_SLOW),
    Case("part_large_tiles", 256, 1024, 1, 1, 64, window=300, tile=256, offset=300, tags=_SLOW),
    Case("causal_4k", 4096, 4096, 16, 4, 128, B=2, tags=_COMPILED),
    Case("full_4k", 4096, 4096, 16, 4, 128, B=2, causal=False, tags=_COMPILED),
    Case("window_4k", 4096, 4096, 16, 4, 128, B=2, window=1024, soft_cap=50.0, segments=4, tags=_COMPILED),
    Case("narrow_4k", 4096, 4096, 16, 16, 64, B=2, tags=_COMPILED),
    Case("wide_4k", 4096, 4096, 8, 2, 256, B=2, soft_cap=50.0, tags=_COMPILED),
    Case("part_8k", 2048, 8192, 16, 4, 128, B=2, offset=4096, tags=("aot",)),
    Case("causal_8k", 8192, 8192, 16, 4, 128, B=2, tags=("bench",)),
    Case("window_32k", 32768, 32768, 16, 4, 128, B=1, window=1024, tags=("bench",)),
)
