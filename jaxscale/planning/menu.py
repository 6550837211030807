"""menu: every way to choose what a block keeps, side by side on one block: bytes on device and host, and time.

Each rule of a `MemoryPlan` is asked at the same budgets and answers with the decision that training under it would run
with, so the table compares what a user can ask for, and nothing else: the optimal save set, Rotor, heuristics, JAX's
own policies, periodic plans, and the selectors of offload. Nothing is compiled, and no device is needed; the time is
the roofline's. Left out: JAX's policies under their second names (`checkpoint_dots`), and `everything_saveable`,
`nothing_saveable` and `dots_saveable`, which are `none`, `full` and `dots` here.
"""

import dataclasses
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jaxscale.costs import roofline
from jaxscale.costs.block import BlockGraph, block_graph
from jaxscale.costs.collect import BlockCall
from jaxscale.errors import UserError
from jaxscale.memory.decide import decide
from jaxscale.memory.decision import Decision
from jaxscale.memory.plan import MemoryPlan
from jaxscale.memory.stack_plan import least_bytes
from jaxscale.planning.pictures import Point, framed, lines, page, write_picture
from jaxscale.planning.program import described_step
from jaxscale.platforms.platform import Chip, Platform
from jaxscale.step.experiment import Experiment
from jaxscale.step.plan import Plan
from jaxscale.step.remember import traced_blocks
from jaxscale.values.byte_sizes import bytes_text, short_budget
from jaxscale.values.units import size

BUDGETED = (
    "save", "chain", "greedy", "dtr_static", "offload:pofo", "offload:capuchin", "offload:vdnn", "offload:tflms",
    "offload:autoswap", "offload:swapadvisor",
)  # fmt: skip
"""Rules that take a budget."""

FIXED = ("none", "dots", "jax:dots_with_no_batch_dims_saveable", "full", "sqrt", "periodic:2", "revolve:4")
"""Memory plans that need none."""

SHARES = (0.0, 0.03, 0.06, 0.12, 0.25, 0.5, 0.75, 1.0)
"""Budgets beside a block's input, as shares of what it keeps without a plan."""


@dataclasses.dataclass(frozen=True)
class Menu:
    """Ways to keep the blocks of a stack, as a value that prints and draws itself.

    Args:
        title: what was asked.
        graph: of a block.
        layers: alike blocks of the stack.
        timed: costs are modelled seconds; else FLOP, for nothing says how fast the chip is.
        budgets: bytes kept on the device, of the whole stack, that the rules were asked for.
        decisions: what each answered, by rule; a rule without a budget answers once.
    """

    title: str
    graph: BlockGraph = dataclasses.field(repr=False)
    layers: int
    timed: bool
    budgets: tuple[int, ...]
    decisions: dict[str, tuple[Decision, ...]] = dataclasses.field(repr=False)

    def within(self, rule: str, budget: int) -> Decision | None:
        """The cheapest decision of a rule that keeps no more than a budget; `None` where there is none."""
        fitting = [decision for decision in self.decisions[rule] if decision.bytes <= budget]
        return min(fitting, key=self.cost, default=None)

    def cost(self, decision: Decision) -> float:
        """Time beyond keeping everything, as a share of forward and backward pass; FLOP where nothing tells time."""
        whole = 3 * self.layers * (self.graph.seconds if self.timed else self.graph.flop)
        return (decision.seconds if self.timed else decision.flop) / (whole or 1)

    def __str__(self) -> str:
        what = "time" if self.timed else "FLOP"
        lines = [self.title, "", f"{what} beyond keeping everything, by the bytes kept on the device a layer"]
        lines += self._table(dict.fromkeys(self.decisions, self.cost), _share)
        hosted = [rule for rule, found in self.decisions.items() if any(one.host_bytes for one in found)]
        if hosted:
            lines += ["", "MiB in host memory a layer, of these"]
            lines += self._table(
                dict.fromkeys(hosted, lambda one: one.host_bytes / self.layers / 2**20), "{:.4g}".format
            )
        return "\n".join(lines)

    def _table(self, rows: dict[str, Callable[[Decision], float]], text: Callable[[float], str]) -> list[str]:
        wide = max(map(len, rows))
        cells = [[f"{'':{wide}}", *(size(budget / self.layers) for budget in self.budgets)]]
        for rule, value in rows.items():
            found = [self.within(rule, budget) for budget in self.budgets]
            cells.append([f"{rule:{wide}}", *("-" if one is None else text(value(one)) for one in found)])
        return ["".join([head, *(f"{cell:>10}" for cell in rest)]) for head, *rest in cells]

    def svg(self) -> str:
        """The curve of each rule, as an SVG image: bytes kept a layer across, cost upwards."""
        curves = {
            rule: [Point(str(one.plan), round(one.bytes / self.layers), 1 + self.cost(one)) for one in found]
            for rule, found in self.decisions.items()
        }
        return lines(curves, f"bytes kept a layer; upwards the {'time' if self.timed else 'FLOP'} of a step")

    def html(self) -> str:
        """A page that stands alone: the curves and the table."""
        return page(self.title, [("", self.svg()), ("", f"<pre>{escape(str(self))}</pre>")])

    def _repr_html_(self) -> str:
        return framed(self.html(), 900)

    def write(self, path: str | Path) -> None:
        """Write the page, or the picture alone where the name ends in .svg.

        Raises:
            UserError: the file cannot be written.
        """
        write_picture(path, self.svg, self.html)


