"""The interface between a model's blocks and the plans that treat them.

A model is *embed, a sequence of blocks, head*. `layers.Stack` and `layers.Chain` call each block through `wrap`, and
the train step decides, with a `Treatment`, which values of each block are kept, offloaded or recomputed, and in which
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
    """The settings of a forward pass besides its inputs.

    Args:
        key: PRNG key of the step; `None` for a deterministic pass (evaluation, generation).
        examples: index of every row in the global batch, so that a mask does not depend on mesh or microbatches.
        dtype: type to compute in, as a name ("bfloat16"); `None` computes in the type of the parameters.
        matmul: recipe of matrix products, a name in `lowbit.products.RECIPES`; `None` multiplies in `dtype`.
        attention: implementation of attention: "auto", "plain", "chunked" or "splash".
        loss_chunk: number of target positions of a row that the loss scores at a time; `None` scores all at once.
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
        """The context inside layer number `layer`, which may be traced (the index of a scan)."""
        if self.key is None:
            return self
        return dataclasses.replace(self, key=jax.random.fold_in(self.key, layer))

    def keys(self, site: str, rows: int) -> Key:
        """One key for each of `rows` rows, for the random choice `site`; set by seed, step, layer, site and example."""
        if self.key is None:
            raise ValueError("a deterministic context has no keys: give Context(key=...)")
        examples = jnp.arange(rows) if self.examples is None else self.examples
        key = jax.random.fold_in(self.key, zlib.crc32(site.encode()) & 0x7FFFFFFF)
        return jax.vmap(lambda example: jax.random.fold_in(key, example))(examples)


class Loss(NamedTuple):
    """The loss of some rows of a batch, as sums, so that parts of a batch add up to the whole.

    Args:
        total: sum over targets of weight * nats, float32. The reported loss is `total / weight`.
        weight: sum of the weights of the targets, float32: their number where every weight is 0 or 1.
        penalty: sum of the terms that are trained on but not reported (z-loss, auxiliary losses), in nats.
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]
    penalty: Float[Array, ""] | float = 0.0


@runtime_checkable
class Model(Protocol):
    """A model as a value: a frozen dataclass that builds the module and scores a batch with it."""

    def build(self, rngs: Any, *, vocab_multiple: int = 1) -> Any:
        """The NNX module. The vocabulary dim of its parameters is padded to a multiple of `vocab_multiple`."""
        ...

    def loss(self, module: Any, batch: Any, context: Context) -> Loss:
        """Sums of the loss of a batch."""
        ...

    def logical_sizes(self) -> dict[str, int]:
        """Size of each logical axis that a mesh axis must divide ("heads", "kv_heads", "mlp", ...); {} if unknown."""
        ...


BlockFunction = Callable[..., Any]
Wrapper = Callable[[BlockFunction, bool], BlockFunction]
"""`wrapper(block, rolled)` returns the block as it should run; `rolled`: the block is the body of a rolled scan."""


class Call(NamedTuple):
    """A block and its arguments: `block(*before, x, *after)` returns the next `x` and the block's result.

    Args:
        block: a pure function.
        before: arguments in front of `x`: parameters, other state.
        after: arguments behind `x`.
    """

    block: BlockFunction
    before: tuple[Any, ...]
    after: tuple[Any, ...] = ()


Runner = Callable[[Sequence[Call], Any], tuple[Any, list[Any]]]
"""`runner(calls, x)` runs blocks outside a scan and returns the last `x` and the result of each block."""


def one_after_another(calls: Sequence[Call], x: Any) -> tuple[Any, list[Any]]:
    """Run blocks in sequence, each once: returns the last `x` and the result of each block.

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
    """Run blocks in sequence and keep only the first one's input: the backward pass runs them again.

    Args:
        calls: the blocks.
        x: input of the first block.
        runner: runs the blocks, in the forward and in the backward pass.
    """

    def run_calls(arguments: list[tuple[Any, Any]], x: Any) -> tuple[Any, list[Any]]:
        return runner(
            [Call(call.block, *before_and_after) for call, before_and_after in zip(calls, arguments, strict=True)], x
        )

    return run_again(run_calls, rolled=False)([(call.before, call.after) for call in calls], x)


