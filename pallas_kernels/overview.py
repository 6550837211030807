"""An overview of which implementation of each kernel runs on a platform, for one case of typical size per kernel."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Explanation

KERNELS = ("adam8", "quantize", "top_k", "grouped_matmul", "norm", "cross_entropy")
"""Folders of the kernels other than attention."""


def overview(platform: str) -> tuple[Explanation, ...]:
    """Explain for every kernel which implementation runs on a platform, and why the others do not.

    Args:
        platform: "tpu v5e", "gpu h200", "cpu".

    Returns:
        One explanation per kernel, attention first.

    Raises:
        ValueError: the platform is unknown.

    Example:
        >>> {explanation.kernel: explanation.chosen for explanation in overview("gpu a100")}["rms_norm"]
        'reference'
    """
    from pallas_kernels.attention.api import explain as explain_attention

    apis = {name: importlib.import_module(f"pallas_kernels.{name}.api") for name in KERNELS}
    cases_by_kernel = {name: importlib.import_module(f"pallas_kernels.{name}.cases").CASES for name in KERNELS}
    abstract_q, abstract_k = (jax.ShapeDtypeStruct((2, 4096, heads, 128), jnp.bfloat16) for heads in (16, 4))
    # of quantize and top_k take a case with blocks along rows, as the codecs of jaxscale use them
    typical_cases = {
        name: next(case for case in cases if getattr(case, "axis", -1) == -1 and "aot" in case.tags)
        for name, cases in cases_by_kernel.items()
    }
    explanations = [explain_attention(abstract_q, abstract_k, abstract_k, platform=platform)]
    explanations += [apis[name].explain(case, platform) for name, case in typical_cases.items()]
    # the folder "norm" has two kernels: add the layer norm to the RMS norm
    layer_norm_case = dataclasses.replace(typical_cases["norm"], center=True)
    return (*explanations, apis["norm"].explain(layer_norm_case, platform))
