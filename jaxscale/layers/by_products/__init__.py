"""Convolutions on CPUs, and their gradients, as products of matrices; `layers/conv.py` selects them."""
