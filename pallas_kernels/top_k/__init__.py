"""The largest numbers of each block, see api.py."""
