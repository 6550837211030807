"""Kernels written in Pallas: a package of its own that imports JAX alone, and can be used without jaxscale.

A function is loaded when it is first asked for. See README.md for the contract of a kernel's folder.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallas_kernels.adam8.api import adam8 as adam8
    from pallas_kernels.attention.api import attention as attention
    from pallas_kernels.cross_entropy.api import cross_entropy as cross_entropy
    from pallas_kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
    from pallas_kernels.norm.api import layer_norm as layer_norm
    from pallas_kernels.norm.api import rms_norm as rms_norm
    from pallas_kernels.quantize.api import dequantize as dequantize
    from pallas_kernels.quantize.api import quantize as quantize
    from pallas_kernels.top_k.api import top_k as top_k

_WHERE: dict[str, str] = {
    "adam8": "adam8.api",
    "attention": "attention.api",
    "cross_entropy": "cross_entropy.api",
    "dequantize": "quantize.api",
    "grouped_matmul": "grouped_matmul.api",
    "layer_norm": "norm.api",
    "quantize": "quantize.api",
    "rms_norm": "norm.api",
    "top_k": "top_k.api",
}
"""Module of each function that can be imported from here."""

for _folder in {where.partition(".")[0] for where in _WHERE.values()}:
    # a function may have its folder's name: once the folder is imported, the name is free for it for good
    importlib.import_module(f"pallas_kernels.{_folder}")
    del globals()[_folder]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'pallas_kernels' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pallas_kernels.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
