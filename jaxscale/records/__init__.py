"""Files of a run: its source, its directory, metrics and samples."""
