"""One train step from values: Experiment, Plan, TrainState, build."""
