"""How a model shows its blocks, and what a plan may do to them from outside.

A model is *embed, a sequence of blocks, head*. `layers.Stack` and `layers.Chain` call each block through `wrap`, and
the train step decides, with `wrapping`, what that means: rematerialization now, offload and pipeline stages later. The
model file never names a technique.
"""

import contextlib
import contextvars
import dataclasses
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxscale.typing import Array, Float, Int, Key, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What a forward pass is told besides its inputs.

    Args:
        key: PRNG key of this step; `None` for a deterministic pass (evaluation, generation).
        examples: index of every row in the global batch, so that a mask does not depend on mesh or microbatches.
        dtype: type to compute in, as a name ("bfloat16"); `None` computes in the type of the parameters.
        attention: which implementation of attention: "auto", "plain", "chunked" or "splash".
        loss_chunk: target positions of one row scored at a time by the loss; `None` scores all at once.
    """

    key: Key | None = None
    examples: Int[Array, "B"] | None = None
    dtype: str | None = dataclasses.field(default=None, metadata={"static": True})
    attention: str = dataclasses.field(default="auto", metadata={"static": True})
    loss_chunk: int | None = dataclasses.field(default=None, metadata={"static": True})

    def at_layer(self, layer: int | Int[Array, ""]) -> "Context":
        """This context inside layer number `layer`, which may be traced (the index of a scan)."""
        if self.key is None:
            return self
        return dataclasses.replace(self, key=jax.random.fold_in(self.key, layer))

    def keys(self, site: str, rows: int) -> Key:
        """One key per row for the random choice named `site`: a function of seed, step, layer, site, example alone."""
        if self.key is None:
            raise ValueError("a deterministic context has no keys: give Context(key=...)")
        examples = jnp.arange(rows) if self.examples is None else self.examples
        key = jax.random.fold_in(self.key, zlib.crc32(site.encode()) & 0x7FFFFFFF)
        return jax.vmap(lambda example: jax.random.fold_in(key, example))(examples)


class Loss(NamedTuple):
    """The loss of some rows of a batch, as sums, so that parts of a batch add up to the whole.

    Args:
        total: sum over targets of weight * nats, float32. What is reported is `total / weight`.
        weight: sum of the weights of the targets, float32: their number where every weight is 0 or 1.
        penalty: sum of what is trained on but not reported (z-loss, auxiliary losses), in the unit of `total`.
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


class _Treatment(NamedTuple):
    wrapper: Wrapper
    unroll: int


_PLAIN = _Treatment(lambda block, rolled: block, 1)
_treatment: contextvars.ContextVar[_Treatment] = contextvars.ContextVar("blocks", default=_PLAIN)


@contextlib.contextmanager
def wrapping(wrapper: Wrapper, *, unroll: int = 1) -> Iterator[None]:
    """While tracing inside, every block `f` runs as `wrapper(f, rolled)` and scans run `unroll` layers per iteration.

    `rolled` says that the block is the body of a rolled `lax.scan`, where `jax.checkpoint` needs no `prevent_cse`.
    """
    token = _treatment.set(_Treatment(wrapper, unroll))
    try:
        yield
    finally:
        _treatment.reset(token)


def wrap(block: BlockFunction, *, rolled: bool) -> BlockFunction:
    """The block as the plan in force wants it run. `layers.Stack` and `layers.Chain` call this; models need not."""
    treatment = _treatment.get()
    return treatment.wrapper(block, rolled and treatment.unroll == 1)


def unroll() -> int:
    """Layers per iteration of a scan over layers, under the plan in force."""
    return _treatment.get().unroll


def dropout_mask(context: Context, site: str, shape: tuple[int, ...], keep: float) -> Shaped[Array, "..."]:
    """Boolean mask of `shape`, whose first dim is the batch; row i depends on seed, step, layer, site, example."""
    return jax.vmap(lambda key: jax.random.bernoulli(key, keep, shape[1:]))(context.keys(site, shape[0]))
