"""Forward and backward of a stage, as two programs, with values that are remembered between them, in two variants.

`FromInput` remembers only the stage's input, which the executor keeps in a slot, and computes the stage again in the
backward. `FromResiduals` remembers the residuals of `jax.vjp`, except those that the backward can read or recompute:
weights, functions of the weights alone (a cast copy), the microbatch and the key. Any `jax.checkpoint` inside the stage
reduces the residuals.

Both also have a backward in two halves for zero-bubble schedules. `input_half` computes the gradients of the input and
of the shared weights; `weight_half` computes those of the stage's own weights. In all methods x is the stage's input,
`stash` the remembered values, and g the gradient of the stage's output.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from jaxscale.compat import prune
from jaxscale.pipeline.run.named import names_of
from jaxscale.pipeline.run.pools import cotangents, gradients, zeros
from jaxscale.pipeline.run.split import divide


class At(NamedTuple):
    """The stage and microbatch of an action.

    Args:
        stage: number of the stage, int32, traced, so that one program serves all stages.
        microbatch: number of the microbatch, int32.
        frozen: the weights of the stage that get no gradient, or `None`.
    """

    stage: Any
    microbatch: Any
    frozen: Any = None


class StageContext(NamedTuple):
    """The arguments of a stage besides its input; the same in forward and backward, so they are not remembered."""

    weights: Any
    shared: Any
    microbatch: Any
    at: At
    key: Any


StageFunction: TypeAlias = Callable[[Any, Any, Any, Any, At, Any], tuple[Any, Any, Any]]
"""`stage(weights, shared, x, microbatch, at, key) -> (y, objective, sums)`."""
Vary: TypeAlias = Callable[[Any], Any]
"""Function that marks a tree as varying over the manual axes."""


class FromInput:
    """A stage whose backward computes the stage again, from its input.

    Args:
        stage: the stage function.
        vary: function that marks the cotangent of the objective as varying.
    """

    kept: tuple[Any, ...] = ()
    """Shapes of the values that a forward remembers."""
    hosted: tuple[bool, ...] = ()
    """For each value of `kept`, whether it lies on the host between forward and backward."""
    cut: tuple[Any, ...] = ()
    """Shapes of the values that the input half of a backward leaves for the weight half."""

    def __init__(self, stage: StageFunction, vary: Vary) -> None:
        self._stage, self._vary = stage, vary

    def forward(self, context: StageContext, x: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        """Return the message to the next stage, the sums, and the values to remember."""
        y, _, sums = self._stage(context.weights, context.shared, x, *context[2:])
        return y, sums, ()

    def backward(self, context: StageContext, x: Any, stash: Any, g: Any) -> tuple[Any, Any, Any]:
        """Return the gradients of weights, shared weights and input, from the gradient of the output."""
        del stash
        weight_gradients, shared_gradients, dx = self._pull(lambda w, s, x: (w, s, x), context, x, g)
        return weight_gradients, shared_gradients, gradients(dx, x)

    def input_half(self, context: StageContext, x: Any, stash: Any, g: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        """Return the gradients of shared weights and input, and the values for the weight half."""
        del stash
        shared_gradients, dx = self._pull(lambda w, s, x: (s, x), context, x, g)
        return shared_gradients, gradients(dx, x), ()

    def weight_half(self, context: StageContext, x: Any, stash: Any, g: Any, cut: Any) -> Any:
        """Return the gradients of the weights."""
        del stash, cut
        (weight_gradients,) = self._pull(lambda w, s, x: (w,), context, x, g)
        return weight_gradients

    def _pull(self, select: Callable[..., tuple[Any, ...]], context: StageContext, x: Any, g: Any) -> tuple[Any, ...]:
        """Return the gradients of those of (weights, shared, x) that `select` picks, without computing the others."""
        arguments = (context.weights, context.shared, x)
        selected_places = select(0, 1, 2)

        def run(*primals: Any) -> tuple[Any, Any]:
            """Run the stage on the picked arguments, and return its output and objective."""
            variables = dict(zip(selected_places, primals, strict=True))
            weights, shared, x = (variables.get(place, value) for place, value in enumerate(arguments))
            y, objective, _ = self._stage(weights, shared, x, *context[2:])
            return y, objective

        (y, objective), pull = jax.vjp(run, *select(*arguments))
        return pull((cotangents(g, y), self._vary(jnp.ones_like(objective))))


class FromResiduals:
    """A stage whose forward remembers the residuals that its backward reads.

    Args:
        stage: the stage function.
        vary: function that marks the cotangent of the objective as varying.
        context: a sample context, arrays or tracers with the shapes inside the program.
        x: a sample of the stage's input.
        split: whether to build the backward in two halves.
        hosted: names (`checkpoint_name`) of residuals that lie on the host between forward and backward.
    """

    def __init__(
        self,
        stage: StageFunction,
        vary: Vary,
        context: StageContext,
        x: Any,
        *,
        split: bool,
        hosted: Collection[str] = (),
    ) -> None:
        def forward(context: StageContext, x: Any) -> Any:
            """Run the stage, and return ((y, objective), vjp function, sums)."""

            def run(weights: Any, shared: Any, x: Any) -> Any:
                """Run the stage, and return the differentiated results (y, objective), and the sums."""
                y, objective, sums = stage(weights, shared, x, *context[2:])
                return (y, objective), sums

            # a vjp function is a tree whose leaves are its residuals
            return jax.vjp(run, context.weights, context.shared, x, has_aux=True)

        self._vary, self._key = vary, context.key
        self._program, shapes = jax.make_jaxpr(forward, return_shape=True)(context, x)
        ((self._y, self._objective), pull, _) = shapes
        self._results_tree = jax.tree.structure(shapes)
        leaves, self._pull_tree = jax.tree.flatten(pull)
        output_count = jax.tree.structure(shapes[0]).num_leaves
        # the residuals among the outputs of the program
        self._span = slice(output_count, output_count + len(leaves))
        self._classify(context)
        self.kept: tuple[Any, ...] = tuple(
            jax.eval_shape(_key_data, leaves[place]) if _is_key(leaves[place]) else leaves[place]
            for place in self._stash_places
        )
        names = [names_of(self._program, self._span.start + place) if hosted else set() for place in self._stash_places]
        self.hosted: tuple[bool, ...] = tuple(not residual_names.isdisjoint(hosted) for residual_names in names)
        self._halves = None
        if split:
            stash = [vary(zeros(leaf)) for leaf in self.kept]
            self._halves = divide(self._gradients_by_half, context, stash, x, kept=(True, True, False))
        self.cut: tuple[Any, ...] = self._halves.cut if self._halves else ()

    def _classify(self, context: StageContext) -> None:
        """Sort residuals into inputs of the stage, remembered ones, and those recomputed from weights and stage number.

        A place is the index of a residual among the leaves of the vjp function.
        """
        jaxpr = self._program.jaxpr
        input_numbers = {var: number for number, var in enumerate(jaxpr.invars)}
        leaf_count = len(jax.tree.leaves(context))  # the inputs with lower numbers are leaves of the context
        # is_free: for each input, whether the backward may read it again, so that residuals of free inputs alone are
        # recomputed; without "at", the head of the last stage, in a `cond` on the stage number, would be in every slot
        free_fields = ("weights", "shared", "at")
        fields = zip(StageContext._fields, context, strict=True)
        is_free = [name in free_fields for name, tree in fields for _ in jax.tree.leaves(tree)]
        is_free += [False] * (len(jaxpr.invars) - leaf_count)
        self._input_numbers: dict[int, int] = {}
        self._stash_places: list[int] = []
        self._recomputed: list[int] = []
        for place, var in enumerate(jaxpr.outvars[self._span]):
            if not isinstance(var, jex.Literal) and input_numbers.get(var, leaf_count) < leaf_count:
                self._input_numbers[place] = input_numbers[var]
            elif any(reads and not flag for reads, flag in zip(self._pruned(place)[1], is_free, strict=True)):
                self._stash_places.append(place)
            else:
                self._recomputed.append(place)
        self._recompute_program, self._recompute_reads = self._pruned(*self._recomputed)

    def _pruned(self, *places: int) -> tuple[Any, list[bool]]:
        """Return the program of these residuals alone, and for each input whether the program reads it."""
        outputs = {self._span.start + place for place in places}
        return prune(self._program, [number in outputs for number in range(len(self._program.jaxpr.outvars))])

    def forward(self, context: StageContext, x: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        """Return the message to the next stage, the sums, and the residuals to remember."""
        flat_results = jex.jaxpr_as_fun(self._program)(*jax.tree.leaves((context, x)))
        (y, _), _, sums = jax.tree.unflatten(self._results_tree, flat_results)
        residuals = flat_results[self._span]
        return y, sums, tuple(_key_data(residuals[place]) for place in self._stash_places)

    def backward(self, context: StageContext, x: Any, stash: Any, g: Any) -> tuple[Any, Any, Any]:
        """Return the gradients of weights, shared weights and input; `x` is not read."""
        (weight_gradients, shared_gradients), dx = self._gradients(context, stash, g)
        return weight_gradients, shared_gradients, gradients(dx, x)

    def input_half(self, context: StageContext, x: Any, stash: Any, g: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        """Return the gradients of shared weights and input, and the values for the weight half; `x` is not read."""
        assert self._halves is not None
        (shared_gradients, dx), cut = self._halves.first(context, list(stash), g)
        return shared_gradients, gradients(dx, x), cut

    def weight_half(self, context: StageContext, x: Any, stash: Any, g: Any, cut: Any) -> Any:
        """Return the gradients of the weights; neither `x` nor `g` is read."""
        assert self._halves is not None
        return self._halves.second(cut, context, list(stash), g)

    def _gradients_by_half(self, context: StageContext, stash: Any, g: Any) -> tuple[Any, Any]:
        """Return the gradients ((shared, dx), weights), one pair member for each half of a backward.

        If the gradients of `shared` were in the weight half, gradients of logits would wait in slots of all ranks.
        """
        (weight_gradients, shared_gradients), dx = self._gradients(context, stash, g)
        return (shared_gradients, dx), weight_gradients

    def _gradients(self, context: StageContext, stash: Any, g: Any) -> tuple[Any, Any]:
        """Return the gradients ((weights, shared), dx), from the remembered and the recomputed residuals."""
        inputs = jax.tree.leaves(context)
        residuals: dict[int, Any] = {place: inputs[input_number] for place, input_number in self._input_numbers.items()}
        operands = [leaf for leaf, reads in zip(inputs, self._recompute_reads, strict=False) if reads]
        residuals |= dict(zip(self._recomputed, jex.jaxpr_as_fun(self._recompute_program)(*operands), strict=True))
        for place, residual in zip(self._stash_places, stash, strict=True):
            aval = self._program.jaxpr.outvars[self._span.start + place].aval
            if _is_key(aval):  # a slot holds a key's data
                residual = jax.random.wrap_key_data(residual, impl=jax.random.key_impl(self._key))
            residuals[place] = residual
        pull = jax.tree.unflatten(self._pull_tree, [residuals[place] for place in range(len(residuals))])
        cotangent = self._vary(jnp.ones(self._objective.shape, self._objective.dtype))
        weights, shared, dx = pull((cotangents(g, self._y), cotangent))
        return (weights, shared), dx


def _is_key(leaf: Any) -> bool:
    """Return whether a leaf is a random key."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(leaf: Any) -> Any:
    """Return the leaf; if it is a random key, its data, which a pool can hold."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf
