"""The values that specify a training run: an Experiment, its Plan, and the rules on which requests can be combined."""
