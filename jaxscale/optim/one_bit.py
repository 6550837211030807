r"""1-bit Adam and 1-bit LAMB: momentum in a bit a number between replicas, over a variance that is frozen.

Adam's update is no linear map of the gradient, so error feedback does not mend a gradient sent in a bit. Once the
variance v stands still it is one of the momentum m, and what a message of m leaves out comes with the next (Tang et al.
2021, arXiv 2102.02888). So both rules run in two phases of n replicas, whose messages a codec averages:

    warm-up   each sends its gradient g_i, and the exact mean makes m and v, as in Adam
    frozen    each sends m_i = b1 m + (1 - b1) g_i, and the codec's mean of them is the next m; v stays

`Messages` is what a replica sends, the rules take the mean of it, and `over_replicas` joins both with a codec. 1-bit
LAMB (Li et al. 2021, arXiv 2104.06069) also freezes the trust ratio of each layer, at its running mean, and follows how
far a variance made of the change of m has gone from the frozen one, a tenth a step at most.

As in the papers' program, but: Adam's bias corrections stay, so that the warm-up is Adam or LAMB itself; a number whose
variance is zero, such as a token that never came, does not move, where signs over eps would throw it far; no factor
makes the layers' momenta alike before they are sent, for each layer's message has a scale of its own. Left out: 0/1
Adam, whose variance and steps between messages have schedules of their own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxscale.errors import UserError
from jaxscale.optim.leaves import Leaf, facts_of
from jaxscale.optim.quantize import decode, is_quantized
from jaxscale.typing import Array, Bool, Float, Int

Rule = optax.GradientTransformation


@runtime_checkable
class Codec(Protocol):
    """What averages messages over an axis, such as `compression.OneBit()`."""

    def init(self, shape: Any, key: Any, n: int, *, layers: bool = False) -> Any:
        """The state of one leaf on one of n devices."""
        ...

    def reduce(
        self, gradient: Any, state: Any, axis: str, key: Any = None, step: Any = None, *, layers: bool = False
    ) -> tuple[Any, Any]:
        """The mean of a leaf over the axis, and the state after it."""
        ...


class OneBitState(NamedTuple):
    """What 1-bit Adam keeps.

    Args:
        count: updates made.
        mu: the momentum, alike on all replicas.
        nu: the second moment, which stands still once it is frozen.
    """

    count: Any
    mu: Any
    nu: Any


class OneBitLambState(NamedTuple):
    """What 1-bit LAMB keeps.

    Args:
        count: updates made.
        mu: the momentum, alike on all replicas.
        nu: the second moment, which stands still once it is frozen.
        fresh: the second moment as it would be, from the change of the momentum.
        ratio: running mean of each layer's trust ratio, with its dims of one number.
        factor: of the frozen trust ratio, in the last update.
    """

    count: Any
    mu: Any
    nu: Any
    fresh: Any
    ratio: Any
    factor: Any


class Sent(NamedTuple):
    """What a replica sends.

    Args:
        message: tree like the gradients.
        norm: of its own gradient.
        frozen: whether the message is a momentum.
    """

    message: Any
    norm: Float[Array, ""]
    frozen: Bool[Array, ""]


@dataclasses.dataclass(frozen=True)
class Messages:
    """What replicas send each other.

    Args:
        b1: decay of the momentum.
        freeze: updates before the variance is frozen.
        clip: norm that a replica's own gradient is clipped to before it enters a momentum; `None` never clips. In the
            warm-up the mean is clipped, by `clipped`.

    Example:
        >>> rule, messages = one_bit_adam(1e-3, 1), Messages(b1=0.9, freeze=1)
        >>> params = {"w": jnp.ones((1, 2))}
        >>> state = rule.init(params)
        >>> messages(params, state).message["w"].tolist()  # a gradient
        [[1.0, 1.0]]
        >>> _, state = rule.update(params, state, params)
        >>> round(float(messages(params, state).message["w"][0, 0]), 3)  # 0.9 x 0.1 + 0.1 x 1
        0.19
    """

    b1: float
    freeze: int
    clip: float | None = None

    def count(self, state: Any) -> Int[Array, ""]:
        """Updates made, of a rule's state or one that it is part of."""
        return _found(state).count

    def frozen(self, state: Any) -> Bool[Array, ""]:
        """Whether the variance stands still."""
        return self.count(state) >= self.freeze

    def __call__(self, gradients: Any, state: Any) -> Sent:
        """A replica's message.

        Args:
            gradients: its own.
            state: the rule's, or one that it is part of; its momentum may be quantized.
        """
        frozen, norm = self.frozen(state), optax.tree.norm(gradients)
        share = 1.0 if self.clip is None else jnp.where(norm < self.clip, 1.0, self.clip / norm)

        def one(g: Array, m: Any) -> Array:
            m = decode(m) if is_quantized(m) else m
            return jnp.where(frozen, self.b1 * m + (1 - self.b1) * (g * share), g)

        return Sent(jax.tree.map(one, gradients, _found(state).mu), norm, frozen)


