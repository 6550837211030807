"""A run: the loop, its directory and files, and what is done with them."""
