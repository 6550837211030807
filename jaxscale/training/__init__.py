"""A run: the loop, its directory and files, and their use afterwards."""
