"""Convolutions on CPUs, and their gradients, as products of matrices; `layers/conv.py` selects them.

- `winograd`: 3 x 3 kernels with stride 1, by products of transformed tiles.
- `patches`: gradients of other convolutions, by products of patches.
"""
