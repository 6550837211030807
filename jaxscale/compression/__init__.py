"""Gradients over a slow axis in few bytes: codecs, their messages, and formulas for the bytes.

Importing this package imports no JAX: each name below loads at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "CODECS": "codecs",
    "DGC": "codecs.dgc",
    "QSGD": "codecs.qsgd",
    "Codec": "codec",
    "GradZip": "codecs.gradzip",
    "Int4": "codecs.int4",
    "Int8": "codecs.int8",
    "NamedCodec": "named",
    "OneBit": "codecs.one_bit",
    "PowerSGD": "codecs.powersgd",
    "State": "codec",
    "TopK": "codecs.topk",
}

if TYPE_CHECKING:
    from jaxscale.compression.codec import Codec, State
    from jaxscale.compression.codecs import CODECS
    from jaxscale.compression.codecs.dgc import DGC
    from jaxscale.compression.codecs.gradzip import GradZip
    from jaxscale.compression.codecs.int4 import Int4
    from jaxscale.compression.codecs.int8 import Int8
    from jaxscale.compression.codecs.one_bit import OneBit
    from jaxscale.compression.codecs.powersgd import PowerSGD
    from jaxscale.compression.codecs.qsgd import QSGD
    from jaxscale.compression.codecs.topk import TopK
    from jaxscale.compression.named import NamedCodec

__all__ = [
    "CODECS", "DGC", "QSGD", "Codec", "GradZip", "Int4", "Int8", "NamedCodec", "OneBit", "PowerSGD", "State", "TopK",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
