"""Time and memory of a schedule: simulated under given costs, and measured."""
