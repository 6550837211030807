"""Record the blocks that a model calls, in one trace and without devices.

Every block runs through `blocks.wrap`: the blocks of `layers.Stack` and `layers.Chain`, and the repeated submodules of
a foreign NNX model. During the trace, a recorder takes the place of the memory plan in `blocks.wrap`.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from jaxscale.platforms.platform import Chip
from jaxscale.programs.block import BlockGraph, graph_of
from jaxscale.programs.inline import inline
from jaxscale.programs.walk import equations_with_runs

_NAME_PREFIX = "jaxscale_block_"
"""Prefix of the names under which recorded blocks are called in the model's jaxpr."""


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """One call of a block in a model's program.

    Args:
        fingerprint: fingerprint of the block's program.
        graph: graph of the block; calls with the same fingerprint share one graph.
        args: shapes of the block's arguments: by convention parameters, other state, activations, further arguments.
        count: number of runs of the block in one forward pass; for the body of a scan over layers, the number of
            layers.
        rolled: whether the block is the body of a rolled `lax.scan`.
        order: index of this call among the model's calls.
    """

    fingerprint: str
    graph: BlockGraph
    args: tuple[Any, ...]
    count: int
    rolled: bool
    order: int

    @property
    def input_bytes(self) -> int:
        """The bytes of the activations that enter one run of the block, per device."""
        return self.graph.carried_bytes


def collect(
    fn: Callable[..., Any],
    *args: Any,
    chip: Chip | None = None,
    mesh: Mapping[str, int] | None = None,
    batch: tuple[str, ...] | None = None,
    is_sequence: bool = False,
) -> tuple[BlockCall, ...]:
    """Trace `fn(*args)`, and return the blocks that it calls, in order.

    Args:
        fn: function to trace, such as a model's loss; it is not run.
        args: arrays or shapes (`jax.ShapeDtypeStruct`).
        chip: chip on which the seconds of the graphs are modeled; if `None`, the seconds are 0.
        mesh: number of devices along each mesh axis; by default the mesh of the current layout.
        batch: mesh axes along the first dim of activations whose placement is unknown.
        is_sequence: whether the blocks will run as one sequence, so that no stack scans them.

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

    recordings: list[tuple[str, tuple[Any, ...], bool]] = []  # of each call: fingerprint, inputs, is_rolled
    graph_by_fingerprint: dict[str, BlockGraph] = {}

    def recording_wrapper(block: Callable[..., Any], is_rolled: bool) -> Callable[..., Any]:
        """Return the function that is called instead of a block."""

        def record_and_run(*inputs: Any) -> Any:
            """Record the block with these inputs, and return its results from a named call."""
            closed_jaxpr, abstract_outputs = jax.make_jaxpr(block, return_shape=True)(*inputs)
            abstract_inputs = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(jax.numpy.shape(leaf), getattr(leaf, "dtype", type(leaf))), inputs
            )
            program = inline(closed_jaxpr)
            fingerprint = program.fingerprint()
            recordings.append((fingerprint, abstract_inputs, is_rolled))
            if fingerprint not in graph_by_fingerprint:
                # made within the trace, where a manual region has its axis names and arrays of one device
                activations = (2,) if len(abstract_inputs) > 2 else (-1,)
                graph_by_fingerprint[fingerprint] = graph_of(
                    closed_jaxpr, abstract_inputs, chip=chip, mesh=mesh, batch=batch, activations=activations
                )

            def run_program(*leaves: Any) -> list[Any]:
                """Run the block's program on the leaves of its inputs, and return the leaves of its results."""
                return program.run((*closed_jaxpr.consts, *leaves))

            # the name identifies the block's runs in the model's jaxpr
            run_program.__name__ = run_program.__qualname__ = f"{_NAME_PREFIX}{len(recordings) - 1}"
            output_leaves = jax.jit(run_program)(*jax.tree.leaves(inputs))
            return jax.tree.unflatten(jax.tree.structure(abstract_outputs), output_leaves)

        return record_and_run

    run_sequence = blocks.one_after_another if is_sequence else None
    with blocks.treating(blocks.Treatment(recording_wrapper, sequence=run_sequence, is_recorded=True)):
        # a new function each time, because JAX could return a cached trace made without the recorder
        model_jaxpr = jax.make_jaxpr(lambda *args: fn(*args))(*args)
    run_counts: Counter[int] = Counter()  # by index of the recording
    for eqn, run_count in equations_with_runs(model_jaxpr):
        name = eqn.params.get("name")
        if isinstance(name, str) and name.startswith(_NAME_PREFIX):
            run_counts[int(name.removeprefix(_NAME_PREFIX))] += run_count
    calls = []
    for index, (fingerprint, abstract_inputs, is_rolled) in enumerate(recordings):
        if run_counts[index]:
            graph = graph_by_fingerprint[fingerprint]
            calls.append(BlockCall(fingerprint, graph, abstract_inputs, run_counts[index], is_rolled, order=len(calls)))
    return tuple(calls)
