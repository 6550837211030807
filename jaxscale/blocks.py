"""The interface between a model's blocks and the techniques that a plan applies to them.

A model is *embed, a sequence of blocks, head*. `layers.Stack` and `layers.Chain` call each block through `wrap`. The
train step decides, with a `Treatment`, which values of each block are kept, offloaded or recomputed, and in which
groups and segments. The model file never names a technique. A scan over layers is *rolled* if each iteration runs one
layer.
"""

import contextlib
import contextvars
import dataclasses
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxscale.errors import UserError
from jaxscale.held_back import held_back
from jaxscale.scoped import scoped
from jaxscale.typing import Array, Float, Int, Key, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """The settings of a forward pass; the inputs are passed separately.

    Args:
        key: PRNG key of the step; `None` for a deterministic pass (evaluation, generation).
        examples: index of every row in the global batch; it makes dropout independent of the mesh and microbatches.
        dtype: name of the dtype to compute in, such as "bfloat16"; `None` computes in the dtype of the parameters.
        matmul: recipe of matrix products, a name in `lowbit.products.RECIPES`; `None` multiplies in `dtype`.
        attention: implementation of attention: "auto", "plain", "chunked" or "splash".
        loss_chunk: number of target positions of a row for which the loss is computed at a time; `None`: all at once.
        loss: implementation of the loss: "auto", "chunked", "reference" or "tpu".
    """

    key: Key | None = None
    examples: Int[Array, "B"] | None = None
    dtype: str | None = dataclasses.field(default=None, metadata={"static": True})
    matmul: str | None = dataclasses.field(default=None, metadata={"static": True})
    attention: str = dataclasses.field(default="auto", metadata={"static": True})
    loss_chunk: int | None = dataclasses.field(default=None, metadata={"static": True})
    loss: str = dataclasses.field(default="auto", metadata={"static": True})

    def at_layer(self, layer: int | Int[Array, ""]) -> "Context":
        """Return the context inside the layer with index `layer`. The index may be traced, as in a scan over layers."""
        if self.key is None:
            return self
        return dataclasses.replace(self, key=jax.random.fold_in(self.key, layer))

    def keys(self, site: str, row_count: int) -> Key:
        """Return a PRNG key for each of `row_count` rows, for the random choice named `site`.

        A row's key depends on the seed, the step, the layer, the site and the row's index in the global batch.
        """
        if self.key is None:
            raise ValueError("context: got no PRNG key, expected one for a random choice; pass Context(key=...)")
        examples = jnp.arange(row_count) if self.examples is None else self.examples
        site_key = jax.random.fold_in(self.key, zlib.crc32(site.encode()) & 0x7FFFFFFF)
        return jax.vmap(lambda example: jax.random.fold_in(site_key, example))(examples)


