"""The values that specify a training run: an Experiment, its Plan, and the rules about combinations of settings."""
