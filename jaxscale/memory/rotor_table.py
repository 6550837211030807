"""Rotor: the fastest plan of a chain of different stages within a budget of bytes.

Dynamic programming over (first stage, last stage, free bytes) after Beaumont et al. 2019 (arXiv:1911.13214), with a
menu of ways to keep each stage as in Rockmate (Zhao et al. 2023, arXiv:2307.01236):

    C(s, t, m) = least seconds to run stages s..t forward and backward when the input of s is kept and m bytes are free
               = min over options o of s   time(o) + C(s + 1, t, m - kept(o))
                     and segments s..c-1   forward(s..c-1) + C(c, t, m - x(c)) + C(s, c-1, m)

with time(o) and kept(o) the seconds and the kept bytes of stage s under option o, and x(c) the bytes of c's input. The
cut c is the first stage after a segment that runs again.

A budget bounds either the bytes kept for a later backward pass (`kept`, as elsewhere in this package) or, as in the
papers, all bytes alive at any time (`alive`), which include gradients and the working memory of the running stage.

Free bytes are counted in slots of a grid. The grid is exact if all kept sizes are multiples of one unit and the budget
has few enough units. Otherwise kept sizes are rounded to the nearest slot, plans are tried in order of cost, and the
first whose true bytes (`chain.simulate`) are within the budget is taken. Errors of rounding to the nearest cancel;
those of rounding up would add. Identical stages need a table by length instead of one by (first, last).

Left out: plans that keep a value beyond its segment (non-persistent), and offload (see `memory/selectors/`).
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxscale.errors import UserError
from jaxscale.memory.chain import ChainCost, Nodes, Remat, Save, Stage, simulate
from jaxscale.values.byte_sizes import bytes_at_least, bytes_text

CostRow = np.ndarray
"""Float64 array of shape (number of slots,): seconds by slot of free bytes, infinite if no plan fits."""
Bound = Literal["alive", "kept"]
"""What a budget bounds: all live bytes at any time, or the bytes kept for a backward pass."""
_EXTRA = 0.01
"""Slots beyond the budget, as a share of the grid, for plans whose rounded sizes exceed it and true sizes do not."""


@dataclasses.dataclass(frozen=True)
class ChainPlan:
    """A plan of a chain, and its cost.

    Args:
        nodes: the plan of the chain.
        seconds: seconds of the forward and the backward pass, as `chain.simulate` returns them.
        peak_bytes: most live bytes at any time, the chain's input included.
        kept_bytes: most bytes kept for a backward pass at any time, the chain's input included.
        exact: whether the plan is the fastest within the budget for certain; false if sizes were rounded to the grid.
    """

    nodes: Nodes
    seconds: float
    peak_bytes: int
    kept_bytes: int
    exact: bool


def rotor(
    stages: Sequence[Stage], input_bytes: int, budget: int, *, slots: int = 2000, bound: Bound = "alive"
) -> ChainPlan:
    """The fastest plan within a budget.

    Args:
        stages: costs of the chain's stages.
        input_bytes: bytes of the first stage's input.
        budget: most bytes, `input_bytes` included.
        slots: number of slots of the grid if sizes have no common unit.
        bound: which bytes the budget bounds.

    Raises:
        UserError: no plan fits; the message gives the least budget that suffices, and what would lower it.

    Example:
        >>> alike = [Stage(1.0, 2.0, 1)] * 4
        >>> plan = rotor(alike, 1, 6)
        >>> plan.seconds, plan.peak_bytes, plan.exact
        (14.0, 6, True)
        >>> rotor(alike, 1, 3, bound="kept").seconds
        14.0
    """
    problem = _Problem(tuple(stages), input_bytes, bound)
    least_bytes = problem.least_bytes()
    if budget < least_bytes:
        raise _infeasible(problem, budget, least_bytes)
    table = _Table(problem, problem.grid(budget - input_bytes, slots))
    for slot in table.slots():
        nodes = table.nodes(0, problem.count - 1, slot)
        cost = simulate(nodes, stages, input_bytes)
        if problem.bounded_bytes(cost) <= budget:
            seconds = float(table.row(0, problem.count - 1)[slot])
            return ChainPlan(nodes, seconds, cost.peak_bytes, cost.kept_bytes, exact=table.exact)
    # the budget is so near the least that rounding leaves no plan within it
    nodes = problem.least_nodes(0, problem.count - 1)
    cost = simulate(nodes, stages, input_bytes)
    return ChainPlan(nodes, cost.seconds, cost.peak_bytes, cost.kept_bytes, exact=False)


def least_budget(stages: Sequence[Stage], input_bytes: int, bound: Bound = "alive") -> int:
    """The least budget within which a chain can run forward and backward, exactly.

    Example:
        >>> least_budget([Stage(1.0, 2.0, 1)] * 4, 1)
        5
        >>> least_budget([Stage(1.0, 2.0, 1)] * 4, 1, "kept")
        2
    """
    return _Problem(tuple(stages), input_bytes, bound).least_bytes()


def _infeasible(problem: "_Problem", budget: int, least_bytes: int) -> UserError:
    """The error for a budget below the least possible."""
    save_needs = [
        min(problem.save_need(index, option, index) for option in range(len(stage.options)))
        for index, stage in enumerate(problem.stages)
    ]
    stage_bytes = [save_need + input_bytes for save_need, input_bytes in zip(save_needs, problem.x, strict=False)]
    index = max(range(problem.count), key=stage_bytes.__getitem__)
    return UserError(
        f"a budget of {bytes_text(budget)} ({problem.bound}) is too low for {problem.count} stages: the least possible "
        f"is {bytes_at_least(least_bytes)}, of which stage {index} alone takes {bytes_at_least(stage_bytes[index])}; "
        "more microbatches, a smaller batch, or splitting that stage in two would lower it"
    )


class _Problem:
    """The costs of a chain's stages as arrays.

    x[i] are the bytes of stage i's input, and x[L], for L stages, those of the last output; elapsed[i] are the forward
    seconds of the stages before i.
    """

    def __init__(self, stages: tuple[Stage, ...], input_bytes: int, bound: Bound) -> None:
        if not stages:
            raise UserError("chain: got no stages, expected at least one")
        self.stages, self.input_bytes, self.count, self.bound = stages, input_bytes, len(stages), bound
        self.x = [input_bytes, *(stage.output_bytes for stage in stages)]
        self.elapsed = np.concatenate([[0.0], np.cumsum([stage.forward_seconds for stage in stages])])
        self.is_alike = len(set(stages)) == 1 and input_bytes == stages[0].output_bytes
        self.has_passed_bytes = any(stage.passed_bytes for stage in stages)
        # bytes of the gradient of x[i]
        self.gradient_bytes = self.x if bound == "alive" else [0] * len(self.x)
        # kept[s][c - s - 1]: bytes of the input of c that the input of s does not contain
        # run_need[s][c - s - 1]: bytes to run stages s..c-1, besides the input of s and a gradient, keeping only x[c]
        self.kept: list[list[int]] = []
        self.run_need: list[list[int]] = []
        for start in range(self.count if not self.is_alike else 1):
            kept_row, need_row, passed_bytes, run_bytes, kept_bytes = [], [], math.inf, 0, 0
            for index in range(start, self.count):
                stage = stages[index]
                passed_bytes = min(passed_bytes, stage.passed_bytes)
                run_bytes = max(run_bytes, kept_bytes + stage.output_bytes - stage.passed_bytes + stage.working_bytes)
                kept_bytes = stage.output_bytes - int(passed_bytes)
                kept_row.append(kept_bytes)
                need_row.append(run_bytes if bound == "alive" else 0)
            self.kept.append(kept_row)
            self.run_need.append(need_row)
        if self.is_alike:
            self.kept, self.run_need = self.kept * self.count, self.run_need * self.count

    def bounded_bytes(self, cost: ChainCost) -> int:
        """The bytes, of a plan with this cost, that the budget bounds."""
        return cost.peak_bytes if self.bound == "alive" else cost.kept_bytes

    def saved_bytes(self, stage: int, option: int) -> int:
        """Bytes besides its input that a stage keeps until its backward pass, its output included."""
        return self.stages[stage].options[option].kept_bytes + self.kept[stage][0]

    def save_need(self, index: int, option: int, last: int) -> int:
        """Most bytes that a stage takes forward and backward, besides its input, if stages up to `last` follow it."""
        stage = self.stages[index]
        if self.bound == "kept":
            return self.saved_bytes(index, option) if index < last else stage.options[option].kept_bytes
        forward_bytes = self.x[last + 1] + stage.working_bytes
        backward_bytes = self.x[index] + stage.output_bytes - stage.passed_bytes + stage.options[option].working_bytes
        return self.saved_bytes(index, option) + max(forward_bytes, backward_bytes)

    def save_seconds(self, index: int, option: int) -> float:
        """Seconds of a stage's forward and backward pass under an option."""
        stage = self.stages[index]
        return stage.forward_seconds + stage.backward_seconds + stage.options[option].extra_seconds

    # -- the least memory ----------------------------------------------------------------------------------------------

    def least_bytes(self) -> int:
        """The least bytes that any plan of the chain needs."""
        if not hasattr(self, "_least"):
            # least bytes of each run of stages, and the number for the beginning of its plan (`_least_choices`)
            self._least: dict[tuple[int, int], tuple[int, int]] = {}
            for first, last in self._spans():
                choices = self._least_choices(first, last)
                self._least[self._key(first, last)] = min(choices, key=lambda choice: choice[0])
        return self.input_bytes + self._least_of(0, self.count - 1)

    def _least_choices(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield pairs of the least bytes of stages first..last and a number for the beginning of their plan.

        The number -1 - option saves the first stage under that option; a number c reruns stages first..c-1.
        """
        for option in range(len(self.stages[first].options)):
            later_bytes = self.saved_bytes(first, option) + self._least_of(first + 1, last) if first < last else 0
            yield max(self.save_need(first, option, last), later_bytes), -1 - option
        for cut in range(first + 1, last + 1):
            run_bytes = self.gradient_bytes[last + 1] + self.run_need[first][cut - first - 1]
            later_bytes = self.kept[first][cut - first - 1] + self._least_of(cut, last)
            yield max(run_bytes, later_bytes, self._least_of(first, cut - 1)), cut

    def least_nodes(self, first: int, last: int) -> Nodes:
        """The plan of stages first..last that needs the least memory."""
        self.least_bytes()
        if first > last:
            return ()
        # the number for the beginning of the plan, as in `_least_choices`
        choice = self._least[self._key(first, last)][1]
        if choice < 0:
            return (Save(first, -1 - choice), *self.least_nodes(first + 1, last))
        cut = choice - self._key(first, last)[0] + first
        return (Remat(self.least_nodes(first, cut - 1)), *self.least_nodes(cut, last))

    def _least_of(self, first: int, last: int) -> int:
        """The least bytes of stages first..last; 0 for no stages."""
        return self._least[self._key(first, last)][0] if first <= last else 0

    def _key(self, first: int, last: int) -> tuple[int, int]:
        """Key of stages first..last in `_least`: for identical stages only their number counts."""
        return (0, last - first) if self.is_alike else (first, last)

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Yield (first, last) of every run of neighbouring stages, after all shorter runs inside that run."""
        for last in range(self.count):
            for first in (0,) if self.is_alike else range(last, -1, -1):
                yield first, last

    # -- the least time ------------------------------------------------------------------------------------------------

    def grid(self, free_bytes: int, slots: int) -> "_Grid":
        """The grid of a table, with about `slots` slots, for a budget of `free_bytes` besides the chain's input."""
        kept_bytes = {self.saved_bytes(i, k) for i, stage in enumerate(self.stages) for k in range(len(stage.options))}
        kept_bytes.update(byte_count for row in self.kept for byte_count in row)
        kept_sizes = np.array(sorted(kept_bytes), dtype=np.float64)
        unit = math.gcd(*(int(byte_count) for byte_count in kept_sizes)) or 1
        slots = 4 * slots if self.is_alike else slots
        if free_bytes // unit <= slots:
            slot_count = free_bytes // unit
            return _Grid(float(unit), slot_count, float(free_bytes - slot_count * unit), slot_count + 1, exact=True)
        # choose, of several grids, the one that rounds this chain's kept sizes most accurately
        slot_counts = np.arange(slots, slots + slots // 5 + 1)
        slot_sizes = kept_sizes[None, :] * (slot_counts[:, None] / free_bytes)
        rounding_errors = (np.abs(np.rint(slot_sizes) - slot_sizes) / slot_counts[:, None]).sum(1)
        slot_count = int(slot_counts[np.argmin(rounding_errors)])
        length = slot_count + 1 + math.ceil(_EXTRA * slot_count)
        return _Grid(free_bytes / slot_count, slot_count, remainder=0.0, length=length, exact=False)


class _Grid(NamedTuple):
    """The free bytes of each slot: remainder + unit * slot.

    Args:
        unit: bytes of a slot.
        budget: number of the slot of the whole budget.
        remainder: bytes of the budget that do not fill a slot.
        length: number of slots in the table.
        exact: whether all kept sizes are whole numbers of slots.
    """

    unit: float
    budget: int
    remainder: float
    length: int
    exact: bool

    def slots_of(self, byte_count: int) -> int:
        """The nearest number of slots to a number of bytes."""
        return round(byte_count / self.unit)

    def first_slot(self, needed_bytes: float) -> int:
        """The first slot with at least `needed_bytes` free."""
        return max(0, math.ceil((needed_bytes - self.remainder) / self.unit - 1e-9))


class _Table:
    """C(s, t, m) for all stages s <= t and slots m; infinite if no plan fits.

    `kept_slots` has the slots of the bytes in `_Problem.kept`. `_rows[s][t - s]` is C(s, t, :); identical stages have
    only `_rows[0]`.
    """

    def __init__(self, problem: _Problem, grid: _Grid) -> None:
        self.problem, self.grid, self.exact = problem, grid, grid.exact
        kept_rows = problem.kept[: 1 if problem.is_alike else None]
        self.kept_slots = [[grid.slots_of(byte_count) for byte_count in row] for row in kept_rows]
        if problem.is_alike:
            self._fill_alike()
        else:
            self._fill()

    def row(self, first: int, last: int) -> CostRow:
        """The row C(first, last, :) of the table."""
        return self._rows[0][last - first] if self.problem.is_alike else self._rows[first][last - first]

    def slots(self) -> Iterator[int]:
        """Slots of the plans to try, the fastest plan first; one slot for each number of seconds."""
        row = self.row(0, self.problem.count - 1)
        for seconds in np.unique(row[np.isfinite(row)]):
            yield int(np.argmax(row <= seconds))  # the least slot of these seconds takes the least memory

    def nodes(self, first: int, last: int, slot: int) -> Nodes:
        """The plan whose cost is C(first, last, slot)."""
        problem, nodes = self.problem, []
        # a choice has the seconds of the rest of the plan and a number for its beginning, as in `_least_choices`
        while first <= last:
            stage, choices = problem.stages[first], []
            for option in range(len(stage.options)):
                slot_after, seconds = slot - self.grid.slots_of(problem.saved_bytes(first, option)), math.inf
                if slot >= self.grid.first_slot(problem.save_need(first, option, last)):
                    if first == last:
                        seconds = problem.save_seconds(first, option)
                    elif slot_after >= 0:
                        seconds = problem.save_seconds(first, option) + float(self.row(first + 1, last)[slot_after])
                choices.append((seconds, -1 - option))
            for cut in range(first + 1, last + 1):
                slot_after = slot - self._slots_kept(first, cut)
                if slot_after < 0 or slot < self._first_slot_to_run(first, cut, last):
                    continue
                rerun_seconds = problem.elapsed[cut] - problem.elapsed[first]
                choices.append((rerun_seconds + self.row(cut, last)[slot_after] + self.row(first, cut - 1)[slot], cut))
            choice = min(choices, key=lambda c: c[0])[1]
            if choice < 0:
                nodes.append(Save(first, -1 - choice))
                slot -= self.grid.slots_of(problem.saved_bytes(first, -1 - choice))
                first += 1
            else:
                nodes.append(Remat(self.nodes(first, choice - 1, slot)))
                slot -= self._slots_kept(first, choice)
                first = choice
        return tuple(nodes)

    def _slots_kept(self, first: int, cut: int) -> int:
        """Slots of the input of stage `cut`, without what the input of stage `first` contains."""
        return self.kept_slots[0 if self.problem.is_alike else first][cut - first - 1]

    def _first_slot_to_run(self, first: int, cut: int, last: int) -> int:
        """The first slot in which stages first..cut-1 can run without keeping values."""
        problem = self.problem
        return self.grid.first_slot(problem.gradient_bytes[last + 1] + problem.run_need[first][cut - first - 1])

    def _best_option_row(self, first: int, last: int) -> CostRow:
        """The cost, by slot, of stages first..last if the first is saved under its best option."""
        problem, grid = self.problem, self.grid
        best_row = np.full(grid.length, np.inf)
        for option in range(len(problem.stages[first].options)):
            saved_slots = grid.slots_of(problem.saved_bytes(first, option))
            seconds = problem.save_seconds(first, option)
            first_slot = grid.first_slot(problem.save_need(first, option, last))
            first_slot = first_slot if first == last else max(first_slot, saved_slots)
            if first_slot < grid.length:
                later_slots = slice(first_slot - saved_slots, grid.length - saved_slots)
                seconds_after = 0.0 if first == last else self.row(first + 1, last)[later_slots]
                np.minimum(best_row[first_slot:], seconds_after + seconds, out=best_row[first_slot:])
        return best_row

    def _shift(self, row: CostRow, slot_count: int) -> CostRow:
        """The row with `slot_count` slots taken away: its costs move up, and the first slots become infinite."""
        shifted = np.full(self.grid.length, np.inf)
        if slot_count < self.grid.length:
            shifted[slot_count:] = row[: self.grid.length - slot_count]
        return shifted

    def _fill(self) -> None:
        """Fill the table of different stages: for each last stage, all first stages from the last one down."""
        problem, grid, count = self.problem, self.grid, self.problem.count
        self._rows = [np.empty((count - first, grid.length)) for first in range(count)]
        workspace = np.empty((count, grid.length))
        # run_needs[s][t]: bytes to run stages s..c-1, besides the input of s and a gradient, for each cut c up to t
        run_needs = [
            [np.array(problem.run_need[first][: last - first], dtype=np.float64) for last in range(count)]
            for first in range(count)
        ]
        for last in range(count):
            # after_cut[c]: C(c, last, m - x(c)), plus the forward seconds from the chain's start to c
            after_cut = np.full((last + 1, grid.length), np.inf)
            for first in range(last, -1, -1):
                costs = self._best_option_row(first, last)
                if last > first:
                    # costs by cut and slot, if the stages before the cut run again
                    cut_rows = workspace[: last - first]
                    if problem.has_passed_bytes:
                        for cut in range(first + 1, last + 1):
                            after_cut[cut] = self._shift(self.row(cut, last), self._slots_kept(first, cut))
                            after_cut[cut] += problem.elapsed[cut]
                    np.add(self._rows[first][: last - first], after_cut[first + 1 :], out=cut_rows)
                    needed_bytes = problem.gradient_bytes[last + 1] + run_needs[first][last] - grid.remainder
                    first_slots = np.ceil(needed_bytes / grid.unit - 1e-9)
                    for index, first_slot in enumerate(first_slots.astype(int).tolist()):
                        cut_rows[index, : max(first_slot, 0)] = np.inf
                    np.minimum(costs, cut_rows.min(0) - problem.elapsed[first], out=costs)
                self._rows[first][last - first] = costs
                if not problem.has_passed_bytes and first:
                    after_cut[first] = self._shift(costs, self._slots_kept(first - 1, first)) + problem.elapsed[first]

    def _fill_alike(self) -> None:
        """Fill the table of identical stages in order of the number of stages, `last` + 1."""
        problem, grid, count = self.problem, self.grid, self.problem.count
        self._rows = [np.empty((count, grid.length))]
        # rows[n - 1]: C of n stages; after_cut[n - 1]: the same with the slots of their input taken away
        rows = self._rows[0]
        after_cut = np.empty((count, grid.length))
        workspace = np.empty((count, grid.length))
        stage_slots, stage_seconds = self.kept_slots[0][0], problem.stages[0].forward_seconds
        forward_seconds = stage_seconds * np.arange(1, count + 1)[:, None]
        for last in range(count):
            costs = self._best_option_row(0, last)
            if last:
                cut_rows = workspace[:last]
                # segments of 1, 2, .. stages, and the stages after each
                np.add(rows[:last], after_cut[last - 1 :: -1], out=cut_rows)
                cut_rows += forward_seconds[:last]
                for index in range(last):
                    cut_rows[index, : self._first_slot_to_run(0, index + 1, last)] = np.inf
                np.minimum(costs, cut_rows.min(0), out=costs)
            rows[last] = costs
            after_cut[last] = self._shift(costs, stage_slots)
