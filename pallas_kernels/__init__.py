"""Kernels written in Pallas: a separate package that imports only JAX and can be used without jaxscale.

The module of a public function is imported when the function is first accessed. README.md describes what a kernel's
folder must contain.
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

_MODULES: dict[str, str] = {
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
"""Module, relative to this package, of each public function."""

for _folder in {module.partition(".")[0] for module in _MODULES.values()}:
    # a function may have the name of its folder: an import binds the folder's name here once, so bind and delete it now
    importlib.import_module(f"pallas_kernels.{_folder}")
    del globals()[_folder]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'pallas_kernels' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pallas_kernels.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