class Loss(NamedTuple):
    """The loss of some rows of a batch, as sums. So the losses of parts of a batch add up to the loss of the batch.

    Args:
        total: sum over targets of weight * nats, float32. The reported loss is `total / weight`.
        weight: sum of the weights of the targets, float32; the number of targets if every weight is 0 or 1.
        penalty: sum of the terms that are trained on but not reported (z-loss, auxiliary losses), in nats.
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]
    penalty: Float[Array, ""] | float = 0.0


@runtime_checkable
class Model(Protocol):
    """A model as a value: a frozen dataclass that builds the NNX module and scores a batch with the module.

    A model may also have these methods: `traits()` returns a `ModelTraits`; `accuracy(module, batch, context)` returns
    the share of correct targets; `initial_params()` returns weights that are loaded instead of drawn; and
    `block_chains(module)` returns the paths of the blocks that a pipeline may divide, if the module does not keep them
    in a `layers.Stack` or `layers.Chain`.
    """

    def build(self, rngs: Any, *, vocab_multiple: int = 1) -> Any:
        """Build the NNX module, with the vocabulary dim of its parameters padded to a multiple of `vocab_multiple`."""
        ...

    def loss(self, module: Any, batch: Any, context: Context) -> Loss:
        """Return the loss of a batch, as sums over its targets."""
        ...

    def logical_sizes(self) -> dict[str, int]:
        """Return the size of each logical axis ("heads", "mlp", ...) that the mesh must divide; {} if unknown."""
        ...


STACK_SHAPE = "stack_shape"
"""Metadata key of a parameter that the scan of a foreign module reads row by row: its shape, including all layers."""
UNNAMED_LAYERS = "unnamed_layers"
"""Metadata key of such a parameter: whether the dim of its rows lacks the axis name "layers" in the module."""

BlockFunction = Callable[..., Any]
Wrapper = Callable[[BlockFunction, bool], BlockFunction]
"""`wrapper(block, rolled)` returns the wrapped block. `rolled`: whether the block is the body of a rolled scan."""


class Call(NamedTuple):
    """A block and its arguments: `block(*before, x, *after)` returns the next `x` and the block's result.

    Args:
        block: a pure function.
        before: the arguments before `x`: parameters, other state.
        after: the arguments after `x`.
    """

    block: BlockFunction
    before: tuple[Any, ...]
    after: tuple[Any, ...] = ()


Runner = Callable[[Sequence[Call], Any], tuple[Any, list[Any]]]
"""`runner(calls, x)` runs blocks outside a scan and returns the last `x` and the result of each block."""


def one_after_another(calls: Sequence[Call], x: Any) -> tuple[Any, list[Any]]:
    """Run each block once, in sequence. Return the last `x` and a list of the blocks' results.

    Example:
        >>> double = Call(lambda weight, x: (weight * x, "left"), (2,))
        >>> one_after_another([double, double], 3)
        (12, ['left', 'left'])
    """
    results = []
    for block, before, after in calls:
        x, result = block(*before, x, *after)
        results.append(result)
    return x, results


def run_recomputed(calls: Sequence[Call], x: Any, runner: Runner = one_after_another) -> tuple[Any, list[Any]]:
    """Run blocks in sequence, and keep only the first block's input. The backward pass runs the blocks again.

    Args:
        calls: the blocks.
        x: input of the first block.
        runner: runs the blocks, in the forward and in the backward pass.

    Returns:
        The output of the last block, and a list of the blocks' results.
    """

    def run_calls(block_arguments: list[tuple[Any, Any]], x: Any) -> tuple[Any, list[Any]]:
        """Run the blocks on `x`, each with its pair (arguments before `x`, arguments after `x`)."""
        new_calls = [
            Call(call.block, before, after) for call, (before, after) in zip(calls, block_arguments, strict=True)
        ]
        return runner(new_calls, x)

    return run_again(run_calls, rolled=False)([(call.before, call.after) for call in calls], x)


def identity(block: BlockFunction, rolled: bool) -> BlockFunction:
    """Return the block unchanged; the default wrapper."""
    return block


def keep_nothing(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Keep no value; this policy of `jax.checkpoint` distinguishes our checkpoints from the user's."""
    return False


def run_again(function: Callable[..., Any], *, rolled: bool, policy: Any = keep_nothing) -> Callable[..., Any]:
    """Wrap a part of a model so that it keeps only its inputs and runs again in the backward pass.

    Inside a rolled scan XLA cannot undo the recomputation, so the barriers of `prevent_cse` would only cost time.
    Elsewhere XLA undoes the recomputation without the barriers, and on some backends even with them (`held_back.py`).

    Args:
        function: the part of the model, a function of pytrees of arrays.
        rolled: whether the part is the body of a rolled `lax.scan`.
        policy: policy of `jax.checkpoint`; selects the values kept besides the inputs.
    """
    checkpointed_function = jax.checkpoint(function, policy=policy, prevent_cse=not rolled)
    # in a pipeline, the two passes of a stage are in different ticks (steps of the schedule)
    is_held_back = _treatment.get().is_held_back and not rolled and stage_view() is None
    return held_back(checkpointed_function) if is_held_back else checkpointed_function


