"""Save sets of a block: the bytes of their values on device and host, and the cost to recompute the other values."""

import dataclasses
from collections.abc import Iterable

from jaxscale.errors import UserError, unknown
from jaxscale.memory.decision import SaveSet
from jaxscale.memory.plan import POLICIES, SaveSetObjective
from jaxscale.programs.block import BlockGraph, Equation

EVERYTHING = "*"
"""Name that stands for all residuals (values that the backward pass reads); it is the only name in its save set."""


@dataclasses.dataclass(frozen=True)
class Host:
    """Host memory for offloaded values of a block.

    Args:
        budget: maximum bytes of host memory, per device and microbatch, for one block.
        bandwidth: bytes/s between host and device in each direction.
        hidden_forward: maximum seconds of copies to the host that can overlap with computation; by default the seconds
            of the block's forward pass.
        hidden_backward: maximum seconds of copies back to the device that can overlap with computation, in addition to
            those that overlap with recomputation; by default twice the seconds of the forward pass.
        names: names of the values that may be offloaded; `None` for any value.
    """

    budget: int
    bandwidth: float
    hidden_forward: float | None = None
    hidden_backward: float | None = None
    names: frozenset[str] | None = None


@dataclasses.dataclass(frozen=True)
class Recompute:
    """The equations of a block that the backward pass recomputes.

    Args:
        flop: recomputed FLOP of matrix products, convolutions and kernels.
        seconds: seconds of the recomputation by the roofline model; 0 without a chip.
        equation_indices: indices of the recomputed equations.
    """

    flop: int
    seconds: float
    equation_indices: frozenset[int]


def cost_of(work: SaveSet | Recompute | BlockGraph | Equation, objective: SaveSetObjective) -> float:
    """Return the FLOP or the modeled seconds of some work, whichever is the objective.

    For a save set this is the cost of its recomputation; for a block or an equation, the cost of its forward pass.
    """
    return work.flop if objective == "flop" else work.seconds


def check_request(graph: BlockGraph, budget: int, objective: SaveSetObjective) -> None:
    """Raise an error if the budget is negative or the graph lacks the costs that the objective needs.

    Raises:
        UserError: the budget is negative, or the objective is "seconds" and the graph has no chip.
    """
    if budget < 0:
        raise UserError(f"save set: got a budget of {budget} bytes, expected 0 or more")
    if objective == "seconds" and graph.equations and not graph.seconds:
        raise UserError("the objective 'seconds' needs a chip with known rates: specify a chip, or use 'flop'")


def recompute(graph: BlockGraph, kept_indices: Iterable[int]) -> Recompute:
    """Return the equations that the backward pass recomputes if the values with these indices are kept.

    Args:
        graph: graph of the block.
        kept_indices: indices of the values kept on the device or on the host.
    """
    available_indices = set(kept_indices)
    rerun_indices: set[int] = set()
    missing_indices = [index for index in graph.needed if index not in available_indices]
    while missing_indices:
        producer_index = graph.values[missing_indices.pop()].producer
        if producer_index >= 0 and producer_index not in rerun_indices:
            rerun_indices.add(producer_index)
            operand_indices = graph.equations[producer_index].inputs
            missing_indices += [index for index in operand_indices if index not in available_indices]
    rerun_equations = [graph.equations[index] for index in sorted(rerun_indices)]
    return Recompute(
        sum(e.flop for e in rerun_equations), sum(e.seconds for e in rerun_equations), frozenset(rerun_indices)
    )


def hidden_seconds(graph: BlockGraph, host: Host) -> tuple[float, float]:
    """Return the seconds of copies that can overlap with a block's forward pass, and with its backward pass."""
    forward_seconds = graph.seconds if host.hidden_forward is None else host.hidden_forward
    return forward_seconds, 2 * graph.seconds if host.hidden_backward is None else host.hidden_backward


def exposed_seconds(graph: BlockGraph, host: Host | None, host_bytes: int, rerun_seconds: float) -> float:
    """Return the seconds of copies to and from the host that do not overlap with the computation of the block.

    Args:
        graph: graph of the block.
        host: host memory; `None` if nothing is offloaded.
        host_bytes: bytes of the offloaded values.
        rerun_seconds: seconds of the recomputation in the backward pass; copies overlap with the recomputation, too.
    """
    if host is None or not host_bytes:
        return 0.0
    copy_seconds = host_bytes / host.bandwidth
    hidden_forward_seconds, hidden_backward_seconds = hidden_seconds(graph, host)
    return max(0.0, copy_seconds - hidden_forward_seconds) + max(
        0.0, copy_seconds - hidden_backward_seconds - rerun_seconds
    )


