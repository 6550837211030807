"""The largest elements of a leaf and where they lie: the arithmetic that top-k and DGC share.

Every block keeps the same number of elements, so that no leaf is sorted as a whole and an offset takes two bytes; if a
block is the whole leaf, they are its largest (Aji and Heafield, 2017, arXiv:1704.05021). In blocks a kernel selects
them if the chip has one (`pallas_kernels.top_k`): XLA sorts. Left out: values in fewer bits.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxscale.errors import UserError
from jaxscale.typing import Array, Float, Int
from pallas_kernels.dispatch import Explanation, listening, note
from pallas_kernels.target import target
from pallas_kernels.top_k.api import top_k

OFFSETS = 2**16
"""Elements of the largest block whose offsets are uint16."""


class Kept(NamedTuple):
    """The largest elements of each block.

    Args:
        values: float32.
        offsets: position of each within its block: uint16, or int32 if the block is the whole leaf.
    """

    values: Float[Array, "blocks kept"]
    offsets: Int[Array, "blocks kept"]


@dataclasses.dataclass(frozen=True)
class Largest:
    """The rule that selects elements of a leaf.

    Args:
        fraction: of all elements, in (0, 1].
        block: elements of a block, each of which keeps as many; `None`: the whole leaf.

    Raises:
        UserError: a fraction or block out of range, or a fraction that keeps no element of a block.

    Example:
        >>> rule = Largest(0.5, block=4)
        >>> kept = rule.encode(jnp.array([1.0, -5.0, 0.5, 2.0, 0.1]))
        >>> rule.decode(kept, 5)
        Array([ 0. , -5. ,  0. ,  2. ,  0.1], dtype=float32)
    """

    fraction: float
    block: int | None

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise UserError(f"fraction: got {self.fraction}, expected a part of the elements in (0, 1], such as 0.01")
        if self.block is None:
            return
        if not 1 <= self.block <= OFFSETS:
            raise UserError(f"block: got {self.block}, expected 1 to {OFFSETS} elements, or none for the whole leaf")
        if round(self.fraction * self.block) < 1:
            least_block = 2 ** math.ceil(math.log2(1 / self.fraction))
            remedy = f"block={least_block}" if least_block <= OFFSETS else "block=none"
            raise UserError(f"fraction {self.fraction} of blocks of {self.block} is no element: give {remedy}")

    def sizes(self, elements: int) -> tuple[int, int, int]:
        """(blocks, elements of a block, kept elements of a block) of a leaf of `elements`."""
        block = elements if self.block is None else min(self.block, elements)
        return math.ceil(elements / block), block, max(1, round(self.fraction * block))

    def encode(self, flat: Float[Array, "elements"]) -> Kept:
        """The largest by magnitude."""
        blocks, block, count = self.sizes(flat.size)
        rows = jnp.pad(flat, (0, blocks * block - flat.size)).reshape(blocks, block)
        if self.block is None:
            if listening():
                note(Explanation("top_k", target(), "reference", {}, "kernels are of blocks, and this is a whole leaf"))
            _, offsets = lax.top_k(jnp.abs(rows), count)
            return Kept(jnp.take_along_axis(rows, offsets, -1), offsets)
        values, offsets = top_k(rows, count, block=block, axis=-1)
        return Kept(values, offsets.astype(jnp.uint16))

    def decode(self, selection: Kept, elements: int) -> Float[Array, "elements"]:
        """A leaf of the kept elements, and zeros elsewhere."""
        blocks, block, _ = self.sizes(elements)
        positions = jnp.arange(blocks)[:, None] * block + selection.offsets.astype(jnp.int32)
        flat = jnp.zeros(blocks * block, jnp.float32)
        return flat.at[positions].set(selection.values, unique_indices=True, mode="promise_in_bounds")[:elements]