@dataclasses.dataclass(frozen=True)
class Treatment:
    """The techniques that a plan applies to the blocks of a model during tracing.

    Args:
        wrapper: every block `f` runs as `wrapper(f, rolled)`; `rolled`: whether `f` is the body of a rolled `lax.scan`.
        unroll: number of layers per iteration of a scan over layers.
        segment: number of blocks in each segment of a scanned stack; the last segment may be shorter. Only the input of
            a segment's first block is kept, and the backward pass runs the segment again. `None`: no segments.
        groups: a pair (number of layers, wrapper) for each group of consecutive layers of a stack, in order. The
            numbers must add up to the number of layers of the stack. Without groups, `wrapper` applies to all layers.
        sequence: runner of the blocks of a chain or a stack, for nested checkpoints; a stack is then not scanned.
        host_names: names (`checkpoint_name`) of values that blocks keep on the device. A pipeline moves these values to
            the host between the forward and the backward pass of a stage.
        is_held_back: whether recomputation outside loops is delayed until its gradient is available. This is for
            backends that would otherwise run the recomputation early.
        is_recorded: whether the wrappers record their blocks, so that every block must get its own parameters.
        prepare_cycle: function of the parameters of a cycle of layers, applied before the blocks slice their own.

    Example:
        >>> Treatment(unroll=2).segment is None
        True
    """

    wrapper: Wrapper = identity
    unroll: int = 1
    segment: int | None = None
    groups: tuple[tuple[int, Wrapper], ...] = ()
    sequence: Runner | None = None
    host_names: frozenset[str] = frozenset()
    is_held_back: bool = False
    is_recorded: bool = False
    prepare_cycle: Callable[[Any], Any] = lambda params: params

    def __post_init__(self) -> None:
        if self.segment is not None and self.segment < 1:
            raise UserError(f"segment: got {self.segment}, expected a whole number of layers >= 1")
        if any(layer_count < 1 for layer_count, _ in self.groups):
            counts_text = ", ".join(str(layer_count) for layer_count, _ in self.groups)
            raise UserError(f"groups: got {counts_text} layers, expected at least one layer in each group")

    def with_wrappers(self, change: Callable[[Wrapper], Wrapper]) -> "Treatment":
        """Return this treatment with each wrapper replaced by `change(wrapper)`."""
        groups = tuple((layer_count, change(wrapper)) for layer_count, wrapper in self.groups)
        return dataclasses.replace(self, wrapper=change(self.wrapper), groups=groups)

    def wrapped_ranges(self, layers: int) -> list[tuple[int, int, Wrapper]]:
        """Return (start, stop, wrapper) for each group of layers in a stack of `layers` layers.

        Raises:
            UserError: the groups do not add up to `layers` layers.
        """
        if not self.groups:
            return [(0, layers, self.wrapper)]
        stops = list(itertools.accumulate(layer_count for layer_count, _ in self.groups))
        if stops[-1] != layers:
            counts_text = " + ".join(str(layer_count) for layer_count, _ in self.groups)
            raise UserError(f"the plan has {counts_text} layers, but the stack has {layers}: make the plan again")
        return [
            (stop - layer_count, stop, wrapper) for stop, (layer_count, wrapper) in zip(stops, self.groups, strict=True)
        ]


_PLAIN = Treatment()
_treatment: contextvars.ContextVar[Treatment] = contextvars.ContextVar("blocks", default=_PLAIN)


def treating(treatment: Treatment) -> contextlib.AbstractContextManager[None]:
    """Return a context for tracing, inside which this treatment applies to blocks."""
    return scoped(_treatment, treatment)


def wrapping(wrapper: Wrapper, *, unroll: int = 1) -> contextlib.AbstractContextManager[None]:
    """Return a context for tracing: each block `f` runs as `wrapper(f, rolled)`, and scans unroll `unroll` layers.

    `rolled` is whether the block is the body of a rolled `lax.scan`, where `jax.checkpoint` needs no `prevent_cse`.
    """
    return treating(Treatment(wrapper, unroll))


def treatment() -> Treatment:
    """Return the treatment of blocks under the current plan."""
    return _treatment.get()


def wrap(block: BlockFunction, *, rolled: bool) -> BlockFunction:
    """Return a block, wrapped as the current plan specifies. `layers.Stack` and `layers.Chain` call this function."""
    current_treatment = _treatment.get()
    return current_treatment.wrapper(adapted(block), rolled and current_treatment.unroll == 1)


