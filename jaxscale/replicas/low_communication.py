r"""DiLoCo: replicas train independently for many steps and then apply the mean of their displacements.

Each replica i makes H steps with its own (inner) optimizer, from the shared weights θ to w_i. The displacement θ - w_i
is the gradient for an outer optimizer (Douillard et al. 2023, arXiv 2311.08105), which is Nesterov's SGD with the
learning rate η, the momentum μ and the state m:

    d = mean of θ - w_i over i,   m = μ m + d,   θ = θ - η (d + μ m),   w_i = θ for all i

So the bytes of one step are sent over the slow axis only once in H steps, and with `Plan.reduce` a codec sends d in
fewer bytes. With H = 1, plain SGD as the inner optimizer and an outer learning rate of 1 without momentum, DiLoCo is
data-parallel training. With AdamW as the inner optimizer, DiLoCo never equals data-parallel training, because each
replica scales its gradient by its own variance.

Fragments of the weights (Streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512) synchronize at different steps, so
that at most one fragment is sent at a time. Two ideas of that paper are left out: overlap of computation with sending,
and mixtures of θ and w_i.

Plans have the settings of class `Diloco`, which `step/replicas.py` applies to a train step. The function `diloco` is
for custom training loops.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxscale.errors import UserError, unknown
from jaxscale.values import check_types, field_types, parse


@dataclasses.dataclass(frozen=True)
class Diloco:
    """Settings of DiLoCo: when replicas synchronize, and how they apply their mean displacement.

    The text form is `"every=100,lr=0.7,momentum=0.9,fragments=1"`.

    Args:
        every: H, the number of steps of each replica between two synchronizations; 100 to 500 in the paper.
        lr: η, the outer learning rate.
        momentum: μ, the momentum of the outer optimizer; with 0 the optimizer has no state.
        fragments: number of fragments into which the weights are divided; the fragments synchronize in turn.

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
            raise UserError(f"diloco lr: got {self.lr}, expected a number above 0, such as the paper's 0.7")
        if not 0 <= self.momentum < 1:
            raise UserError(f"diloco momentum: got {self.momentum}, expected 0 (no momentum) or more, and less than 1")
        if not 1 <= self.fragments <= self.every:
            raise UserError(
                f"diloco fragments: got {self.fragments} with every={self.every}, expected 1 to {self.every}, because "
                "each fragment synchronizes at a different step"
            )

    @classmethod
    def parse(cls, text: str) -> "Diloco":
        """Return the settings that a text form describes; the text must contain `every`.

        Raises:
            UserError: an option is unknown (the message suggests the nearest name), or a value is invalid.
        """
        type_of_field, settings = field_types(cls), {}
        for option_text in filter(None, (word.strip() for word in text.split(","))):
            name, equals, setting_text = (word.strip() for word in option_text.partition("="))
            if name not in type_of_field:
                raise unknown("option of diloco", name, type_of_field)
            if not equals or name in settings:
                raise UserError(f"diloco {text!r}: got {option_text!r}, expected each option once, as {name}=VALUE")
            settings[name] = parse(setting_text, type_of_field[name], f"diloco {name}")
        if "every" not in settings:
            raise UserError(f"diloco {text!r}: got no every, expected every=STEPS, the steps between synchronizations")
        return cls(**settings)

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self))

    def due(self, steps: int) -> tuple[int, ...]:
        """Return the indices of the fragments of the weights that synchronize after `steps` steps."""
        # for each fragment, the number of steps after which it synchronizes, modulo `every`
        step_offsets = (fragment_index * self.every // self.fragments for fragment_index in range(self.fragments))
        return tuple(
            fragment_index
            for fragment_index, step_offset in enumerate(step_offsets)
            if (steps - step_offset) % self.every == 0
        )

    def outer_step(self, weight: Any, momentum: Any, displacement: Any) -> tuple[Any, Any]:
        """Make an outer step for one tensor, and return its new weights θ and its new state m.

        Args:
            weight: θ, the shared weights.
            momentum: m, the state of the outer optimizer; `None` without momentum.
            displacement: d, the mean displacement.
        """
        if momentum is None:
            return weight - self.lr * displacement, None
        new_momentum = self.momentum * momentum + displacement
        return weight - self.lr * (displacement + self.momentum * new_momentum), new_momentum


def fragments_of(element_counts: Mapping[str, int], fragment_count: int) -> tuple[tuple[str, ...], ...]:
    """Return the names of the tensors of each fragment; the fragments have similar numbers of elements.

    In the paper a fragment consists of layers. Here, layers that are stacked in one array are one tensor, and so belong
    to one fragment.

    Args:
        element_counts: number of elements of each tensor, by name.
        fragment_count: number of fragments.

    Raises:
        UserError: there are fewer tensors than fragments.

    Example:
        >>> fragments_of({"up": 40, "down": 30, "norm": 1, "head": 20}, 2)
        (('up', 'norm'), ('down', 'head'))
    """
    if fragment_count > len(element_counts):
        raise UserError(
            f"diloco fragments: got {fragment_count}, expected at most {len(element_counts)}, the model's number of "
            "tensors"
        )
    fragments: list[list[str]] = [[] for _ in range(fragment_count)]
    for name in sorted(element_counts, key=lambda name: -element_counts[name]):
        smallest_fragment = min(fragments, key=lambda fragment: sum(map(element_counts.__getitem__, fragment)))
        smallest_fragment.append(name)
    name_order = list(element_counts)
    return tuple(tuple(sorted(fragment, key=name_order.index)) for fragment in fragments)


class DilocoState(NamedTuple):
    """State of a replica.

    Args:
        count: number of steps made, int32.
        inner: state of this replica's inner optimizer.
        shared: θ, the shared weights, equal on all replicas.
        outer: state of the outer optimizer, equal on all replicas.
        owed: the codec's state for each parameter (its residuals are still to be sent), in the order of the leaves;
            empty without a codec.
    """

    count: Any
    inner: Any
    shared: Any
    outer: Any
    owed: tuple[Any, ...]


def diloco(
    inner: Any, outer: Any = None, *, every: int = 100, axis: str = "replica", codec: Any = None, replicas: int = 0
) -> Any:
    """Make an optax transformation of one replica's gradients, for a `jax.shard_map` or `jax.vmap` over an axis.

    Pass `check_vma=False` to `shard_map`, because its types cannot express that synchronized replicas are equal.

    Args:
        inner: the optimizer of each replica, any optax transformation.
        outer: the optimizer of the shared weights; `None`: `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
        every: number of steps of each replica between two synchronizations.
        axis: name of the replicas' axis.
        codec: codec that averages the displacements; it must make no random draws (`replicas.Int8()`, for example).
            `None`: displacements are averaged exactly.
        replicas: number of replicas; needed only for a codec.

    Returns:
        The transformation; its function `update` needs the parameters. At a synchronization the updates set a replica's
        weights to the shared weights, up to the rounding of the sum.

    Raises:
        UserError: `every` is below 1, or a codec is given without the number of replicas.

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
        raise UserError(f"diloco: got replicas={replicas} with codec {codec}, expected replicas=2 or more")
    outer_optimizer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer

    def init(params: Any) -> DilocoState:
        """Return a replica's initial state; the shared weights are the initial parameters."""
        leaves = jax.tree.leaves(params)
        codec_states = [] if codec is None else [codec.init(leaf.shape, None, replicas) for leaf in leaves]
        return DilocoState(
            count=jnp.zeros((), jnp.int32),
            inner=inner.init(params),
            shared=params,
            outer=outer_optimizer.init(params),
            owed=tuple(codec_states),
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, DilocoState]:
        """Return the updates of this replica's weights, and its new state; `updates` are this replica's gradients."""
        if params is None:
            raise UserError("diloco: got no parameters: call update(gradients, state, params)")
        inner_updates, inner_state = inner.update(updates, state.inner, params)
        local_params, step_count = optax.apply_updates(params, inner_updates), state.count + 1
        treedef = jax.tree.structure(params)

        def synchronize() -> Any:
            """Return (updates, shared weights, outer state, codec states).

            The updates set this replica's weights to the new shared weights.
            """
            displacements, codec_states = jax.tree.leaves(optax.tree.sub(state.shared, local_params)), ()
            if codec is None:
                means = [lax.pmean(displacement, axis) for displacement in displacements]
            else:
                displacements_and_states = zip(displacements, state.owed, strict=True)
                means_and_states = [
                    codec.reduce(displacement, codec_state, axis, None, step_count)
                    for displacement, codec_state in displacements_and_states
                ]
                means, codec_states = zip(*means_and_states, strict=True)
            outer_updates, outer_state = outer_optimizer.update(treedef.unflatten(means), state.outer, state.shared)
            shared = optax.apply_updates(state.shared, outer_updates)
            return optax.tree.sub(shared, params), shared, outer_state, codec_states

        def skip() -> Any:
            """Return (inner updates, shared weights, outer state, codec states); only the inner updates are new."""
            return inner_updates, state.shared, state.outer, state.owed

        new_updates, shared, outer_state, codec_states = lax.cond(step_count % every == 0, synchronize, skip)
        return new_updates, DilocoState(step_count, inner_state, shared, outer_state, codec_states)

    return optax.GradientTransformation(init, update)
