"""Problem: the facts by which an implementation of attention decides whether it supports a call."""

import dataclasses

from pallas_kernels.attention.reference import Options


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes, type and options of one call, on one device.

    Args:
        B, T, S, N, K, H: rows, queries, keys, query heads, key heads, width of a head.
        dtype: of queries, keys and values.
        segments: whether segment ids are given.
        options: what to compute.
        offset: whether queries start at a position that is known when it runs alone, and that counts.
    """

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    dtype: str
    segments: bool
    options: Options
    offset: bool = False

    @property
    def mask(self) -> str:
        """What hides keys, the key of tuned tiles: "full", "causal", "window", with "+segments", "+cap", "+offset"."""
        kind = "full" if not self.options.causal else "causal" if self.options.window is None else "window"
        cap = "" if self.options.soft_cap is None else "+cap"
        return kind + ("+segments" if self.segments else "") + cap + ("+offset" if self.offset else "")

    @property
    def case(self) -> dict[str, int | str]:
        """What tiles depend on; the width is a text, for tiles that one compiles at may not compile at another."""
        return {"dtype": self.dtype, "mask": self.mask, "H": str(self.H), "T": self.T, "S": self.S}
