"""menu: compare all memory rules on one block, by bytes on device and host and by time.

Each rule of a `MemoryPlan` (the optimal save set, Rotor, heuristics, JAX's policies, periodic plans, the selectors of
offload) is applied at the same budgets and makes the decision that training would use. Nothing is compiled, and no
device is needed; the time is modeled by roofline. Left out: JAX's policies under their alternative names
(`checkpoint_dots`), and `everything_saveable`, `nothing_saveable` and `dots_saveable`, which this menu calls `none`,
`full` and `dots`.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jaxscale.errors import UserError
from jaxscale.figures.markup import framed, write_figure
from jaxscale.memory.decide import decide
from jaxscale.memory.decision import Decision
from jaxscale.memory.plan import MemoryPlan
from jaxscale.memory.selectors import SELECTORS
from jaxscale.memory.stack_plan import least_bytes
from jaxscale.planning.memory_costs import MemoryCosts
from jaxscale.planning.pictures import Point, page, rules_svg
from jaxscale.platforms.platform import Chip, Platform
from jaxscale.programs import roofline
from jaxscale.programs.block import BlockGraph, block_graph
from jaxscale.programs.collect import BlockCall
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.values.byte_sizes import bytes_text, short_budget
from jaxscale.values.units import size

HEURISTICS = ("greedy", "dtr_static", *(f"offload:{selector}" for selector in SELECTORS))
"""Rules with a budget, except `save` and `chain`, which are optimal if nothing is copied to the host."""

BUDGETED_RULES = ("save", "chain", *HEURISTICS)
"""Rules with a budget."""

FIXED_RULES = ("none", "dots", "jax:dots_with_no_batch_dims_saveable", "full", "sqrt", "periodic:2", "revolve:4")
"""Rules without a budget, as text forms of memory plans."""

SHARES = (0.0, 0.03, 0.06, 0.12, 0.25, 0.5, 0.75, 1.0)
"""Budgets to compare, as shares of the bytes that a block keeps without a plan; the block's input is added to each."""


