"""Compiled: bytes and FLOP of a train step, as its compiler reports them."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Bytes and FLOP of a compiled train step, per device.

    Args:
        seconds: that compiling took.
        argument_bytes: of the train state and the batch.
        output_bytes: of what the step gives back.
        alias_bytes: of outputs that take the place of donated arguments.
        temp_bytes: of everything that lives within the step: gradients, activations, gathered weights.
        flop: floating-point operations as the compiler counts them; a loop's body counts once.
    """

    seconds: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    flop: float

    @classmethod
    def of(cls, executable: Any, seconds: float) -> "Compiled":
        """Those of a program.

        Args:
            executable: a `jax.stages.Compiled`.
            seconds: that compiling took.
        """
        memory, cost = executable.memory_analysis(), executable.cost_analysis() or {}
        assert memory is not None, "CPU, GPU and TPU all report it"
        return cls(
            seconds=seconds,
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            flop=float(cost.get("flops", 0.0)),
        )
