r"""DiLoCo: replicas train alone for many steps, and then move together by what they have moved on average.

Each replica i makes H steps of its own optimizer from the weights θ that all share, to w_i, and the way back is a
gradient to an outer optimizer (Douillard et al. 2023, arXiv 2311.08105), Nesterov's SGD:

    d = mean of θ - w_i,   m = μ m + d,   θ = θ - η (d + μ m),   w_i = θ for all

so that the slow axis carries the bytes of one step in H, and `Plan.reduce` may have a codec send d in fewer. With
H = 1, plain SGD inside and an outer rate of 1 without momentum this is data parallel training. With AdamW inside it is
not, even then: each replica divides its own gradient by its own variance.

In parts (Streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512) the weights meet at different steps, so that the
most that is sent at once is a part. Left out of that paper: going on while a part is under way, and taking over a
mixture of θ and w_i.

`Diloco` is a plan's; `step/outer.py` is where it meets a train step. `diloco` is the same for a loop of one's own.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxscale.errors import UserError, unknown
from jaxscale.values import check_types, field_types, parse


@dataclasses.dataclass(frozen=True)
class Diloco:
    """When replicas meet and how they then move. The text form is `"every=100,lr=0.7,momentum=0.9,fragments=1"`.

    Args:
        every: H, the steps of each replica between two meetings: 100 to 500 in the paper.
        lr: η, the outer learning rate.
        momentum: μ, of the outer optimizer; 0 keeps none.
        fragments: parts of the weights that meet by turns.

    Example:
        >>> Diloco.parse("every=100,fragments=2")
        Diloco(every=100, lr=0.7, momentum=0.9, fragments=2)
        >>> str(Diloco(every=50)), Diloco(every=4, fragments=2).due(4), Diloco(every=4, fragments=2).due(6)
        ('every=50,lr=0.7,momentum=0.9,fragments=1', (0,), (1,))
        >>> Diloco.parse("evry=100")
        Traceback (most recent call last):
        jaxscale.errors.UserError: unknown option of diloco 'evry': expected one of every, fragments, lr, momentum; \