Adaptation = Callable[[BlockFunction], BlockFunction]
"""A function from a block to one with the same arguments and results, which the plan runs in its place."""

_adaptation: contextvars.ContextVar[Adaptation | None] = contextvars.ContextVar("adaptation", default=None)


def adapting(adaptation: Adaptation | None) -> contextlib.AbstractContextManager[None]:
    """Return a context for tracing, inside which `adaptation` changes each block before a treatment wraps it."""
    return scoped(_adaptation, adaptation)


def adapted(block: BlockFunction) -> BlockFunction:
    """Return a block as the enclosing `adapting` changes it; unchanged if there is none."""
    adaptation = _adaptation.get()
    return block if adaptation is None else adaptation(block)


def is_adapting() -> bool:
    """Return whether this is inside of an `adapting` that changes blocks."""
    return _adaptation.get() is not None


def run(calls: Sequence[Call], x: Any) -> tuple[Any, list[Any]]:
    """Run different blocks in sequence, as the current plan specifies. Return the last `x` and each block's result."""
    return (_treatment.get().sequence or one_after_another)(calls, x)


_grouping: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar("grouping", default=())


def grouping(layer_counts: tuple[int, ...]) -> contextlib.AbstractContextManager[None]:
    """Return a context for building a model, in which a stack of `sum(layer_counts)` blocks is one stack per group.

    Layers with different treatments need separate stacks of parameters, because slicing a stack inside the step would
    copy the slice. The grouping changes neither the parameters' values nor the layout of checkpoints.

    Args:
        layer_counts: number of layers in each group; `()` builds one stack.
    """
    return scoped(_grouping, tuple(layer_counts))


def groups_of(layers: int) -> tuple[int, ...]:
    """Return the number of layers in each group of a stack of `layers` blocks, as the enclosing `grouping` sets them.

    Outside a `grouping`, or in a `grouping` for another number of layers, the result is `(layers,)`.
    """
    layer_counts = _grouping.get()
    return (
        layer_counts
        if sum(layer_counts) == layers and all(layer_count > 0 for layer_count in layer_counts)
        else (layers,)
    )


StageRunner = Callable[[Callable[..., Any], Any], Any]
"""`run_stage(run_blocks, x)` runs a stage's blocks on the first block's input `x`, and returns the last block's output.

The `run_blocks` of a stack is a function of `x`; that of a chain is a function of (start, stop, parameters of each
block) that returns a function of `x`.
"""


@dataclasses.dataclass(frozen=True)
class StageView:
    """A pipeline stage: the part of a stack whose layers run on one device.

    Args:
        layer_numbers: index of the layer of each row of the stack's parameters; -1 for a padding row.
        starts: index of the first layer of every stage.
        has_padding: whether some stage has padding rows.
        run_stage: called in place of the stage's blocks. Its arguments are a function that runs the blocks, and the
            first block's input.
        gather: function that gathers a block's parameters from the devices' shards, right before the block runs.
    """

    layer_numbers: Int[Array, "L"]
    starts: tuple[int, ...]
    has_padding: bool
    run_stage: StageRunner
    gather: Callable[[Any], Any] | None = None


_stage_view: contextvars.ContextVar[StageView | None] = contextvars.ContextVar("stage_view", default=None)


def viewing_stage(view: StageView) -> contextlib.AbstractContextManager[None]:
    """Return a context for tracing, inside which the model's stack is the pipeline stage that `view` describes."""
    return scoped(_stage_view, view)


def stage_view() -> StageView | None:
    """Return the pipeline stage that replaces the model's stack in this context; `None` if the stack is whole."""
    return _stage_view.get()


def dropout_mask(context: Context, site: str, shape: tuple[int, ...], keep: float) -> Shaped[Array, "..."]:
    """Draw a boolean mask whose elements are True with probability `keep`, for the random choice named `site`.

    The first dim of `shape` is the batch. A row depends on the seed, the step, the layer, the site and the example.
    """
    return jax.vmap(lambda row_key: jax.random.bernoulli(row_key, keep, shape[1:]))(context.keys(site, shape[0]))
