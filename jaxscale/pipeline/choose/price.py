"""The costs of a model's blocks on one kind of device, and the resources of a device, for the choice of a partition."""

import dataclasses
import math

from jaxscale.errors import UserError


@dataclasses.dataclass(frozen=True)
class Price:
    """The costs of one block for one microbatch on one kind of device.

    A stage adds up the costs of its blocks, with two exceptions: it needs the largest of their `working_bytes`, and it
    sends only the message of its last block.

    Args:
        forward: seconds of the forward.
        input_gradient: seconds of the input gradient (I).
        weight_gradient: seconds of the weight gradient (W); a backward in one action takes I + W.
        weight_bytes: bytes of the weights, their gradients and the optimizer's state.
        version_bytes: bytes of each further version of the weights, in asynchronous schedules.
        stash_bytes: bytes kept from the forward of a microbatch to its backward (B or W).
        between_bytes: further bytes kept from I to W, if the backward is split.
        message_bytes: bytes sent to the next block; the gradient that comes back has the same number of bytes.
        working_bytes: bytes that are needed only while the block runs.

    Raises:
        UserError: a price is negative or not finite.

    Example:
        >>> Price(1.0, 1.0, 1.0, stash_bytes=10).times(2.0) == Price(2.0, 2.0, 2.0, stash_bytes=10)
        True
        >>> Price(1.0, 1.0, 1.0, weight_bytes=10, stash_bytes=10).share(2) == Price(
        ...     0.5, 0.5, 0.5, weight_bytes=10, stash_bytes=5
        ... )
        True
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    weight_bytes: float = 0
    version_bytes: float = 0
    stash_bytes: float = 0
    between_bytes: float = 0
    message_bytes: float = 0
    working_bytes: float = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            cost = getattr(self, field.name)
            if not (math.isfinite(cost) and cost >= 0):
                raise UserError(f"price of a block: {field.name} is {cost}, expected a finite number >= 0")

    def times(self, factor: float) -> "Price":
        """Return the price of the block on a device on which every pass takes `factor` times as many seconds."""
        seconds_fields = ("forward", "input_gradient", "weight_gradient")
        return dataclasses.replace(self, **{name: getattr(self, name) * factor for name in seconds_fields})

    def share(self, parts: float) -> "Price":
        """Return the price for a microbatch that is smaller by a factor of `parts`.

        All costs are divided by `parts`, except the bytes of the weights and their versions.
        """
        weight_fields = ("weight_bytes", "version_bytes")
        scaled_fields = (field.name for field in dataclasses.fields(self) if field.name not in weight_fields)
        return dataclasses.replace(self, **{name: getattr(self, name) / parts for name in scaled_fields})


@dataclasses.dataclass(frozen=True)
class ModelPrices:
    """The prices of a model on one kind of device.

    Args:
        blocks: prices of the blocks, in order.
        first: price of the work before the first block (the embedding).
        last: price of the work after the last block (head and loss; chunked logits count as working bytes).
        shared_bytes: bytes on every device for the weights that all stages read (embedding and head, gathered) and for
            their gradients.
    """

    blocks: tuple[Price, ...]
    first: Price | None = None
    last: Price | None = None
    shared_bytes: float = 0

    def share(self, parts: float) -> "ModelPrices":
        """Return the prices for one microbatch if these prices are for a batch of `parts` microbatches.

        The seconds are assumed to be proportional to the size of the microbatch.
        """
        first, last = (price and price.share(parts) for price in (self.first, self.last))
        return ModelPrices(tuple(block.share(parts) for block in self.blocks), first, last, self.shared_bytes)


@dataclasses.dataclass(frozen=True)
class PipelineDevice:
    """A device on the pipe axis and its link to the next device. The last device's link leads to the first device.

    Args:
        memory_bytes: bytes of memory that this program may use; `None`: no limit.
        kind: name of the device's kind. If there are several kinds, the name selects the price list.
        link: rate of the link to the next device in each direction, bytes/s.
        latency: seconds that the smallest message on the link takes.

    Raises:
        UserError: the bytes of memory or the bytes/s of the link are not above 0, or the latency is negative.
    """

    memory_bytes: float | None = None
    kind: str = ""
    link: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise UserError(f"device: got {self.memory_bytes} bytes of memory, expected more than 0, or None")
        if not self.link > 0:
            raise UserError(f"device: got a link of {self.link} bytes/s, expected more than 0")
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise UserError(f"device: got a latency of {self.latency} seconds, expected 0 or more")