did you mean 'every'?
    """

    every: int
    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        if self.every < 1:
            raise UserError(f"diloco every: got {self.every}, expected 1 step or more")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise UserError(f"diloco lr: got {self.lr}, expected a number above 0; the paper's is 0.7")
        if not 0 <= self.momentum < 1:
            raise UserError(f"diloco momentum: got {self.momentum}, expected 0 (none) or more, and less than 1")
        if not 1 <= self.fragments <= self.every:
            raise UserError(
                f"diloco fragments: got {self.fragments} with every={self.every}, expected 1 to {self.every}: each has "
                "a step of its own"
            )

    @classmethod
    def parse(cls, text: str) -> "Diloco":
        """The value of its text form; `every` must be given.

        Raises:
            UserError: an unknown option, with the near miss; a value that is refused.
        """
        hints, given = field_types(cls), {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            key, equals, value = (word.strip() for word in part.partition("="))
            if key not in hints:
                raise unknown("option of diloco", key, hints)
            if not equals or key in given:
                raise UserError(f"diloco {text!r}: got {part!r}, expected each option once, as {key}=VALUE")
            given[key] = parse(value, hints[key], f"diloco {key}")
        if "every" not in given:
            raise UserError(f"diloco {text!r}: expected every=STEPS, the steps between two meetings, such as every=100")
        return cls(**given)

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self))

    def due(self, steps: int) -> tuple[int, ...]:
        """Parts of the weights that meet after so many steps."""
        turns = (part * self.every // self.fragments for part in range(self.fragments))
        return tuple(part for part, turn in enumerate(turns) if (steps - turn) % self.every == 0)

    def moved(self, weight: Any, momentum: Any, way: Any) -> tuple[Any, Any]:
        """The outer step of one tensor: its weights and its momentum after it.

        Args:
            weight: θ.
            momentum: m; `None` where there is none.
            way: d.
        """
        if momentum is None:
            return weight - self.lr * way, None
        momentum = self.momentum * momentum + way
        return weight - self.lr * (way + self.momentum * momentum), momentum


def fragments_of(sizes: Mapping[str, int], count: int) -> tuple[tuple[str, ...], ...]:
    """Names of the tensors of each part, the parts about as large as one another.

    Layers that are stacked in one array are one tensor here, where the paper's parts are of layers.

    Args:
        sizes: elements of each tensor.
        count: of parts.

    Raises:
        UserError: fewer tensors than parts.

    Example:
        >>> fragments_of({"up": 40, "down": 30, "norm": 1, "head": 20}, 2)
        (('up', 'norm'), ('down', 'head'))
    """
    if count > len(sizes):
        raise UserError(f"diloco fragments: got {count}, and the model has {len(sizes)} tensors: take fewer")
    parts: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        min(parts, key=lambda part: sum(sizes[n] for n in part)).append(name)
    order = list(sizes)
    return tuple(tuple(sorted(part, key=order.index)) for part in parts)


class DilocoState(NamedTuple):
    """What a replica keeps.

    Args:
        count: steps made.
        inner: the inner optimizer's state, its own.
        shared: θ, alike on all.
        outer: the outer optimizer's state, alike on all.
        owed: the codec's of each parameter, in order; empty without one.
    """

    count: Any
    inner: Any
    shared: Any
    outer: Any
    owed: tuple[Any, ...]


def diloco(
    inner: Any, outer: Any = None, *, every: int = 100, axis: str = "replica", codec: Any = None, replicas: int = 0
) -> Any:
    """An optax transformation of a replica's own gradients, for a `jax.shard_map` or `jax.vmap` of that axis.

    Types of a `shard_map` cannot tell that replicas are alike after a meeting: it takes `check_vma=False`.

    Args:
        inner: the optimizer of each replica, any optax transformation.
        outer: that of the weights that all share; `None` is `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
        every: steps of each replica between two meetings.
        axis: name of the replicas' axis.
        codec: averages the ways back, such as `compression.Int8()`; one that draws nothing at random. `None` sends
            them whole.
        replicas: how many there are; for the codec alone.

    Returns:
        The transformation, of which `update` needs the parameters. At a meeting its updates take a replica's weights to
        those that all share, up to the last bit of the sum.

    Raises:
        UserError: `every` is below 1, or a codec comes without the number of replicas.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> rule = diloco(optax.sgd(0.1), optax.sgd(1.0), every=1, axis="r")
        >>> step = jax.vmap(lambda g, p: rule.update(g, rule.init(p), p)[0], axis_name="r", in_axes=(0, None))
        >>> print(step(jnp.array([1.0, 3.0]), jnp.ones(())).round(3))  # the mean of the gradients is 2
        [-0.2 -0.2]
    """
    import jax
    import jax.numpy as jnp
    import optax
    from jax import lax

    if every < 1:
        raise UserError(f"diloco: got every={every}, expected 1 step or more")
    if codec is not None and replicas < 2:
        raise UserError(f"diloco: got replicas={replicas} with codec {codec}, expected how many there are, 2 or more")
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer

    def init(params: Any) -> DilocoState:
        owed = [] if codec is None else [codec.init(p.shape, None, replicas) for p in jax.tree.leaves(params)]
        return DilocoState(jnp.zeros((), jnp.int32), inner.init(params), params, outer.init(params), tuple(owed))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, DilocoState]:
        if params is None:
            raise UserError("diloco: update(gradients, state, params) needs the parameters")
        steps, kept = inner.update(updates, state.inner, params)
        alone, count = optax.apply_updates(params, steps), state.count + 1
        treedef = jax.tree.structure(params)

        def met() -> Any:
            ways = jax.tree.leaves(jax.tree.map(lambda shared, own: shared - own, state.shared, alone))
            means, owed = [], []
            for number, way in enumerate(ways):
                if codec is None:
                    means.append(lax.pmean(way, axis))
                    continue
                mean, left = codec.reduce(way, state.owed[number], axis, None, count)
                means.append(mean)
                owed.append(left)
            moves, after = outer.update(treedef.unflatten(means), state.outer, state.shared)
            shared = optax.apply_updates(state.shared, moves)
            return jax.tree.map(lambda new, old: new - old, shared, params), shared, after, tuple(owed)

        def apart() -> Any:
            return steps, state.shared, state.outer, state.owed

        moved, *rest = lax.cond(count % every == 0, met, apart)
        return moved, DilocoState(count, kept, *rest)

    return optax.GradientTransformation(init, update)