@dataclasses.dataclass(frozen=True)
class Menu:
    """Decisions of memory rules for a stack of identical blocks, for display as text, SVG and HTML.

    Args:
        title: heading with the block's name, bytes and modeled time.
        graph: graph of one block.
        layers: number of blocks in the stack.
        is_timed: whether costs are modeled seconds; they are FLOP if the chip's rates are unknown.
        budgets: budgets for the whole stack, in bytes kept on the device.
        decisions: decisions by rule: one for each valid budget, or a single one for a rule without a budget.
    """

    title: str
    graph: BlockGraph = dataclasses.field(repr=False)
    layers: int
    is_timed: bool
    budgets: tuple[int, ...]
    decisions: dict[str, tuple[Decision, ...]] = dataclasses.field(repr=False)

    def within(self, rule: str, budget: int) -> Decision | None:
        """Return the cheapest decision of a rule that keeps at most `budget` bytes; `None` if there is none."""
        fitting_decisions = [decision for decision in self.decisions[rule] if decision.bytes <= budget]
        return min(fitting_decisions, key=self.cost, default=None)

    def cost(self, decision: Decision) -> float:
        """Return the seconds (or FLOP) that a decision adds, divided by those of the forward and backward passes."""
        passes_cost = 3 * self.layers * (self.graph.seconds if self.is_timed else self.graph.flop)
        return (decision.seconds if self.is_timed else decision.flop) / (passes_cost or 1)

    def __str__(self) -> str:
        text_lines = [
            self.title,
            "",
            f"{self._cost_name} beyond keeping everything, by the bytes kept on the device a layer",
        ]
        text_lines += self._table(self.decisions, lambda decision: _percentage_text(self.cost(decision)))
        host_rules = [rule for rule, decisions in self.decisions.items() if any(d.host_bytes for d in decisions)]
        if host_rules:
            text_lines += ["", "MiB in host memory a layer, for rules that copy to the host"]
            text_lines += self._table(host_rules, lambda decision: f"{decision.host_bytes / self.layers / 2**20:.4g}")
        return "\n".join(text_lines)

    __repr__ = __str__

    @property
    def _cost_name(self) -> str:
        """The name of the costs, "time" or "FLOP"."""
        return "time" if self.is_timed else "FLOP"

    def _table(self, rules: Collection[str], cell_of: Callable[[Decision], str]) -> list[str]:
        """Return the lines of a table with a row for each rule and a column for each budget.

        A cell is "-" if the rule has no decision within the budget.

        Args:
            rules: names of the rules.
            cell_of: function that returns the text in the cell of a decision.
        """
        rule_width = max(map(len, rules))
        text_lines = [" " * rule_width + "".join(f"{size(budget / self.layers):>10}" for budget in self.budgets)]
        for rule in rules:
            decisions = [self.within(rule, budget) for budget in self.budgets]
            cells = ["-" if decision is None else cell_of(decision) for decision in decisions]
            text_lines.append(f"{rule:{rule_width}}" + "".join(f"{cell:>10}" for cell in cells))
        return text_lines

    def svg(self) -> str:
        """Return an SVG image with a curve for each rule: cost against bytes kept per layer."""
        points_by_rule = {
            rule: [Point(str(d.plan), round(d.bytes / self.layers), 1 + self.cost(d)) for d in decisions]
            for rule, decisions in self.decisions.items()
        }
        return rules_svg(points_by_rule, f"bytes kept a layer; upwards the {self._cost_name} of a step")

    def html(self) -> str:
        """Return a self-contained HTML page with the curves and the table."""
        return page(self.title, [("", self.svg()), ("", f"<pre>{escape(str(self))}</pre>")])

    def _repr_html_(self) -> str:
        return framed(self.html(), 900)

    def write(self, path: str | Path) -> None:
        """Write the page to a file, or only the picture if the file's name ends in .svg.

        Raises:
            UserError: the file cannot be written.
        """
        write_figure(path, self.svg, self.html)


def menu(
    block: Any,
    *args: Any,
    platform: Platform | str | None = None,
    plan: Plan | None = None,
    layers: int = 16,
    shares: Sequence[float] = SHARES,
    **kwargs: Any,
) -> Menu:
    """Compare the decisions of all memory rules for a block, with their bytes and costs.

    Args:
        block: a function or an NNX module, which is called as `block(*args, **kwargs)`; the last of `args` is the
            activation. It may also be a `BlockGraph`, or an `Experiment`: then rules are compared on a block of the
            experiment's model, with the shapes of one device.
        args: the block's arguments as arrays or shapes (`jax.ShapeDtypeStruct`), per device and microbatch.
        platform: platform on which time is modeled, such as "tpu v5e:4x4"; if `None`, costs are FLOP and nothing is
            offloaded. Required for an experiment.
        plan: plan of the experiment; `experiment.plan` by default.
        layers: number of identical blocks in the stack; ignored for an experiment, whose model determines the number.
        shares: budgets to compare, as shares of the bytes that a block keeps without a plan; the bytes of the block's
            input are added to each.
        kwargs: keyword arguments of the block, passed unchanged.

    Raises:
        UserError: the model of an experiment exposes no blocks, no platform is given for an experiment, or a share is
            not between 0 and 1.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(512, 512), (2048, 512)])
        >>> rules_menu = menu(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w), w, x, platform="tpu v5e:1x1", layers=4)
        >>> input_budget = rules_menu.budgets[1]
        >>> [round(rules_menu.cost(rules_menu.within(rule, input_budget)), 2) for rule in ("save", "full")]
        [0.33, 0.33]
    """
    parsed_platform = Platform.parse(platform) if isinstance(platform, str) else platform
    if any(not 0 <= share <= 1 for share in shares):
        raise UserError(f"shares: got {', '.join(map(str, shares))}, expected numbers from 0 to 1")
    if isinstance(block, Experiment):
        if parsed_platform is None:
            raise UserError("menu: an experiment needs a platform, such as menu(experiment, platform='tpu v5e:4x4')")
        calls = MemoryCosts.of(block, parsed_platform, plan or block.plan).calls
        if not calls:
            raise UserError(
                f"{block.name}: the model exposes no blocks; use layers.Stack or layers.Chain, or pass a block"
            )
        # if the model has several kinds of blocks, choose the kind that keeps the most bytes
        graph_by_kind = {call.fingerprint: call.graph for call in calls}
        count_by_kind = {kind: sum(call.count for call in calls if call.fingerprint == kind) for kind in graph_by_kind}
        largest_kind = max(graph_by_kind, key=lambda kind: count_by_kind[kind] * graph_by_kind[kind].needed_bytes)
        graph, layers, name = graph_by_kind[largest_kind], count_by_kind[largest_kind], block.name
    else:
        graph = _graph(block, args, kwargs, parsed_platform)
        name = f"block {graph.fingerprint}" if block is graph else getattr(block, "__name__", type(block).__name__)
    return _menu(name, graph, layers, shares, None if parsed_platform is None else parsed_platform.chip)


