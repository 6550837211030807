"""The cost of work: FLOP of a program, from its jaxpr, without a device."""