def save_set(graph: BlockGraph, keep: Iterable[str], offload: Iterable[str] = (), host: Host | None = None) -> SaveSet:
    """Return the save set that keeps the values with these names; compute its bytes and cost from the graph.

    Args:
        graph: graph of the block.
        keep: names of values kept on the device.
        offload: names of values kept in host memory.
        host: host memory; its bandwidth determines the seconds of copies.

    Raises:
        UserError: the block has no value with one of these names, or a value cannot be kept by name.
    """
    keep_names, offload_names = tuple(keep), tuple(offload)
    if keep_names == (EVERYTHING,):
        return SaveSet(graph.fingerprint, keep_names, bytes=graph.needed_bytes)
    kept_indices, offloaded_indices = (
        [value_index(graph, name) for name in names] for names in (keep_names, offload_names)
    )
    recomputation = recompute(graph, (*kept_indices, *offloaded_indices))
    device_bytes, host_bytes = (
        sum(graph.values[index].bytes for index in indices) for indices in (kept_indices, offloaded_indices)
    )
    seconds = recomputation.seconds + exposed_seconds(graph, host, host_bytes, recomputation.seconds)
    index_by_name = {graph.values[index].name: index for index in (*kept_indices, *offloaded_indices)}
    sorted_keep_names, sorted_offload_names = (
        tuple(sorted(names, key=index_by_name.__getitem__)) for names in (keep_names, offload_names)
    )
    return SaveSet(
        graph.fingerprint,
        sorted_keep_names,
        sorted_offload_names,
        device_bytes,
        host_bytes,
        recomputation.flop,
        seconds,
    )


def value_index(graph: BlockGraph, name: str) -> int:
    """Return the index of the value with this name; first check that the value can be kept by name.

    Raises:
        UserError: the block has no value of this name (the message suggests a similar name), or the value cannot be
            kept by name.
    """
    index = graph.by_name.get(name)
    if index is None or graph.values[index].mark is None:
        names = [value.name for value in graph.values if value.mark is not None]
        if index is None:
            raise unknown(f"value of block {graph.fingerprint}", name, names)
        raise UserError(
            f"value {name!r} of block {graph.fingerprint} cannot be kept by name: it is inside an operation with a "
            f"custom derivative. Expected one of {', '.join(names[:8])}, ..."
        )
    return index


def policy_set(graph: BlockGraph, policy: str) -> SaveSet:
    """Return the save set of a block under a policy of `jax.checkpoint_policies`.

    A policy accepts or rejects kinds of operations. A result of an accepted operation is kept if the backward pass
    reads it.

    Args:
        graph: graph of the block.
        policy: name of the policy, such as "dots_saveable".

    Raises:
        UserError: the policy is unknown or needs arguments.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.programs.block import block_graph
        >>> w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(8, 8), (4, 8)])
        >>> graph = block_graph(lambda w, x: jnp.tanh(x @ w) @ w, w, x)
        >>> policy_set(graph, "dots_saveable").keep, policy_set(graph, "nothing_saveable").flop
        (('dot_general',), 512)
    """
    if policy not in POLICIES:
        raise unknown("policy of jax.checkpoint_policies", policy, POLICIES)
    if policy == "everything_saveable":
        return save_set(graph, (EVERYTHING,))
    saveable_indices = {i for equation in graph.equations if policy in equation.kept_by for i in equation.outputs}
    recomputation = recompute(graph, saveable_indices)
    read_indices = {*graph.needed, *(i for e in recomputation.equation_indices for i in graph.equations[e].inputs)}
    kept_indices = sorted(saveable_indices & read_indices)
    names = tuple(graph.values[index].name for index in kept_indices)
    kept_bytes = sum(graph.values[index].bytes for index in kept_indices)
    return SaveSet(graph.fingerprint, names, bytes=kept_bytes, flop=recomputation.flop, seconds=recomputation.seconds)