def _menu(name: str, graph: BlockGraph, layers: int, shares: Sequence[float], chip: Chip | None) -> Menu:
    """Return the menu of a stack of `layers` blocks that all have this graph."""
    call = BlockCall(graph.fingerprint, graph, args=(), count=layers, rolled=layers > 1, order=0)
    input_bytes = layers * graph.carried_bytes
    exact_budgets = (
        least_bytes(graph, layers),
        *(input_bytes + int(share * graph.needed_bytes) * layers for share in shares),
    )
    budgets = sorted({short_budget(budget) for budget in exact_budgets})
    decisions_by_rule: dict[str, tuple[Decision, ...]] = {}
    for rule in (*BUDGETED_RULES, *FIXED_RULES):
        rule_decisions = []
        plan_texts = [f"{rule}:{bytes_text(budget)}" for budget in budgets] if rule in BUDGETED_RULES else [rule]
        for plan_text in plan_texts:
            try:
                rule_decisions.append(decide(MemoryPlan.parse(plan_text), [call], chip))
            except UserError:  # the budget is too small for the rule, or the chip's rates are unknown
                continue
        if rule_decisions:
            decisions_by_rule[rule] = tuple(rule_decisions)
    is_timed = roofline.rate(chip, "bfloat16") is not None
    timing_text = f"{3e3 * graph.seconds:.3g} ms forward and backward on a {chip.name}, " if chip and is_timed else ""
    title = (
        f"{name}, {layers} layers: {timing_text}{size(graph.carried_bytes)} of input and {size(graph.needed_bytes)} "
        "kept without a plan, a layer"
    )
    return Menu(title, graph, layers, is_timed, tuple(budgets), decisions_by_rule)


def _percentage_text(cost: float) -> str:
    """Return a relative cost (`Menu.cost`) as a percentage, such as "+12.5%"."""
    return f"{cost:+.1%}" if cost < 10 else f"{cost:+.0%}"


def _graph(block: Any, args: Sequence[Any], kwargs: Any, platform: Platform | None) -> BlockGraph:
    """Return the graph of a function or an NNX module; return a `BlockGraph` unchanged."""
    from flax import nnx

    chip = None if platform is None else platform.chip
    if isinstance(block, BlockGraph):
        return block
    if not isinstance(block, nnx.Module):
        return block_graph(lambda *arguments: block(*arguments, **kwargs), *args, chip=chip)
    graphdef, state = nnx.split(block)

    def run_module(module_state: Any, *arguments: Any) -> Any:
        """Call the module, with the variables in `module_state`, on the block's arguments."""
        module: Any = nnx.merge(graphdef, module_state, copy=True)
        return module(*arguments, **kwargs)

    abstract_state = nnx.to_pure_dict(nnx.eval_shape(lambda: state))
    return block_graph(run_module, abstract_state, *args, chip=chip)
