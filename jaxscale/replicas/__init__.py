"""Average gradients over a slow mesh axis in few bytes: codecs, their messages, and formulas for the bytes.

Importing this package imports no JAX: each name below loads at its first use.
"""

from typing import TYPE_CHECKING

from jaxscale.lazy import lazy_names

_MODULE_OF_NAME = {
    "CODECS": "codecs",
    "DGC": "codecs.dgc",
    "QSGD": "codecs.qsgd",
    "Codec": "codec",
    "GradZip": "codecs.gradzip",
    "Int4": "codecs.block_codes",
    "Int8": "codecs.block_codes",
    "NamedCodec": "named",
    "OneBit": "codecs.one_bit",
    "PowerSGD": "codecs.powersgd",
    "CodecState": "codec",
    "TopK": "codecs.topk",
}

if TYPE_CHECKING:
    from jaxscale.replicas.codec import Codec, CodecState
    from jaxscale.replicas.codecs import CODECS
    from jaxscale.replicas.codecs.block_codes import Int4, Int8
    from jaxscale.replicas.codecs.dgc import DGC
    from jaxscale.replicas.codecs.gradzip import GradZip
    from jaxscale.replicas.codecs.one_bit import OneBit
    from jaxscale.replicas.codecs.powersgd import PowerSGD
    from jaxscale.replicas.codecs.qsgd import QSGD
    from jaxscale.replicas.codecs.topk import TopK
    from jaxscale.replicas.named import NamedCodec

__all__ = [
    "CODECS", "DGC", "QSGD", "Codec", "CodecState", "GradZip", "Int4", "Int8", "NamedCodec", "OneBit", "PowerSGD",
    "TopK",
]  # fmt: skip

__getattr__ = lazy_names(__name__, {name: f"{__name__}.{module}" for name, module in _MODULE_OF_NAME.items()})
