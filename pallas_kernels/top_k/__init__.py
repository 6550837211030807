"""Block top-k: the k largest elements of each block of a matrix; see api.py."""
