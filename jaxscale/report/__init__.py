"""The report of a run: a page made of its files."""
