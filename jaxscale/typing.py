"""One alphabet for every shape in the project, and the array types spelled with it.

| letter | dim | letter | dim |
|---|---|---|---|
| B | batch (sequences, images) | D | embed (width of the residual stream) |
| T | query positions of a sequence | F | mlp (hidden width of a feed-forward layer) |
| S | key and value positions | V | vocab |
| N | query heads | E | expert |
| K | key and value heads | L | layers |
| H | head_dim | C | channels of an image |

`jaxtyping` reads the letters from annotations such as `Float[Array, "B T D"]`. The tests check the annotations at run
time; elsewhere they cost nothing.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
from jaxtyping import Array, Bool, Float, Int, Integer, PyTree, Shaped, UInt32

Key: TypeAlias = jax.Array
"""A typed PRNG key, from `jax.random.key`."""
Batch: TypeAlias = Mapping[str, Any]
"""Arrays whose first dim is the batch: `tokens`, `targets`, `weights`, `segments`, `positions`; `images`, `labels`."""
Params: TypeAlias = Mapping[str, Any]
"""Nested dict of arrays: the trained leaves of a model, by attribute name."""

__all__ = ["Array", "Batch", "Bool", "Float", "Int", "Integer", "Key", "Params", "PyTree", "Shaped", "UInt32"]
