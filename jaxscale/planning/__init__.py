"""Whether a plan fits a platform, and which plan does: estimates of a step's memory, searches, and pictures."""
