"""From a plan to one that a step can be built of: rules on what goes together, defaults, the memory decision."""
