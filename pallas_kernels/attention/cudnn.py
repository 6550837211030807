"""Attention by cuDNN, through `jax.nn.dot_product_attention`: the yardstick on NVIDIA GPUs, and taken only by name."""

from typing import Any

import jax

from pallas_kernels.attention.problem import Problem
from pallas_kernels.attention.reference import Options
from pallas_kernels.target import Target


def why_unsupported(target: Target, problem: Problem) -> str | None:
    """Why cuDNN cannot run this; None if it can."""
    if problem.segments:
        return "cuDNN knows no segment ids"
    if problem.offset:
        return "cuDNN knows no query_offset: its queries' positions count from 0"
    if problem.options.soft_cap is not None:
        return "cuDNN knows no soft cap"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"cuDNN needs bfloat16 or float16, not {problem.dtype}"
    if problem.H % 8 or problem.H > 128:
        return f"cuDNN needs heads of a multiple of 8 and at most 128 wide, not {problem.H}"
    return None


def attention(q: Any, k: Any, v: Any, options: Options) -> Any:
    """As `reference.forward`, without the log-sum-exp; differentiable."""
    window = None if options.window is None else (options.window - 1, 0)
    settings: dict[str, Any] = {"is_causal": options.causal, "local_window_size": window}
    return jax.nn.dot_product_attention(q, k, v, scale=options.scale, implementation="cudnn", **settings)
