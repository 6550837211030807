"""What a user specifies of a training: an Experiment, its Plan, and the rules on what goes together."""
