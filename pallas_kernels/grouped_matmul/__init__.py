"""Each row, of rows sorted by group, times the matrix of its group, as in a mixture of experts: see api.py."""