def one_bit_adam(
    rate: float | Callable[[Any], Any],
    freeze: int,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> Rule:
    r"""AdamW whose variance is frozen, so that replicas may send their momentum in a bit a number.

    .. math:: w \leftarrow w - \eta \Big(\frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^{\min(t, F)})} + \epsilon}
        + \lambda w\Big)

    Args:
        rate: learning rate, or a schedule.
        freeze: F, the updates before the variance is frozen: 15 to 25 % of a run in the paper.
        b1, b2, eps: Adam's.
        weight_decay: lambda.
        mask: tree of bools like the parameters, true where weight decay applies; `None` decays all.

    Returns:
        A transformation of the mean of what `Messages` gives: of gradients, and from update F on of momenta.

    Raises:
        UserError: a freeze step below 1: no variance would be known.

    References:
        Tang et al. 2021, arXiv 2102.02888.

    Example:
        >>> rule = one_bit_adam(0.1, 2)
        >>> params = {"w": jnp.ones((1, 2))}
        >>> update, _ = rule.update(params, rule.init(params), params)
        >>> round(float(update["w"][0, 0]), 3)
        -0.1
    """
    _check(freeze)

    def init(params: Any) -> OneBitState:
        return OneBitState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params), optax.tree.zeros_like(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, OneBitState]:
        after, moved = _moments(updates, state, b1, b2, freeze)
        return jax.tree.map(lambda m, v: _direction(m, v, eps), *moved), after

    return optax.chain(
        optax.GradientTransformation(init, update),
        optax.add_decayed_weights(weight_decay, mask=mask),
        optax.scale_by_learning_rate(rate),
    )


def one_bit_lamb(
    rate: float | Callable[[Any], Any],
    freeze: int,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    leaves: Any = None,
    mask: Any = None,
    smooth: float = 0.9,
    factors: tuple[float, float] = (0.5, 4.0),
    change: float = 0.1,
) -> Rule:
    r"""LAMB whose variance is frozen, so that replicas may send their momentum in a bit a number.

    With u of the frozen variance and decay as in LAMB, c the running mean of the trust ratio |w| / |u| in the warm-up,
    and v' of the changes of the momentum,

    .. math:: w \leftarrow w - \eta c f u, \quad
        f = r \max \frac{\sqrt{\hat v} + \epsilon}{\sqrt{\hat v'} + \epsilon} + 1 - r, \quad
        r = \min\Big(1, \frac{|u - \lambda w|}{|u|}\Big)

    for each layer, f within bounds and near the last one.

    Args:
        rate: learning rate, or a schedule.
        freeze: updates before the variance is frozen.
        b1, b2, eps: Adam's.
        weight_decay: lambda.
        leaves: tree of `Leaf` like the parameters; `None` judges by shapes. Stacked layers are each a tensor, and gains
            and biases have no ratio, as in `large_batch.lamb`.
        mask: tree of bools like the parameters, true where weight decay applies; `None` decays all.
        smooth: decay of the mean of the trust ratio.
        factors: bounds of f.
        change: by how much of it f may change in an update.

    Returns:
        A transformation of the mean of what `Messages` gives, that needs the parameters.

    Raises:
        UserError: a freeze step below 1: no variance would be known.

    References:
        Li et al. 2021, arXiv 2104.06069.
    """
    _check(freeze)

    def init(params: Any) -> OneBitLambState:
        def ones(value: float) -> Any:
            if not jax.tree.leaves(params):  # a placeholder, of `optax.tree.map_params`
                return params
            facts = facts_of(leaves, params)
            found = [jnp.full(_row(leaf), value, jnp.float32) for leaf in facts]
            return jax.tree.structure(params).unflatten(found)

        mu, nu, fresh = (optax.tree.zeros_like(params) for _ in range(3))
        return OneBitLambState(jnp.zeros((), jnp.int32), mu, nu, fresh, ones(0.0), ones(1.0))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, OneBitLambState]:
        if params is None:
            raise UserError("one_bit_lamb: update(mean, state, params) needs the parameters, for their norms")
        frozen, treedef = state.count >= freeze, jax.tree.structure(updates)
        after, (first, second) = _moments(updates, state, b1, b2, freeze)

        def anew(old: Array, m: Array, before: Array, v: Array) -> Array:
            gradient = (m - b1 * before) / (1 - b1)
            return jnp.where(frozen, b2 * old + (1 - b2) * gradient**2, v)

        fresh = jax.tree.map(anew, state.fresh, after.mu, state.mu, after.nu)
        decayed = treedef.flatten_up_to(jax.tree.map(lambda _: True, params) if mask is None else mask)
        given = (first, second, fresh, params, state.ratio, state.factor)
        moves, ratios, changed = [], [], []
        for leaf, on, m, v, new, w, ratio, last in zip(
            facts_of(leaves, updates), decayed, *map(treedef.flatten_up_to, given), strict=True
        ):
            plain = _direction(m, v, eps)
            u = plain + weight_decay * w if on else plain
            trust = _trust(w, u, leaf)
            ratio = jnp.where(frozen, ratio, smooth * ratio + (1 - smooth) * trust)
            corrected = _corrected(new, b2, after.count)
            apart = _over((jnp.sqrt(v) + eps) / (jnp.sqrt(corrected) + eps), leaf, jnp.max)
            share = jnp.minimum(1.0, _norm(plain, leaf) / jnp.maximum(_norm(u, leaf), jnp.finfo(jnp.float32).tiny))
            factor = jnp.clip(share * apart + 1 - share, *factors)
            factor = jnp.where(frozen, jnp.clip(factor, (1 - change) * last, (1 + change) * last), last)
            # the mean of so many ratios, whose running one began with zero
            mean_ratio = ratio / (1 - smooth ** jnp.minimum(after.count, freeze))
            scale = jnp.where(frozen, mean_ratio * factor, trust) if leaf.kind != "vector" else jnp.ones_like(trust)
            moves.append(u * scale)
            ratios.append(ratio)
            changed.append(factor)
        kept = OneBitLambState(*after, fresh, treedef.unflatten(ratios), treedef.unflatten(changed))
        return treedef.unflatten(moves), kept

    return optax.chain(optax.GradientTransformation(init, update), optax.scale_by_learning_rate(rate))


