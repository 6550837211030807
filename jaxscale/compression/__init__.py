"""Gradients over a slow axis in few bytes: codecs, what they send, and the formulas for it."""

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

__all__ = [
    "CODECS",
    "DGC",
    "QSGD",
    "Codec",
    "GradZip",
    "Int4",
    "Int8",
    "OneBit",
    "PowerSGD",
    "State",
    "TopK",
]
