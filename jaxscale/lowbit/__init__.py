"""Low precision: quantized arrays, quantized optimizer state, split weights, and matrix products in 8 and 4 bits."""

from typing import TYPE_CHECKING

from jaxscale.lazy import lazy_names

_MODULE_BY_NAME = {
    "MAPS": "jaxscale.lowbit.codebooks",
    "Quantized": "jaxscale.lowbit.quantize",
    "decode": "jaxscale.lowbit.quantize",
    "encode": "jaxscale.lowbit.quantize",
    "is_quantized": "jaxscale.lowbit.quantize",
    "join": "jaxscale.lowbit.split_weights",
    "product": "jaxscale.lowbit.products",
    "quantize_state": "jaxscale.lowbit.quantized",
    "radix_4": "jaxscale.lowbit.products",
    "split": "jaxscale.lowbit.split_weights",
}
"""For each public name, the module from which the name loads on first use."""

if TYPE_CHECKING:
    from jaxscale.lowbit.codebooks import MAPS
    from jaxscale.lowbit.products import product, radix_4
    from jaxscale.lowbit.quantize import Quantized, decode, encode, is_quantized
    from jaxscale.lowbit.quantized import quantize_state
    from jaxscale.lowbit.split_weights import join, split

__all__ = [
    "MAPS", "Quantized", "decode", "encode", "is_quantized", "join", "product", "quantize_state", "radix_4", "split",
]  # fmt: skip

__getattr__ = lazy_names(__name__, _MODULE_BY_NAME)