def as_it_is(block: BlockFunction, rolled: bool) -> BlockFunction:
    """The wrapper that returns the block unchanged."""
    return block


def keep_nothing(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Policy of `jax.checkpoint` that keeps nothing; it distinguishes our checkpoints from the user's."""
    return False


def run_again(function: Callable[..., Any], *, rolled: bool, policy: Any = keep_nothing) -> Callable[..., Any]:
    """Wrap a part of a model so that it keeps only its inputs and runs again in the backward pass.

    Inside a rolled scan XLA cannot undo the recomputation, and the barriers of `prevent_cse` only cost time; elsewhere
    XLA undoes it without the barriers, and on some backends even with them (`held_back.py`).

    Args:
        function: the part of the model, a function of pytrees of arrays.
        rolled: whether the part is the body of a rolled `lax.scan`.
        policy: policy of `jax.checkpoint`; selects the values kept besides the inputs.
    """
    checkpointed = jax.checkpoint(function, policy=policy, prevent_cse=not rolled)
    # in a pipeline, the two passes of a stage are in different ticks (steps of the schedule)
    waits = _treatment.get().held and not rolled and cut() is None
    return held_back(checkpointed) if waits else checkpointed


@dataclasses.dataclass(frozen=True)
class Treatment:
    """What a plan does to the blocks of a model while it is traced.

    Args:
        wrapper: every block `f` runs as `wrapper(f, rolled)`; `rolled`: the block is the body of a rolled `lax.scan`.
        unroll: number of layers per iteration of a scan over layers.
        segment: number of blocks in each segment of a scanned stack; the last segment may be shorter. Only the input of
            a segment's first block is kept, and the backward pass runs the segment again. `None`: no segments.
        groups: number of layers and wrapper of each group of neighbouring layers of a stack, in order; the numbers must
            add up to the layers of the stack. If empty, `wrapper` is for all layers.
        sequence: runner of the blocks of a chain or a stack, for nested checkpoints; a stack is then not scanned.
        hosted: names (`checkpoint_name`) of values that blocks keep on the device, and that a pipeline keeps on the
            host from a stage's forward to its backward.
        held: whether recomputation outside loops waits for its gradient, on a backend that would run it early.

    Example:
        >>> Treatment(unroll=2).segment is None
        True
    """

    wrapper: Wrapper = as_it_is
    unroll: int = 1
    segment: int | None = None
    groups: tuple[tuple[int, Wrapper], ...] = ()
    sequence: Runner | None = None
    hosted: frozenset[str] = frozenset()
    held: bool = False

    def __post_init__(self) -> None:
        if self.segment is not None and self.segment < 1:
            raise UserError(f"segment: got {self.segment}, expected a whole number of layers >= 1")
        if any(layers < 1 for layers, _ in self.groups):
            counts_text = ", ".join(str(layers) for layers, _ in self.groups)
            raise UserError(f"groups: got {counts_text} layers, expected at least one layer in each group")

    def with_wrappers(self, change: Callable[[Wrapper], Wrapper]) -> "Treatment":
        """This treatment with every wrapper changed."""
        groups = tuple((layers, change(wrapper)) for layers, wrapper in self.groups)
        return dataclasses.replace(self, wrapper=change(self.wrapper), groups=groups)

    def runs(self, layers: int) -> list[tuple[int, int, Wrapper]]:
        """Start, stop and wrapper of each group of a stack with this number of layers.

        Raises:
            UserError: the groups are for a stack of another depth.
        """
        if not self.groups:
            return [(0, layers, self.wrapper)]
        ends = list(itertools.accumulate(count for count, _ in self.groups))
        if ends[-1] != layers:
            counts = " + ".join(str(count) for count, _ in self.groups)
            raise UserError(f"the plan has {counts} layers, but the stack has {layers}: make the plan again")
        return [(end - count, end, wrapper) for end, (count, wrapper) in zip(ends, self.groups, strict=True)]


_PLAIN = Treatment()
_treatment: contextvars.ContextVar[Treatment] = contextvars.ContextVar("blocks", default=_PLAIN)


def treating(treatment: Treatment) -> contextlib.AbstractContextManager[None]:
    """While tracing inside, blocks get this treatment."""
    return scoped(_treatment, treatment)


def wrapping(wrapper: Wrapper, *, unroll: int = 1) -> contextlib.AbstractContextManager[None]:
    """While tracing inside, every block `f` runs as `wrapper(f, rolled)` and scans run `unroll` layers per iteration.

    `rolled`: the block is the body of a rolled `lax.scan`, where `jax.checkpoint` needs no `prevent_cse`.
    """
    return treating(Treatment(wrapper, unroll))


def treatment() -> Treatment:
    """The treatment of blocks under the current plan."""
    return _treatment.get()


def wrap(block: BlockFunction, *, rolled: bool) -> BlockFunction:
    """The block, wrapped by the current plan. `layers.Stack` and `layers.Chain` call this; models need not."""
    current = _treatment.get()
    return current.wrapper(block, rolled and current.unroll == 1)


def run(calls: Sequence[Call], x: Any) -> tuple[Any, list[Any]]:
    """Run unlike blocks in sequence under the current plan; returns the last `x` and each block's result."""
    return (_treatment.get().sequence or one_after_another)(calls, x)


_grouping: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar("grouping", default=())


def grouping(layers: tuple[int, ...]) -> contextlib.AbstractContextManager[None]:
    """While a model is built inside, a stack of `sum(layers)` blocks keeps its parameters as a stack for each group.

    Layers with different treatments need separate stacks: to slice a stack inside the step takes a copy of it. The
    values of the parameters, and the layout of a train state in a checkpoint, are those of one stack.

    Args:
        layers: number of layers in each group; `()` builds one stack.
    """
    return scoped(_grouping, tuple(layers))


def groups_of(layers: int) -> tuple[int, ...]:
    """Layers in each group of a stack built now with `layers` blocks: `(layers,)` if no grouping adds up to it."""
    groups = _grouping.get()
    return groups if sum(groups) == layers and all(count > 0 for count in groups) else (layers,)


Between = Callable[[Callable[..., Any], Any], Any]
"""`between(run_blocks, x)` runs a stage's blocks on the first block's input `x`, and returns the last block's output.

The `run_blocks` of a stack is a function of `x`; that of a chain is a function of (start, stop, parameters of each
block) that returns a function of `x`.
"""


@dataclasses.dataclass(frozen=True)
class Cut:
    """A pipeline stage: the part of a stack whose layers run on one device.

    Args:
        numbers: layer number of each row of the stack's parameters; -1 for a padding row.
        starts: the first layer of every stage.
        padded: whether some stage has padding rows.
        between: called in place of the stage's blocks, with a function that runs them and the first block's input.
        gather: gathers a block's parameters from the shards on the devices, right before the block runs.
    """

    numbers: Int[Array, "K"]
    starts: tuple[int, ...]
    padded: bool
    between: Between
    gather: Callable[[Any], Any] | None = None


_cut: contextvars.ContextVar[Cut | None] = contextvars.ContextVar("cut", default=None)


def cutting(cut: Cut) -> contextlib.AbstractContextManager[None]:
    """While tracing inside, the model's stack is the pipeline stage that `cut` describes."""
    return scoped(_cut, cut)


def cut() -> Cut | None:
    """The pipeline stage that the model's stack is now; `None` if the stack is whole."""
    return _cut.get()


def dropout_mask(context: Context, site: str, shape: tuple[int, ...], keep: float) -> Shaped[Array, "..."]:
    """Boolean mask of `shape`, whose first dim is the batch; row i depends on seed, step, layer, site, example."""
    return jax.vmap(lambda key: jax.random.bernoulli(key, keep, shape[1:]))(context.keys(site, shape[0]))
