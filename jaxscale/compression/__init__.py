"""Gradients over a slow axis in few bytes: codecs, what they send, and the formulas for it."""

from jaxscale.compression.codec import Codec, State
from jaxscale.compression.codecs import CODECS

__all__ = ["CODECS", "Codec", "State"]
