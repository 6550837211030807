"""Search for the best plan of a model on a platform: communication, seconds and bytes in closed form, and a ranking."""
