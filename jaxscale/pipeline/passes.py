"""Forward and backward of a stage, as two programs with memory between them: two ways to choose what is remembered.

`FromInput` remembers nothing but the stage's input, which the executor keeps in its slot, and computes the stage again
in the backward. `FromResiduals` remembers what `jax.vjp` keeps of the forward, apart from what the backward finds
anyway: weights and what depends on weights alone (a cast copy), the microbatch, the key. How much that is, any
`jax.checkpoint` inside the stage decides.

Each also gives a backward in two halves for zero-bubble schedules: `inner`, the gradients of the input and of what
stages share, and `outer`, those of the weights.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from jaxscale.compat import prune
from jaxscale.pipeline.named import names_of
from jaxscale.pipeline.pools import cotangents, gradients
from jaxscale.pipeline.split import divide


class At(NamedTuple):
    """Which stage and microbatch an action is of.

    Args:
        stage: int32, traced: one program serves all stages.
        microbatch: int32.
        frozen: what the stage reads of its chunk and no gradient goes to; `None` where there is nothing of the kind.
    """

    stage: Any
    microbatch: Any
    frozen: Any = None


class Context(NamedTuple):
    """What a stage reads besides its input; the same in forward and backward, so that none of it is remembered."""

    weights: Any
    shared: Any
    microbatch: Any
    at: At
    key: Any


StageFunction: TypeAlias = Callable[[Any, Any, Any, Any, At, Any], tuple[Any, Any, Any]]
"""`stage(weights, shared, x, microbatch, at, key) -> (y, objective, sums)`."""
Vary: TypeAlias = Callable[[Any], Any]
"""Marks a tree as varying over the manual axes."""


class FromInput:
    """A stage that is computed again in its backward.

    Args:
        stage: the stage.
        vary: for the cotangent of the objective.
    """

    kept: tuple[Any, ...] = ()
    """Shapes of what a forward remembers."""
    hosted: tuple[bool, ...] = ()
    """Which of it lies on the host meanwhile."""
    cut: tuple[Any, ...] = ()
    """Shapes of what the inner half of a backward leaves for the outer one."""

    def __init__(self, stage: StageFunction, vary: Vary) -> None:
        self._stage, self._vary = stage, vary

    def forward(self, context: Context, x: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        """The message to the next stage, the sums, and what to remember."""
        y, _, sums = self._stage(context.weights, context.shared, x, *context[2:])
        return y, sums, ()

    def backward(self, context: Context, x: Any, kept: Any, g: Any) -> tuple[Any, Any, Any]:
        """Gradients of weights, of what is shared, and of the input, from that of the output."""
        del kept
        weights, shared, dx = self._pull(lambda w, s, x: (w, s, x), context, x, g)
        return weights, shared, gradients(dx, x)

    def inner(self, context: Context, x: Any, kept: Any, g: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        """The gradients of what is shared and of the input, and what to leave for the outer half."""
        del kept
        shared, dx = self._pull(lambda w, s, x: (s, x), context, x, g)
        return shared, gradients(dx, x), ()

    def outer(self, context: Context, x: Any, kept: Any, g: Any, cut: Any) -> Any:
        """The gradients of the weights."""
        del kept, cut
        (weights,) = self._pull(lambda w, s, x: (w,), context, x, g)
        return weights

    def _pull(self, of: Callable[..., tuple[Any, ...]], context: Context, x: Any, g: Any) -> tuple[Any, ...]:
        """Gradients with respect to some of (weights, shared, x) alone: XLA need not find out what is left out."""
        everything = (context.weights, context.shared, x)
        order = of(0, 1, 2)

        def run(*chosen: Any) -> tuple[Any, Any]:
            found = dict(zip(order, chosen, strict=True))
            weights, shared, x = (found.get(place, value) for place, value in enumerate(everything))
            y, objective, _ = self._stage(weights, shared, x, *context[2:])
            return y, objective

        (y, objective), pull = jax.vjp(run, *of(*everything))
        return pull((cotangents(g, y), self._vary(jnp.ones_like(objective))))


class FromResiduals:
    """A stage whose forward remembers what its backward reads.

    Args:
        stage: the stage.
        vary: for the cotangent of the objective.
        context: shapes of what the stage reads (arrays or tracers as inside the program).
        x: the same of its input.
        split: whether the backward is needed in two halves.
        hosted: names (`checkpoint_name`) of residuals that lie on the host between forward and backward.
    """

    def __init__(
        self,
        stage: StageFunction,
        vary: Vary,
        context: Context,
        x: Any,
        *,
        split: bool,
        hosted: Collection[str] = (),
    ) -> None:
        def forward(context: Context, x: Any) -> Any:
            def run(weights: Any, shared: Any, x: Any) -> Any:
                y, objective, sums = stage(weights, shared, x, *context[2:])
                return (y, objective), sums

            # a vjp function is a tree: its leaves are what it keeps
            return jax.vjp(run, context.weights, context.shared, x, has_aux=True)

        self._vary, self._key = vary, context.key
        self._program, shapes = jax.make_jaxpr(forward, return_shape=True)(context, x)
        ((y, self._objective), pull, _) = shapes
        self._y = y
        self._results = jax.tree.structure(shapes)
        leaves, self._pull = jax.tree.flatten(pull)
        ends = jax.tree.structure(shapes[0]).num_leaves
        self._span = slice(ends, ends + len(leaves))
        self._sort(context)
        self.kept: tuple[Any, ...] = tuple(
            jax.eval_shape(_plain, leaves[place]) if _is_key(leaves[place]) else leaves[place] for place in self._keep
        )
        names = [names_of(self._program, self._span.start + place) if hosted else set() for place in self._keep]
        self.hosted: tuple[bool, ...] = tuple(not own.isdisjoint(hosted) for own in names)
        self._halves = None
        if split:
            zeros = [vary(jnp.zeros(leaf.shape, leaf.dtype)) for leaf in self.kept]
            self._halves = divide(self._apart, context, zeros, x, kept=(True, True, False))
        self.cut: tuple[Any, ...] = self._halves.cut if self._halves else ()

    def _sort(self, context: Context) -> None:
        """Which residuals are remembered, which are an input of the stage, and which follow from weights and stage."""
        jaxpr = self._program.jaxpr
        inputs = {var: place for place, var in enumerate(jaxpr.invars)}
        whole = len(jax.tree.leaves(context))
        # the head of the last stage, behind a `cond` on the stage's number, would lie in every slot otherwise
        again_from = ("weights", "shared", "at")
        named = zip(Context._fields, context, strict=True)
        free = [name in again_from for name, part in named for _ in jax.tree.leaves(part)]
        free += [False] * (len(jaxpr.invars) - whole)
        self._given: dict[int, int] = {}
        self._keep: list[int] = []
        again: list[int] = []
        for place, var in enumerate(jaxpr.outvars[self._span]):
            if not isinstance(var, jex.Literal) and inputs.get(var, whole) < whole:
                self._given[place] = inputs[var]
            elif any(reads and not flag for reads, flag in zip(self._only(place)[1], free, strict=True)):
                self._keep.append(place)
            else:
                again.append(place)
        self._again = again
        self._follows, self._reads = self._only(*again)

    def _only(self, *places: int) -> tuple[Any, list[bool]]:
        """The program of these residuals alone, and of each input whether it reads it."""
        wanted = {self._span.start + place for place in places}
        return prune(self._program, [number in wanted for number in range(len(self._program.jaxpr.outvars))])

    def forward(self, context: Context, x: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        """As `FromInput.forward`."""
        flat = jex.jaxpr_as_fun(self._program)(*jax.tree.leaves((context, x)))
        (y, _), _, sums = jax.tree.unflatten(self._results, flat)
        residuals = flat[self._span]
        return y, sums, tuple(_plain(residuals[place]) for place in self._keep)

    def backward(self, context: Context, x: Any, kept: Any, g: Any) -> tuple[Any, Any, Any]:
        """As `FromInput.backward`; reads no input."""
        (weights, shared), dx = self._both(context, kept, g)
        return weights, shared, gradients(dx, x)

    def inner(self, context: Context, x: Any, kept: Any, g: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        """As `FromInput.inner`; reads no input."""
        assert self._halves is not None
        (shared, dx), cut = self._halves.first(context, list(kept), g)
        return shared, gradients(dx, x), cut

    def outer(self, context: Context, x: Any, kept: Any, g: Any, cut: Any) -> Any:
        """As `FromInput.outer`; reads neither input nor incoming gradient."""
        assert self._halves is not None
        return self._halves.second(cut, context, list(kept), g)

    def _apart(self, context: Context, kept: Any, g: Any) -> tuple[Any, Any]:
        """The backward as what is wanted at once, and what is not: were the gradient of the head not made at once, that
        of the logits would have to wait with the rest, in slots of every rank.
        """
        (weights, shared), dx = self._both(context, kept, g)
        return (shared, dx), weights

    def _both(self, context: Context, kept: Any, g: Any) -> tuple[Any, Any]:
        inputs = jax.tree.leaves(context)
        residuals: dict[int, Any] = {place: inputs[source] for place, source in self._given.items()}
        read = [value for value, reads in zip(inputs, self._reads, strict=False) if reads]
        residuals |= dict(zip(self._again, jex.jaxpr_as_fun(self._follows)(*read), strict=True))
        for place, value in zip(self._keep, kept, strict=True):
            residuals[place] = self._as_kept(place, value)
        pull = jax.tree.unflatten(self._pull, [residuals[place] for place in range(len(residuals))])
        one = self._vary(jnp.ones(self._objective.shape, self._objective.dtype))
        weights, shared, dx = pull((cotangents(g, self._y), one))
        return (weights, shared), dx

    def _as_kept(self, place: int, value: Any) -> Any:
        """A key comes back out of its plain numbers."""
        kind = self._program.jaxpr.outvars[self._span.start + place].aval
        return jax.random.wrap_key_data(value, impl=jax.random.key_impl(self._key)) if _is_key(kind) else value


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> Any:
    """A key as its numbers, which a pool can hold."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf
