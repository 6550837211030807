"""Which plan fits a platform, and why: estimates of a step's memory, verdicts, and pictures of them."""
