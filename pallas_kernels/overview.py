"""Which implementation of each kernel a platform gets, for one shape of everyday size each."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Explanation

KERNELS = ("adam8", "quantize", "top_k", "grouped_matmul", "norm", "cross_entropy")
"""Folders beside attention's."""


def overview(platform: str) -> tuple[Explanation, ...]:
    """What runs on a platform, kernel by kernel, and why each other implementation does not.

    Args:
        platform: "tpu v5e", "gpu h200", "cpu".

    Raises:
        ValueError: an unknown platform.

    Example:
        >>> {one.kernel: one.chosen for one in overview("gpu a100")}["rms_norm"]
        'reference'
    """
    from pallas_kernels.attention.api import explain as attention

    apis = {name: importlib.import_module(f"pallas_kernels.{name}.api") for name in KERNELS}
    cases = {name: importlib.import_module(f"pallas_kernels.{name}.cases").CASES for name in KERNELS}
    q, k = (jax.ShapeDtypeStruct((2, 4096, heads, 128), jnp.bfloat16) for heads in (16, 4))
    # blocks of codecs lie along rows
    row_cases = {
        name: [case for case in kernel_cases if getattr(case, "axis", -1) == -1] for name, kernel_cases in cases.items()
    }
    everyday = {
        name: next(case for case in kernel_cases if "aot" in case.tags) for name, kernel_cases in row_cases.items()
    }
    others = [apis[name].explain(case, platform) for name, case in everyday.items()]
    # two kernels of one folder
    others.append(apis["norm"].explain(dataclasses.replace(everyday["norm"], center=True), platform))
    return (attention(q, k, k, platform=platform), *others)
