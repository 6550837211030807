"""The files of a run: the run directory, the source of the experiment, metrics and samples."""
