"""The blocks of a model as it calls them: traced once, with no device, under a recorder in the place of a plan.

Finds every block that runs through `blocks.wrap`: those of `layers.Stack` and `layers.Chain`, and the repeated
submodules of a foreign NNX model.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from jaxscale.costs.block import BlockGraph, graph_of
from jaxscale.costs.inline import inline
from jaxscale.platforms.platform import Chip

_NAME = "jaxscale_block_"


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """One place where a model calls a block.

    Args:
        fingerprint: of the block's program.
        graph: of the block; calls of one fingerprint share it.
        args: what it is called with, as shapes; by convention parameters, other state, activations, and the rest.
        count: how often it runs in one forward pass: the layers of a rolled scan.
        rolled: it is the body of a rolled `lax.scan`.
        order: its place among the calls.
    """

    fingerprint: str
    graph: BlockGraph
    args: tuple[Any, ...]
    count: int
    rolled: bool
    order: int

    @property
    def input_bytes(self) -> int:
        """Bytes of the activations that enter the block once, per device."""
        return self.graph.carried_bytes


def collect(
    fn: Callable[..., Any],
    *args: Any,
    chip: Chip | None = None,
    mesh: Mapping[str, int] | None = None,
    batch: tuple[str, ...] | None = None,
) -> tuple[BlockCall, ...]:
    """The blocks that `fn(*args)` calls, in order.

    Args:
        fn: such as a model's loss; it is traced, not run.
        args: arrays or shapes (`jax.ShapeDtypeStruct`).
        chip: for the seconds of graphs.
        mesh: devices along each mesh axis; by default those of the layout in force.
        batch: mesh axes along the first dim of activations whose placement nothing tells.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from jaxscale.layers.mlp import MLP
        >>> from jaxscale.layers.stack import Stack
        >>> stack = Stack(lambda rngs: MLP(4, 8, rngs=rngs), 3, rngs=nnx.Rngs(0))
        >>> [call] = collect(stack, jax.ShapeDtypeStruct((2, 5, 4), jnp.float32))
        >>> call.count, call.rolled, call.input_bytes
        (3, True, 160)
    """
    import jax

    from jaxscale import blocks

    seen: list[tuple[str, tuple[Any, ...], bool]] = []
    graphs: dict[str, BlockGraph] = {}

    def recorder(block: Callable[..., Any], rolled: bool) -> Callable[..., Any]:
        def recorded(*given: Any) -> Any:
            closed, shapes = jax.make_jaxpr(block, return_shape=True)(*given)
            abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jax.numpy.shape(leaf), _dtype(leaf)), given)
            program = inline(closed)
            found = program.fingerprint()
            seen.append((found, abstract, rolled))
            if found not in graphs:
                # here, where the block runs: in a manual region its arrays are a device's parts, its axes have names
                moving = (2,) if len(abstract) > 2 else (-1,)
                graphs[found] = graph_of(closed, abstract, chip=chip, mesh=mesh, batch=batch, activations=moving)

            def run(*leaves: Any) -> list[Any]:
                return program.run((*closed.consts, *leaves))

            # the name tells in the whole program how often the block runs
            run.__name__ = run.__qualname__ = f"{_NAME}{len(seen) - 1}"
            return jax.tree.unflatten(jax.tree.structure(shapes), jax.jit(run)(*jax.tree.leaves(given)))

        return recorded

    with blocks.wrapping(recorder):
        # a function of its own: JAX would give a trace made under another treatment again
        whole = jax.make_jaxpr(lambda *args: fn(*args))(*args)
    counts: Counter[int] = Counter()
    _count(whole, 1, counts)
    calls = []
    for number, (found, abstract, rolled) in enumerate(seen):
        if counts[number]:
            calls.append(BlockCall(found, graphs[found], abstract, counts[number], rolled, len(calls)))
    return tuple(calls)


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else type(leaf)


def _count(jaxpr: Any, times: int, counts: Counter[int]) -> None:
    """How often each recorded block runs."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = eqn.params.get("name")
        if isinstance(name, str) and name.startswith(_NAME):
            counts[int(name.removeprefix(_NAME))] += times
        inside = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    _count(inner, inside, counts)
