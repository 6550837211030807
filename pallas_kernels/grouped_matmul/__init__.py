"""Rows sorted by group, times their group's matrix (the experts of a mixture): see api.py."""
