"""Attention by cuDNN, through `jax.nn.dot_product_attention`: a baseline on NVIDIA GPUs that runs only if named."""

from typing import Any

import jax

from pallas_kernels.attention.problem import Problem
from pallas_kernels.attention.reference import Options
from pallas_kernels.target import Target


def why_unsupported(target: Target, problem: Problem) -> str | None:
    """Return the reason why cuDNN cannot run a problem, or None if it can."""
    if problem.has_segments:
        return "cuDNN does not support segment ids"
    if problem.has_offset:
        return "cuDNN does not support query_offset: its queries start at position 0"
    if problem.options.soft_cap is not None:
        return "cuDNN does not support a soft cap"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"cuDNN needs bfloat16 or float16, not {problem.dtype}"
    if problem.H % 8 or problem.H > 128:
        return f"cuDNN needs heads of a multiple of 8 and at most 128 wide, not {problem.H}"
    return None


def attention(q: Any, k: Any, v: Any, options: Options) -> Any:
    """Compute the attention that `reference.forward` defines, but not the log-sum-exp; JAX can differentiate it.

    Args:
        q: queries (B,T,N,H).
        k, v: keys and values (B,S,K,H).
        options: what to compute.

    Returns:
        The output (B,T,N,H) in the dtype of `q`.
    """
    window = None if options.window is None else (options.window - 1, 0)
    settings: dict[str, Any] = {"is_causal": options.causal, "local_window_size": window}
    return jax.nn.dot_product_attention(q, k, v, scale=options.scale, implementation="cudnn", **settings)