def clipped(rule: Rule, messages: Messages) -> Rule:
    """A rule whose mean gradients are clipped to a global norm, and whose mean momenta are left as they are.

    Args:
        rule: of `one_bit_adam` or `one_bit_lamb`, or one that it is part of.
        messages: with the norm, and the freeze step.

    Returns:
        A transformation with the state of `optax.chain(optax.clip_by_global_norm(...), rule)`.
    """
    if messages.clip is None:
        return rule
    clip = optax.clip_by_global_norm(messages.clip)

    def init(params: Any) -> Any:
        return (clip.init(params), rule.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        less, before = clip.update(updates, state[0], params)
        frozen = messages.frozen(state)
        given = jax.tree.map(lambda short, whole: jnp.where(frozen, whole, short), less, updates)
        moves, after = rule.update(given, state[1], params)
        return moves, (before, after)

    return optax.GradientTransformation(init, update)


class OverReplicasState(NamedTuple):
    """What a replica keeps.

    Args:
        rule: the rule's state, alike on all.
        owed: the codec's of each parameter, in order; empty where the mean is exact.
    """

    rule: Any
    owed: tuple[Any, ...]


def over_replicas(
    rule: Rule, messages: Messages, codec: Codec, axis: str, replicas: int, *, leaves: Any = None, small: int = 256
) -> Rule:
    """A rule that takes a replica's own gradients: to run in a `jax.shard_map` or `jax.vmap` of that axis.

    A train step of ours does the same by `compression.reduce.Stage`, which knows devices within a replica too.

    Args:
        rule: of `one_bit_adam` or `one_bit_lamb`.
        messages: with the same b1 and freeze step.
        codec: averages momenta; in the warm-up means are exact. None that draws at random.
        axis: name of the replicas' axis.
        replicas: how many there are.
        leaves: tree of `Leaf` like the parameters; a codec takes each of stacked layers by itself.
        small: numbers of a layer below which its mean is exact, as are gains' and biases'.

    Example:
        >>> from jaxscale.compression import OneBit
        >>> whole = over_replicas(one_bit_adam(0.1, 1), Messages(0.9, 1), OneBit(), "r", 2)
        >>> params = {"w": jnp.ones((16, 16))}
        >>> gradients = {"w": jnp.stack([jnp.ones((16, 16)), jnp.zeros((16, 16))])}
        >>> step = jax.vmap(lambda g: whole.update(g, whole.init(params), params)[0], axis_name="r")
        >>> print(step(gradients)["w"][:, 0, 0].round(3))
        [-0.1 -0.1]
    """

    def stacked(leaf: Leaf) -> bool:
        return leaf.stack > 0

    def coded(leaf: Leaf) -> bool:
        return leaf.kind != "vector" and leaf.rows * leaf.columns >= small

    def init(params: Any) -> OverReplicasState:
        parts = zip(jax.tree.leaves(params), facts_of(leaves, params), strict=True)
        owed = [codec.init(p.shape, None, replicas, layers=stacked(f)) if coded(f) else {} for p, f in parts]
        return OverReplicasState(rule.init(params), tuple(owed))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, OverReplicasState]:
        message, norm, frozen = messages(updates, state.rule)
        good = jnp.isfinite(lax.psum(norm, axis))  # one replica's NaN would stay in what the others owe
        step, treedef = messages.count(state.rule), jax.tree.structure(updates)
        means, owed = [], []
        for leaf, part, before in zip(facts_of(leaves, updates), jax.tree.leaves(message), state.owed, strict=True):
            exact, after = lax.pmean(part, axis), before
            if coded(leaf):
                found, after = codec.reduce(part, before, axis, None, step, layers=stacked(leaf))
                exact = jnp.where(frozen, found, exact)
            means.append(jnp.where(good, exact, jnp.nan))
            owed.append(jax.tree.map(lambda new, old: jnp.where(good & frozen, new, old), after, before))
        moves, kept = rule.update(treedef.unflatten(means), state.rule, params)
        return moves, OverReplicasState(kept, tuple(owed))

    return optax.GradientTransformation(init, update)


