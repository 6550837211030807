"""Codecs that average gradients over a slow mesh axis in few bytes, and formulas for the bytes that they send.

Importing this package imports no JAX: each name below loads at its first use.
"""

from typing import TYPE_CHECKING

from jaxscale.lazy import lazy_names

_MODULE_BY_NAME = {
    "CODECS": "jaxscale.replicas.codecs",
    "Codec": "jaxscale.replicas.codec",
    "CodecState": "jaxscale.replicas.codec",
    "DGC": "jaxscale.replicas.codecs.dgc",
    "Diloco": "jaxscale.replicas.low_communication",
    "GradZip": "jaxscale.replicas.codecs.gradzip",
    "Int4": "jaxscale.replicas.codecs.block_codes",
    "Int8": "jaxscale.replicas.codecs.block_codes",
    "NamedCodec": "jaxscale.replicas.named",
    "OneBit": "jaxscale.replicas.codecs.one_bit",
    "OnePhase": "jaxscale.replicas.one_phase",
    "PowerSGD": "jaxscale.replicas.codecs.powersgd",
    "QSGD": "jaxscale.replicas.codecs.qsgd",
    "TopK": "jaxscale.replicas.codecs.topk",
    "TwoPhase": "jaxscale.replicas.two_phase",
    "decode_integers": "jaxscale.replicas.integers",
    "diloco": "jaxscale.replicas.low_communication",
    "encode_integers": "jaxscale.replicas.integers",
    "register": "jaxscale.replicas.codecs",
    "reduce_gradients": "jaxscale.replicas.tree",
    "start_reduction": "jaxscale.replicas.tree",
}
"""The module that defines each public name; a name is imported from its module at its first use."""

if TYPE_CHECKING:
    from jaxscale.replicas import wire
    from jaxscale.replicas.codec import Codec, CodecState
    from jaxscale.replicas.codecs import CODECS, register
    from jaxscale.replicas.codecs.block_codes import Int4, Int8
    from jaxscale.replicas.codecs.dgc import DGC
    from jaxscale.replicas.codecs.gradzip import GradZip
    from jaxscale.replicas.codecs.one_bit import OneBit
    from jaxscale.replicas.codecs.powersgd import PowerSGD
    from jaxscale.replicas.codecs.qsgd import QSGD
    from jaxscale.replicas.codecs.topk import TopK
    from jaxscale.replicas.integers import decode_integers, encode_integers
    from jaxscale.replicas.low_communication import Diloco, diloco
    from jaxscale.replicas.named import NamedCodec
    from jaxscale.replicas.one_phase import OnePhase
    from jaxscale.replicas.tree import reduce_gradients, start_reduction
    from jaxscale.replicas.two_phase import TwoPhase

__all__ = [
    "CODECS",
    "DGC",
    "QSGD",
    "Codec",
    "CodecState",
    "Diloco",
    "GradZip",
    "Int4",
    "Int8",
    "NamedCodec",
    "OneBit",
    "OnePhase",
    "PowerSGD",
    "TopK",
    "TwoPhase",
    "decode_integers",
    "diloco",
    "encode_integers",
    "reduce_gradients", "register",
    "start_reduction", "wire",
]  # fmt: skip

__getattr__ = lazy_names(__name__, _MODULE_BY_NAME, ("wire",))
