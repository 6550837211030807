"""The costs of a model's blocks on a device of a pipeline, and the resources of a device, for the partition."""

import dataclasses
import math

from jaxscale.errors import UserError


@dataclasses.dataclass(frozen=True)
class Price:
    """The costs of one block for one microbatch on one kind of device. Prices of neighbouring blocks add up.

    Args:
        forward: seconds of its forward.
        input_gradient: seconds of its input gradient (I).
        weight_gradient: seconds of its weight gradient (W); a backward in one action takes I + W.
        weight_bytes: bytes of its weights, their gradients and the optimizer's state.
        version_bytes: bytes of one more version of its weights (asynchronous schedules).
        stash_bytes: bytes kept from the forward of a microbatch to its backward (or W).
        between_bytes: further bytes kept from I to W, if the backward is split.
        message_bytes: bytes sent to the next block, and bytes of the gradient that comes back.
        working_bytes: bytes that are alive only while the block runs. Of the blocks of a stage the largest number
            counts.

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
            price = getattr(self, field.name)
            if not (math.isfinite(price) and price >= 0):
                raise UserError(f"price of a block: {field.name} is {price}, expected a finite number >= 0")

    def times(self, factor: float) -> "Price":
        """Return the price of the block on a device that takes `factor` times the seconds."""
        seconds = ("forward", "input_gradient", "weight_gradient")
        return dataclasses.replace(self, **{name: getattr(self, name) * factor for name in seconds})

    def share(self, parts: float) -> "Price":
        """Return the price for a smaller microbatch: work and stash divided by `parts`, weights unchanged."""
        weight_fields = ("weight_bytes", "version_bytes")
        names = (field.name for field in dataclasses.fields(self) if field.name not in weight_fields)
        return dataclasses.replace(self, **{name: getattr(self, name) / parts for name in names})


@dataclasses.dataclass(frozen=True)
class ModelPrices:
    """The prices of a model on one kind of device.

    Args:
        blocks: prices of the blocks, in order.
        first: price of the first stage's work before its blocks (the embedding).
        last: price of the last stage's work behind them (head and loss, with chunked logits as working bytes).
        shared_bytes: bytes on every device that all stages read (gathered embedding and head, their gradients).
    """

    blocks: tuple[Price, ...]
    first: Price | None = None
    last: Price | None = None
    shared_bytes: float = 0

    def share(self, parts: float) -> "ModelPrices":
        """Return the prices for one of `parts` microbatches, if these prices are for a whole batch.

        Seconds are taken as proportional to the size of the microbatch.
        """
        first, last = (price and price.share(parts) for price in (self.first, self.last))
        return ModelPrices(tuple(block.share(parts) for block in self.blocks), first, last, self.shared_bytes)


@dataclasses.dataclass(frozen=True)
class PipelineDevice:
    """A device on the pipe axis, and its link to the next device; the last one's link leads to the first.

    Args:
        memory_bytes: bytes available to this program; `None`: no bound.
        kind: name of its kind, which selects the price list if devices are unlike.
        link: bytes/s to and from the next device.
        latency: seconds of a message on that link, however small.

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
