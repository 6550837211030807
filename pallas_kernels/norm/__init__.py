"""RMS norm and layer norm, with or without a residual added first."""

from pallas_kernels.norm.api import IMPLEMENTATIONS, NAMES, explain, layer_norm, rms_norm
from pallas_kernels.norm.cases import CASES, Case

__all__ = ["CASES", "IMPLEMENTATIONS", "NAMES", "Case", "explain", "layer_norm", "rms_norm"]
