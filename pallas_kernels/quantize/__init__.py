"""Quantization of floats to integers of 8 or 4 bits, in blocks that share a scale; see api.py."""
