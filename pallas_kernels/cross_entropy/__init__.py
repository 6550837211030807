"""Softmax cross-entropy of a linear layer, without all logits at once."""

from pallas_kernels.cross_entropy.api import IMPLEMENTATIONS, NAMES, cross_entropy, explain
from pallas_kernels.cross_entropy.cases import CASES, Case

__all__ = ["CASES", "IMPLEMENTATIONS", "NAMES", "Case", "cross_entropy", "explain"]
