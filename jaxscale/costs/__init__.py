"""What work costs: FLOP of a program, read from its jaxpr without a device."""
