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
    from jaxscale.replicas.codec import Codec, State
    from jaxscale.replicas.codecs import CODECS
    from jaxscale.replicas.codecs.dgc import DGC
    from jaxscale.replicas.codecs.gradzip import GradZip
    from jaxscale.replicas.codecs.int4 import Int4
    from jaxscale.replicas.codecs.int8 import Int8
    from jaxscale.replicas.codecs.one_bit import OneBit
    from jaxscale.replicas.codecs.powersgd import PowerSGD
    from jaxscale.replicas.codecs.qsgd import QSGD
    from jaxscale.replicas.codecs.topk import TopK
    from jaxscale.replicas.named import NamedCodec

__all__ = [
    "CODECS", "DGC", "QSGD", "Codec", "GradZip", "Int4", "Int8", "NamedCodec", "OneBit", "PowerSGD", "State", "TopK",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
