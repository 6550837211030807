"""The facts about a call of attention that decide whether an implementation can run it, and with which tiles."""

import dataclasses

from pallas_kernels.attention.reference import Options


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes, dtype and options of one call on one device.

    Args:
        B, T, S, N, K, H: numbers of rows, queries, keys, query heads and key heads, and the width of a head.
        dtype: dtype of the queries, keys and values.
        has_segments: whether the call has segment ids.
        options: what to compute.
        has_offset: whether the queries start at a position other than 0 that is known only at run time.
    """

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    dtype: str
    has_segments: bool
    options: Options
    has_offset: bool = False

    @property
    def mask(self) -> str:
        """Name of the mask in tuned entries: "full", "causal" or "window", plus "+segments", "+cap", "+offset"."""
        name = "full" if not self.options.causal else "causal" if self.options.window is None else "window"
        suffixes = {
            "+segments": self.has_segments,
            "+cap": self.options.soft_cap is not None,
            "+offset": self.has_offset,
        }
        return name + "".join(suffix for suffix, applies in suffixes.items() if applies)

    @property
    def case(self) -> dict[str, int | str]:
        """The facts on which tiles depend. H is a text, to match exactly: tiles may not compile at other widths."""
        return {"dtype": self.dtype, "mask": self.mask, "H": str(self.H), "T": self.T, "S": self.S}
