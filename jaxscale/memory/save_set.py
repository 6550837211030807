"""Save sets of a block: what their values take on the device and the host, and what their recomputation costs."""

import dataclasses
from collections.abc import Iterable

from jaxscale.errors import UserError, unknown
from jaxscale.memory.decision import SaveSet
from jaxscale.memory.plan import POLICIES, SaveSetObjective
from jaxscale.programs.block import BlockGraph, Equation

EVERYTHING = "*"
"""In place of names: every residual is kept, as without a plan."""


@dataclasses.dataclass(frozen=True)
class Host:
    """Host memory as a place for values of a block.

    Args:
        budget: bytes there, per device and microbatch of one block.
        bandwidth: bytes/s between host and device, each way.
        hidden_forward: seconds of the forward pass that hide copies to the host; by default the block's own.
        hidden_backward: seconds of the backward pass that hide copies back; by default twice the forward pass.
        names: of the values that may be offloaded; `None` for any.
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
        flop: of matrix products, convolutions and kernels.
        seconds: by roofline; 0 without a chip.
        equations: their indices.
    """

    flop: int
    seconds: float
    equations: frozenset[int]


def cost_of(work: SaveSet | Recompute | BlockGraph | Equation, objective: SaveSetObjective) -> float:
    """FLOP or modelled seconds: of a save set those recomputed, of a block those of its forward pass."""
    return work.flop if objective == "flop" else work.seconds


def check_request(graph: BlockGraph, budget: int, objective: SaveSetObjective) -> None:
    """Refuse a budget that no save set fits, and an objective that a graph lacks.

    Raises:
        UserError: a negative budget; the objective "seconds" for a graph without a chip.
    """
    if budget < 0:
        raise UserError(f"save set: got a budget of {budget} bytes, expected 0 or more")
    if objective == "seconds" and graph.equations and not graph.seconds:
        raise UserError("seconds of a block need a chip whose rates are known: give one, or ask for flop")


def recompute(graph: BlockGraph, kept: Iterable[int]) -> Recompute:
    """The equations to recompute when these values are kept: every equation that leads to a needed value.

    Args:
        graph: of the block.
        kept: indices of values, on the device or on the host.
    """
    available_indices = set(kept)
    runs: set[int] = set()
    missing = [index for index in graph.needed if index not in available_indices]
    while missing:
        producer = graph.values[missing.pop()].producer
        if producer >= 0 and producer not in runs:
            runs.add(producer)
            missing += [index for index in graph.equations[producer].inputs if index not in available_indices]
    equations = [graph.equations[index] for index in sorted(runs)]
    return Recompute(sum(e.flop for e in equations), sum(e.seconds for e in equations), frozenset(runs))


def hidden_seconds(graph: BlockGraph, host: Host) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass that hide copies to and from the host."""
    forward = graph.seconds if host.hidden_forward is None else host.hidden_forward
    return forward, 2 * graph.seconds if host.hidden_backward is None else host.hidden_backward


def exposed_seconds(graph: BlockGraph, host: Host | None, host_bytes: int, recomputed: float) -> float:
    """Seconds of copies to and from the host that the block's own work does not hide."""
    if host is None or not host_bytes:
        return 0.0
    copy_seconds = host_bytes / host.bandwidth
    hidden_forward, hidden_backward = hidden_seconds(graph, host)
    return max(0.0, copy_seconds - hidden_forward) + max(0.0, copy_seconds - hidden_backward - recomputed)


def save_set(graph: BlockGraph, keep: Iterable[str], offload: Iterable[str] = (), host: Host | None = None) -> SaveSet:
    """A save set of these names, with its bytes and its cost.

    Args:
        graph: of the block.
        keep: names of values kept on the device.
        offload: names of values in host memory.
        host: sets the seconds of copies.

    Raises:
        UserError: the block has no such name, or the value cannot be kept by name.
    """
    keep, offload = tuple(keep), tuple(offload)
    if keep == (EVERYTHING,):
        return SaveSet(graph.fingerprint, keep, (), graph.needed_bytes, 0, 0, 0.0)
    kept_indices, offloaded_indices = ([value_index(graph, name) for name in names] for names in (keep, offload))
    recomputed = recompute(graph, (*kept_indices, *offloaded_indices))
    size, host_size = (
        sum(graph.values[index].bytes for index in indices) for indices in (kept_indices, offloaded_indices)
    )
    seconds = recomputed.seconds + exposed_seconds(graph, host, host_size, recomputed.seconds)
    order = {graph.values[index].name: index for index in (*kept_indices, *offloaded_indices)}
    by_order = [tuple(sorted(names, key=order.__getitem__)) for names in (keep, offload)]
    return SaveSet(graph.fingerprint, by_order[0], by_order[1], size, host_size, recomputed.flop, seconds)


def value_index(graph: BlockGraph, name: str) -> int:
    """Index of the value with this name, which can be kept by name.

    Raises:
        UserError: there is none; the message suggests a near name.
    """
    index = graph.by_name.get(name)
    if index is None or graph.values[index].mark is None:
        names = [value.name for value in graph.values if value.mark is not None]
        if index is None:
            raise unknown(f"value of block {graph.fingerprint}", name, names)
        raise UserError(
            f"value {name!r} of block {graph.fingerprint} is inside an operation with its own derivative that does "
            f"not name it: expected one of {', '.join(names[:8])}, ..."
        )
    return index


def policy_set(graph: BlockGraph, policy: str) -> SaveSet:
    """The save set of a block under a policy of `jax.checkpoint_policies`.

    A policy accepts or rejects kinds of operations; accepted results that the backward pass reads are kept.

    Args:
        graph: of the block.
        policy: its name, such as "dots_saveable".

    Raises:
        UserError: a policy that is none of those without arguments.

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
    saveable = {index for equation in graph.equations if policy in equation.kept_by for index in equation.outputs}
    recomputed = recompute(graph, saveable)
    needed = {*graph.needed, *(index for number in recomputed.equations for index in graph.equations[number].inputs)}
    kept_indices = sorted(saveable & needed)
    names = tuple(graph.values[index].name for index in kept_indices)
    size = sum(graph.values[index].bytes for index in kept_indices)
    return SaveSet(graph.fingerprint, names, (), size, 0, recomputed.flop, recomputed.seconds)
