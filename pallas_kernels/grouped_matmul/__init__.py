"""Rows sorted by group, times their group's matrix: the experts of a mixture."""

from pallas_kernels.grouped_matmul.api import IMPLEMENTATIONS, explain, grouped_matmul
from pallas_kernels.grouped_matmul.cases import CASES, Case

__all__ = ["CASES", "IMPLEMENTATIONS", "Case", "explain", "grouped_matmul"]
