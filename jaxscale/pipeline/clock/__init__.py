"""The time and memory of a schedule, from a simulation with given costs or from a measurement."""