def menu(
    block: Any,
    *args: Any,
    platform: Platform | str | None = None,
    plan: Plan | None = None,
    layers: int = 16,
    shares: Sequence[float] = SHARES,
    **named: Any,
) -> Menu:
    """Ways to choose what a block keeps, with what each takes and costs.

    Args:
        block: a function or an NNX module, called as `block(*args, **named)`; the last of `args` is the activation. Or
            an `Experiment`, for the blocks of its model, as one device sees them under its plan.
        args: arrays or shapes (`jax.ShapeDtypeStruct`), per device and microbatch.
        platform: whose roofline tells the time, such as "tpu v5e:4x4"; without one FLOP are counted, and nothing goes
            to a host. An experiment needs it.
        plan: of an experiment; its own by default.
        layers: alike blocks of the stack; an experiment has its own.
        shares: budgets beside a block's input, as shares of what it keeps without a plan.
        named: further arguments of the block, given as they are.

    Raises:
        UserError: an experiment without blocks or without a platform; a share that is none.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(512, 512), (2048, 512)])
        >>> found = menu(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w), w, x, platform="tpu v5e:1x1", layers=4)
        >>> keeping_inputs = found.budgets[1]
        >>> [round(found.cost(found.within(rule, keeping_inputs)), 2) for rule in ("save", "full")]
        [0.33, 0.33]
    """
    platform = Platform.parse(platform) if isinstance(platform, str) else platform
    if any(not 0 <= share <= 1 for share in shares):
        raise UserError(f"shares: got {', '.join(map(str, shares))}, expected numbers from 0 to 1")
    if isinstance(block, Experiment):
        if platform is None:
            raise UserError("menu: an experiment needs a platform, such as menu(experiment, platform='tpu v5e:4x4')")
        step = described_step(block, platform, dataclasses.replace(plan or block.plan, memory=MemoryPlan("none")))
        calls = traced_blocks(step.objective, platform.chip)
        if not calls:
            raise UserError(
                f"{block.name}: its model shows no blocks; build it of layers.Stack or layers.Chain, or give one block"
            )
        # of several kinds of blocks the one that keeps the most
        kinds = {call.fingerprint: call.graph for call in calls}
        counts = {kind: sum(call.count for call in calls if call.fingerprint == kind) for kind in kinds}
        kind = max(kinds, key=lambda kind: counts[kind] * kinds[kind].needed_bytes)
        graph, layers, name = kinds[kind], counts[kind], block.name
    else:
        graph = _graph(block, args, named, platform)
        name = f"block {graph.fingerprint}" if block is graph else getattr(block, "__name__", type(block).__name__)
    return _menu(name, graph, layers, shares, None if platform is None else platform.chip)


def _menu(name: str, graph: BlockGraph, layers: int, shares: Sequence[float], chip: Chip | None) -> Menu:
    call = BlockCall(graph.fingerprint, graph, (), layers, layers > 1, 0)
    inputs = layers * graph.carried_bytes
    exact = (least_bytes(graph, layers), *(inputs + int(share * graph.needed_bytes) * layers for share in shares))
    budgets = sorted({short_budget(budget) for budget in exact})
    decisions: dict[str, tuple[Decision, ...]] = {}
    for rule in (*BUDGETED, *FIXED):
        found = []
        for text in [f"{rule}:{bytes_text(budget)}" for budget in budgets] if rule in BUDGETED else [rule]:
            try:
                found.append(decide(MemoryPlan.parse(text), [call], chip))
            except UserError:  # below what the rule can do, or seconds of a chip that nobody knows
                continue
        if found:
            decisions[rule] = tuple(found)
    timed = roofline.rate(chip, "bfloat16") is not None
    taken = "" if chip is None or not timed else f"{3e3 * graph.seconds:.3g} ms forward and backward on a {chip.name}, "
    title = (
        f"{name}, {layers} alike: {taken}{size(graph.carried_bytes)} of input and {size(graph.needed_bytes)} kept "
        "without a plan, a layer"
    )
    return Menu(title, graph, layers, timed, tuple(budgets), decisions)


def _share(value: float) -> str:
    return f"{value:+.1%}" if value < 10 else f"{value:+.0%}"


def _graph(block: Any, args: Sequence[Any], named: Any, platform: Platform | None) -> BlockGraph:
    from flax import nnx

    chip = None if platform is None else platform.chip
    if isinstance(block, BlockGraph):
        return block
    if not isinstance(block, nnx.Module):
        return block_graph(lambda *args: block(*args, **named), *args, chip=chip)
    graphdef, state = nnx.split(block)

    def run(state: Any, *args: Any) -> Any:
        module: Any = nnx.merge(graphdef, state, copy=True)
        return module(*args, **named)

    shapes = nnx.to_pure_dict(nnx.eval_shape(lambda: state))
    return block_graph(run, shapes, *args, chip=chip)
