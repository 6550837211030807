"""The forward and the backward of a stage as two programs, in two variants. The variants differ in what they stash.

`FromInput` stashes nothing: its backward runs the stage again from the stage's input, which the executor keeps in a
slot. `FromResiduals` stashes the residuals of `jax.vjp`, except those that the backward can read or recompute: weights,
the microbatch, the key, and functions of only the weights, such as a cast copy. `jax.checkpoint` inside the stage
reduces the residuals.

Both variants also have a backward in two halves for zero-bubble schedules. `input_half` computes the gradients of the
input and of the shared weights; `weight_half` computes the gradients of the stage's own weights. The values that cross
from the first half to the second are called the cut. In all methods, x is the stage's input, `stash` is a tuple of the
stashed arrays, g is the gradient of the stage's output, and `context` has the other arguments of the stage.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from jaxscale.compat import prune
from jaxscale.pipeline.run.named import names_of
from jaxscale.pipeline.run.pools import cotangents, gradient_arrays, zeros
from jaxscale.pipeline.run.split import divide


class At(NamedTuple):
    """The stage and microbatch of an action.

    Args:
        stage: index of the stage, int32. It is traced, so that all stages run one program.
        microbatch: index of the microbatch, int32.
        frozen: the stage's weights without gradients, or `None`.
    """

    stage: Any
    microbatch: Any
    frozen: Any = None


class StageContext(NamedTuple):
    """The arguments of a stage, except its input. They are the same in forward and backward, so they are not stashed.

    Args:
        weights: weights of the stage.
        shared: weights that every stage may read.
        microbatch: leaves of the microbatch.
        at: indices of the stage and the microbatch.
        key: random key.
    """

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
    """A stage whose backward runs the stage again from its input.

    Args:
        stage: the stage function.
        vary: function that marks the cotangent of the objective as varying.
    """

    stash_shapes: tuple[Any, ...] = ()
    """Shape and dtype of each value that a forward stashes."""
    is_hosted: tuple[bool, ...] = ()
    """For each stashed value, whether it is in host memory between forward and backward."""
    cut_shapes: tuple[Any, ...] = ()
    """Shape and dtype of each value that crosses from `input_half` to `weight_half`."""

    def __init__(self, stage: StageFunction, vary: Vary) -> None:
        self._stage, self._vary = stage, vary

    def forward(self, context: StageContext, x: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        """Return (message to the next stage, sums, empty stash)."""
        y, _, sums = self._stage(context.weights, context.shared, x, *context[2:])
        return y, sums, ()

    def backward(self, context: StageContext, x: Any, stash: Any, g: Any) -> tuple[Any, Any, Any]:
        """Return (gradients of weights, gradients of shared weights, gradient of the input)."""
        del stash
        weight_gradients, shared_gradients, dx = self._selected_gradients(lambda w, s, x: (w, s, x), context, x, g)
        return weight_gradients, shared_gradients, gradient_arrays(dx, x)

    def input_half(self, context: StageContext, x: Any, stash: Any, g: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        """Return (gradients of shared weights, gradient of the input, empty cut)."""
        del stash
        shared_gradients, dx = self._selected_gradients(lambda w, s, x: (s, x), context, x, g)
        return shared_gradients, gradient_arrays(dx, x), ()

    def weight_half(self, context: StageContext, x: Any, stash: Any, g: Any, cut: Any) -> Any:
        """Return the gradients of the weights."""
        del stash, cut
        (weight_gradients,) = self._selected_gradients(lambda w, s, x: (w,), context, x, g)
        return weight_gradients

    def _selected_gradients(
        self, select: Callable[..., tuple[Any, ...]], context: StageContext, x: Any, g: Any
    ) -> tuple[Any, ...]:
        """Return only the gradients of the arguments that `select(weights, shared, x)` returns."""
        arguments = (context.weights, context.shared, x)
        selected_indices = select(0, 1, 2)

        def run_stage(*primals: Any) -> tuple[Any, Any]:
            """Run the stage with `primals` as its selected arguments, and return its output and objective."""
            primal_of_index = dict(zip(selected_indices, primals, strict=True))
            weights, shared, x = (primal_of_index.get(index, argument) for index, argument in enumerate(arguments))
            y, objective, _ = self._stage(weights, shared, x, *context[2:])
            return y, objective

        (y, objective), vjp_function = jax.vjp(run_stage, *select(*arguments))
        return vjp_function((cotangents(g, y), self._vary(jnp.ones_like(objective))))


class FromResiduals:
    """A stage whose forward stashes the residuals for the backward.

    Args:
        stage: the stage function.
        vary: function that marks the cotangent of the objective as varying.
        sample_context: a sample context: arrays or tracers with the shapes of later contexts.
        sample_x: a sample of the stage's input.
        is_split: whether to build the backward in two halves.
        hosted_names: names (`checkpoint_name`) of residuals that are in host memory between forward and backward.

    Attributes:
        stash_shapes: shape and dtype of each stashed residual.
        is_hosted: for each stashed residual, whether it is in host memory between forward and backward.
        cut_shapes: shape and dtype of each value that crosses from `input_half` to `weight_half`.
    """

    def __init__(
        self,
        stage: StageFunction,
        vary: Vary,
        sample_context: StageContext,
        sample_x: Any,
        *,
        is_split: bool,
        hosted_names: Collection[str] = (),
    ) -> None:
        def forward(context: StageContext, x: Any) -> Any:
            """Run the stage, and return ((y, objective), its vjp function, sums)."""

            def run_stage(weights: Any, shared: Any, x: Any) -> Any:
                """Run the stage. Return its differentiated results, (y, objective), and its sums."""
                y, objective, sums = stage(weights, shared, x, *context[2:])
                return (y, objective), sums

            # a vjp function is a tree whose leaves are its residuals
            return jax.vjp(run_stage, context.weights, context.shared, x, has_aux=True)

        self._vary, self._key = vary, sample_context.key
        self._program, abstract_results = jax.make_jaxpr(forward, return_shape=True)(sample_context, sample_x)
        ((self._abstract_y, self._abstract_objective), vjp_function, _) = abstract_results
        self._results_structure = jax.tree.structure(abstract_results)
        abstract_residuals, self._vjp_structure = jax.tree.flatten(vjp_function)
        output_count = jax.tree.structure(abstract_results[0]).num_leaves
        # the positions of the residuals among the outputs of the program
        self._residual_span = slice(output_count, output_count + len(abstract_residuals))
        self._classify(sample_context)
        self.stash_shapes: tuple[Any, ...] = tuple(
            jax.eval_shape(_key_data, abstract_array) if _is_key(abstract_array) else abstract_array
            for abstract_array in (abstract_residuals[index] for index in self._stash_indices)
        )
        self.is_hosted: tuple[bool, ...] = tuple(
            bool(hosted_names)
            and not names_of(self._program, self._residual_span.start + index).isdisjoint(hosted_names)
            for index in self._stash_indices
        )
        self._division = None
        if is_split:
            stash = [vary(zeros(abstract_array)) for abstract_array in self.stash_shapes]
            self._division = divide(
                self._gradients_by_half, sample_context, stash, sample_x, is_kept=(True, True, False)
            )
        self.cut_shapes: tuple[Any, ...] = self._division.crossing_shapes if self._division else ()

    def _classify(self, context: StageContext) -> None:
        """Decide how the backward gets each residual: from an input, from the stash, or by recomputation.

        The index of a residual is its position among the leaves of the vjp function.
        """
        jaxpr = self._program.jaxpr
        index_of_input = {var: index for index, var in enumerate(jaxpr.invars)}
        context_leaf_count = len(jax.tree.leaves(context))  # the leaves of the context are the first inputs
        # Residuals that depend on free inputs only are recomputed. "at" is free because otherwise every slot would
        # contain the head of the last stage, which is in a `cond` on the stage index.
        free_fields = ("weights", "shared", "at")
        names_and_trees = zip(StageContext._fields, context, strict=True)
        is_free = [name in free_fields for name, tree in names_and_trees for _ in jax.tree.leaves(tree)]
        is_free += [False] * (len(jaxpr.invars) - context_leaf_count)
        self._input_index_of: dict[int, int] = {}  # index of the input by index of the residual
        self._stash_indices: list[int] = []  # indices of the residuals that are stashed
        self._recomputed_indices: list[int] = []  # indices of the residuals that are recomputed
        for index, var in enumerate(jaxpr.outvars[self._residual_span]):
            if not isinstance(var, jex.Literal) and index_of_input.get(var, context_leaf_count) < context_leaf_count:
                self._input_index_of[index] = index_of_input[var]
            elif any(
                is_read and not is_input_free
                for is_read, is_input_free in zip(self._pruned_program(index)[1], is_free, strict=True)
            ):
                self._stash_indices.append(index)
            else:
                self._recomputed_indices.append(index)
        # for each input, whether the program of recomputed residuals reads it
        self._recompute_program, self._recompute_read_flags = self._pruned_program(*self._recomputed_indices)

    def _pruned_program(self, *residual_indices: int) -> tuple[Any, list[bool]]:
        """Return the program that computes only these residuals, and for each input whether the program reads it."""
        output_indices = {self._residual_span.start + index for index in residual_indices}
        return prune(self._program, [index in output_indices for index in range(len(self._program.jaxpr.outvars))])

    def forward(self, context: StageContext, x: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        """Return (message to the next stage, sums, stash)."""
        flat_results = jex.jaxpr_as_fun(self._program)(*jax.tree.leaves((context, x)))
        (y, _), _, sums = jax.tree.unflatten(self._results_structure, flat_results)
        residuals = flat_results[self._residual_span]
        return y, sums, tuple(_key_data(residuals[index]) for index in self._stash_indices)

    def backward(self, context: StageContext, x: Any, stash: Any, g: Any) -> tuple[Any, Any, Any]:
        """Return (gradients of weights, gradients of shared weights, gradient of the input); `x` is not read."""
        (weight_gradients, shared_gradients), dx = self._gradients(context, stash, g)
        return weight_gradients, shared_gradients, gradient_arrays(dx, x)

    def input_half(self, context: StageContext, x: Any, stash: Any, g: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        """Return (gradients of shared weights, gradient of the input, cut); `x` is not read."""
        assert self._division is not None
        (shared_gradients, dx), cut = self._division.run_first(context, list(stash), g)
        return shared_gradients, gradient_arrays(dx, x), cut

    def weight_half(self, context: StageContext, x: Any, stash: Any, g: Any, cut: Any) -> Any:
        """Return the gradients of the weights; neither `x` nor `g` is read."""
        assert self._division is not None
        return self._division.run_second(cut, context, list(stash), g)

    def _gradients_by_half(self, context: StageContext, stash: Any, g: Any) -> tuple[Any, Any]:
        """Return a pair: (gradients of shared weights, gradient of the input), and gradients of weights.

        The input half computes the first member, and the weight half computes the second. If the weight half computed
        the gradients of shared weights, every rank would keep gradients of logits in slots.
        """
        (weight_gradients, shared_gradients), dx = self._gradients(context, stash, g)
        return (shared_gradients, dx), weight_gradients

    def _gradients(self, context: StageContext, stash: Any, g: Any) -> tuple[Any, Any]:
        """Return a pair: (gradients of weights, gradients of shared weights), and the gradient of the input."""
        context_leaves = jax.tree.leaves(context)
        residuals: dict[int, Any] = {
            index: context_leaves[input_index] for index, input_index in self._input_index_of.items()
        }
        operands = [leaf for leaf, is_read in zip(context_leaves, self._recompute_read_flags, strict=False) if is_read]
        recomputed_residuals = jex.jaxpr_as_fun(self._recompute_program)(*operands)
        residuals |= dict(zip(self._recomputed_indices, recomputed_residuals, strict=True))
        for index, stashed_array in zip(self._stash_indices, stash, strict=True):
            aval = self._program.jaxpr.outvars[self._residual_span.start + index].aval
            if _is_key(aval):  # the stash has the data of the key
                residuals[index] = jax.random.wrap_key_data(stashed_array, impl=jax.random.key_impl(self._key))
            else:
                residuals[index] = stashed_array
        vjp_function = jax.tree.unflatten(self._vjp_structure, [residuals[index] for index in range(len(residuals))])
        objective_cotangent = self._vary(jnp.ones(self._abstract_objective.shape, self._abstract_objective.dtype))
        weight_gradients, shared_gradients, dx = vjp_function((cotangents(g, self._abstract_y), objective_cotangent))
        return (weight_gradients, shared_gradients), dx


def _is_key(leaf: Any) -> bool:
    """Return whether a leaf is a random key."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(leaf: Any) -> Any:
    """Return the data of a random key, because pools hold no keys; return any other leaf unchanged."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf
