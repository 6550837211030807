"""Blocks of floats as whole numbers of 8 or 4 bits, see api.py."""