def _check(freeze: int) -> None:
    if freeze < 1:
        raise UserError(f"freeze: got {freeze}, expected 1 or more updates: before them no variance is known")


def _found(state: Any) -> Any:
    """The state of the rule in one that it is part of."""

    def is_ours(node: Any) -> bool:
        return isinstance(node, OneBitState | OneBitLambState)

    return next(node for node in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(node))


def _moments(mean: Any, state: Any, b1: float, b2: float, freeze: int) -> tuple[OneBitState, tuple[Any, Any]]:
    """Moments after a mean of gradients or of momenta, and both without what their start from zero takes off."""
    frozen, count = state.count >= freeze, jnp.asarray(optax.safe_increment(state.count))
    mu = jax.tree.map(
        lambda x, m, v: jnp.where(frozen, jnp.where(v > 0, x, 0.0), b1 * m + (1 - b1) * x), mean, state.mu, state.nu
    )
    nu = jax.tree.map(lambda x, v: jnp.where(frozen, v, b2 * v + (1 - b2) * x**2), mean, state.nu)
    first = jax.tree.map(lambda m: _corrected(m, b1, count), mu)
    second = jax.tree.map(lambda v: _corrected(v, b2, jnp.minimum(count, freeze)), nu)
    return OneBitState(count, mu, nu), (first, second)


def _corrected(moment: Array, decay: float, count: Array) -> Array:
    return moment / (1 - decay ** count.astype(jnp.float32))


def _direction(m: Array, v: Array, eps: float) -> Array:
    return jnp.where(v > 0, m / (jnp.sqrt(v) + eps), 0.0)


def _row(leaf: Leaf) -> tuple[int, ...]:
    """Shape of one number for each tensor of a leaf."""
    return (*leaf.shape[: leaf.stack], *(1,) * (len(leaf.shape) - leaf.stack))


def _over(x: Array, leaf: Leaf, reduce: Callable[..., Array]) -> Array:
    """A reduction of each tensor of a leaf, with its dims of one number."""
    return reduce(x, axis=tuple(range(leaf.stack, x.ndim)), keepdims=True)


def _norm(x: Array, leaf: Leaf) -> Array:
    return jnp.sqrt(_over(jnp.square(x), leaf, jnp.sum))


def _trust(w: Array, u: Array, leaf: Leaf) -> Array:
    """|w| / |u| of each tensor; 1 where either is zero, as optax has it."""
    top, bottom = _norm(w, leaf), _norm(u, leaf)
    return jnp.where((top == 0) | (bottom == 0), 1.0, top / jnp.where(bottom == 0, 1.0, bottom))
