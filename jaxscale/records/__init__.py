"""Files of a run: its source, directory, metrics and samples, read without JAX."""
