"""Sampling: how many tokens to draw after a prompt, from which distribution, and what ends a continuation.

This module imports no JAX, so that a mistyped value is reported at once.
"""

import dataclasses
import math
from typing import Any

from jaxscale.errors import UserError
from jaxscale.values import check_types
from jaxscale.values.limits import MAX_INT32, check_at_most


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens after a prompt are drawn.

    The logits are divided by `temperature`. Then `top_k`, `top_p` and `min_p` remove unlikely tokens, in this order,
    each from the distribution that the previous one leaves. Tokens of equal probability are kept or removed together.

    Args:
        tokens: largest number of tokens to draw for each continuation.
        temperature: divisor of the logits; 0 draws the most likely token.
        seed: seed of the draws; the draw for sample j of prompt i at position p uses only the seed, i, j and p.
        top_k: number of most likely tokens to draw from; `None` for all.
        top_p: draw from the fewest most likely tokens whose probabilities sum to `top_p` or more; `None` for all.
        min_p: draw from tokens with at least `min_p` times the probability of the most likely one; `None` for all.
        stop: texts that end a continuation; the continuation does not contain them.
        stop_ids: ids of tokens that end a continuation; the continuation does not contain them.
        samples: number of continuations of each prompt.

    Raises:
        UserError: a value is out of range.

    Example:
        >>> Sampling(tokens=5, top_p=0.9).samples
        1
        >>> Sampling(top_p=1.5)
        Traceback (most recent call last):
        jaxscale.errors.UserError: top_p: got 1.5, expected a number above 0 and at most 1; omit it to draw from all
    """

    tokens: int = 200
    temperature: float = 0.8
    seed: int = 0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    samples: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _plain_value(getattr(self, field.name)))
        check_types(self)
        for name, advice in {
            "tokens": "",
            "samples": "",
            "top_k": "; leave it out for all tokens",
        }.items():
            count = getattr(self, name)
            if count is not None and count < 1:
                raise UserError(f"{name}: got {count!r}, expected a whole number >= 1{advice}")
            check_at_most(name, count or 1, MAX_INT32)
        if not (0 <= self.temperature < math.inf):
            raise UserError(
                f"temperature: got {self.temperature!r}, expected a number >= 0; 0 takes the most likely token"
            )
        if not -(2**31) <= self.seed < 2**31:
            raise UserError(f"seed: got {self.seed!r}, expected a whole number from -2**31 to 2**31 - 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(
                f"top_p: got {self.top_p!r}, expected a number above 0 and at most 1; omit it to draw from all"
            )
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UserError(f"min_p: got {self.min_p!r}, expected a share from 0 to 1; omit it to draw from all")
        if "" in self.stop:
            raise UserError("stop: got '', expected a text that ends a continuation; () stops at no text")
        for stop_id in self.stop_ids:
            if stop_id < 0:
                raise UserError(f"stop_ids: got {stop_id!r}, expected ids of tokens, whole numbers >= 0")


def _plain_value(value: Any) -> Any:
    """Return a list as a tuple, and a NumPy number as a Python number; other values are returned unchanged."""
    if isinstance(value, list | tuple):
        return tuple(item.item() if getattr(item, "shape", None) == () else item for item in value)
    return value.item() if getattr(value, "shape", None) == () else value
