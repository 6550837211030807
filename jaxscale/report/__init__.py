"""The report of a run: a page with charts and pictures, and a summary, written from the run's files."""
