"""Softmax cross-entropy of a linear layer, without all logits at once: see api.py."""
