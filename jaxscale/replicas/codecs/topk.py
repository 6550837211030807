"""Top-k sends the largest elements of each gradient now and the other elements in later steps.

Source: Aji and Heafield, 2017, arXiv:1704.05021. If 1% of the elements are sent, 68 times fewer bytes are sent between
two replicas, but only 17 times fewer between eight, because each replica receives messages from all others. An element
is sent about every hundredth step, with its accumulated residual. This delay requires two things (the numbers, from
`benchmarks/convergence.py`, are nats after 400 steps, relative to runs with exact means):

- *No momentum in the optimizer.* Momentum would apply late elements for ten more steps. With 1%, Adam with a b1 of 0
  and SGD without momentum lose nothing (-0.001, -0.05), but with momentum 0.9 they lose 0.22 and 0.15. Momentum that is
  added up before elements are held back, and reset for the elements that are sent, does no harm (`dgc`).
- *A warm-up.* The first gradients are large while the learning rate is still small. Without a warm-up, the held-back
  elements of these gradients are sent at the peak of the learning rate, and feedback is worse than no feedback (+0.50
  against +0.15 for SGD with momentum). So the fraction falls to its final value in `warmup` steps, as in deep gradient
  compression (Lin et al., 2018, arXiv:1712.01887). The compiled step contains a message for each fraction.

The delay also bounds the learning rate (Stich et al., 2018, arXiv:1809.07599; `tests/replicas/test_feedback.py`).

A leaf is divided into blocks, each of which sends the same number of elements. So no leaf is sorted as a whole, and an
offset takes two bytes. If the chip has a kernel (`pallas_kernels.top_k`), it selects the elements of a block; XLA would
sort the block. With `block=None`, the whole leaf is one block. Left out: values in fewer bits.
"""

import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxscale.errors import UserError
from jaxscale.replicas.one_phase import OnePhase
from jaxscale.typing import Array, Float, Int, Key
from pallas_kernels.dispatch import Explanation, is_noting, note
from pallas_kernels.target import target
from pallas_kernels.top_k.api import top_k

FIRST_FRACTION = 0.25
"""First fraction of the warm-up. Its powers follow: 6.25%, 1.56% and 0.39% (arXiv:1712.01887, section 3.3)."""

MAX_K = 128
"""Largest number of elements that the kernel can select in a block (`pallas_kernels.top_k`)."""

MAX_BLOCK = 2**16
"""Number of elements of the largest block for which uint16 can represent all offsets."""


class LargestElements(NamedTuple):
    """The elements of each block that are sent: those with the largest magnitude.

    Args:
        values: values of the elements, float32.
        offsets: position of each element within its block: uint16, or int32 if the block is the whole leaf.
    """

    values: Float[Array, "blocks sent"]
    offsets: Int[Array, "blocks sent"]


@dataclasses.dataclass(frozen=True)
class TopK(OnePhase):
    """A codec that sends the elements with the largest magnitude, as float32 values and offsets.

    Args:
        fraction: fraction of the elements that are sent, in (0, 1].
        block: number of elements of a block; `None`: the whole leaf is one block.
        warmup: number of steps in which the fraction falls to its final value, by a factor of four at a time; 0: no
            warm-up.

    Example:
        >>> str(TopK(0.01)), str(TopK(0.001, block=None))
        ('topk:0.01', 'topk:0.001,block=none')
        >>> [(step, codec.fraction) for step, codec in TopK(0.01).timetable]
        [(0, 0.25), (34, 0.0625), (67, 0.015625), (100, 0.01)]
        >>> codec = TopK(0.5, block=4)
        >>> codec.decode(codec.encode(jnp.array([1.0, -5.0, 0.5, 2.0, 0.1]), None), 5)
        Array([ 0. , -5. ,  0. ,  2. ,  0.1], dtype=float32)
        >>> TopK(0.0001)
        Traceback (most recent call last):
        jaxscale.errors.UserError: fraction: got 0.0001, which selects 0 of 1024 elements: use block=16384
    """

    name: ClassVar[str] = "topk"
    value: ClassVar[str | None] = "fraction"
    late: ClassVar[bool] = True

    fraction: float
    block: int | None = dataclasses.field(default=1024, kw_only=True)
    warmup: int = dataclasses.field(default=100, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fraction <= 1:
            raise UserError(f"fraction: got {self.fraction}, expected a number in (0, 1], such as 0.01")
        if self.block is not None and not 1 <= self.block <= MAX_BLOCK:
            raise UserError(f"block: got {self.block}, expected 1 to {MAX_BLOCK} elements, or none for the whole leaf")
        if self.block is not None and round(self.fraction * self.block) < 1:
            least_block = 2 ** math.ceil(math.log2(1 / self.fraction))
            remedy_text = f"block={least_block}" if least_block <= MAX_BLOCK else "block=none"
            raise UserError(
                f"fraction: got {self.fraction}, which selects 0 of {self.block} elements: use {remedy_text}"
            )
        if self.warmup < 0:
            raise UserError(f"warmup: got {self.warmup}, expected a number of steps >= 0")

    def sizes(self, elements: int) -> tuple[int, int, int]:
        """Return (number of blocks of a leaf, number of elements of a block, number of elements that a block sends).

        Args:
            elements: number of elements of the leaf.
        """
        block_length = elements if self.block is None else min(self.block, elements)
        return math.ceil(elements / block_length), block_length, max(1, round(self.fraction * block_length))

    def encode(self, flat: Float[Array, "elements"], key: Key | None) -> LargestElements:
        """Return the elements with the largest magnitude of each block, with their offsets."""
        block_count, block_length, sent_count = self.sizes(flat.size)
        blocks = jnp.pad(flat, (0, block_count * block_length - flat.size)).reshape(block_count, block_length)
        if self.block is None:
            if is_noting():
                note(Explanation("top_k", target(), "reference", {}, "a kernel selects in blocks, not in a whole leaf"))
            _, offsets = lax.top_k(jnp.abs(blocks), sent_count)
            return LargestElements(jnp.take_along_axis(blocks, offsets, -1), offsets)
        values, offsets = top_k(blocks, sent_count, block=block_length, axis=-1)
        return LargestElements(values, offsets.astype(jnp.uint16))

    def decode(self, message: LargestElements, elements: int) -> Float[Array, "elements"]:
        """Return the elements of a leaf: the message's values at their positions, and zeros at all other positions."""
        block_count, block_length, _ = self.sizes(elements)
        positions = jnp.arange(block_count)[:, None] * block_length + message.offsets.astype(jnp.int32)
        flat = jnp.zeros(block_count * block_length, jnp.float32)
        return flat.at[positions].set(message.values, unique_indices=True, mode="promise_in_bounds")[:elements]

    def fractions(self) -> tuple[float, ...]:
        """Return the fractions of the warm-up, which last equally many steps, and then the final fraction.

        Example:
            >>> TopK(0.001, warmup=400).fractions()
            (0.25, 0.0625, 0.015625, 0.00390625, 0.001)
        """
        warmup_fractions = []
        while self.warmup and FIRST_FRACTION ** (len(warmup_fractions) + 1) > self.fraction:
            warmup_fractions.append(FIRST_FRACTION ** (len(warmup_fractions) + 1))
        return (*warmup_fractions, self.fraction)

    def _timetable(self) -> tuple[tuple[int, "TopK"], ...]:
        """Return (first step, codec) for each phase: one phase for each fraction."""
        fractions = self.fractions()
        phase_count = max(len(fractions) - 1, 1)
        fraction_by_step = {math.ceil(i * self.warmup / phase_count): fraction for i, fraction in enumerate(fractions)}
        return tuple(
            (step, dataclasses.replace(self, fraction=fraction, block=self._block_length(fraction), warmup=0, start=0))
            for step, fraction in fraction_by_step.items()
        )

    def _block_length(self, fraction: float) -> int | None:
        """Return the value of `block` for a fraction of the warm-up, halved until a kernel can select the elements."""
        length = self.block
        while length is not None and fraction > self.fraction and length % 2 == 0 and round(fraction * length) > MAX_K:
            length //= 2
        return length
