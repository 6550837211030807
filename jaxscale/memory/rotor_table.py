"""Rotor: the fastest plan of a chain of different stages within a budget of bytes.

Dynamic programming over (first stage, last stage, free bytes) after Beaumont et al. 2019 (arXiv:1911.13214), with a
menu of ways to keep each stage as in Rockmate (Zhao et al. 2023, arXiv:2307.01236):

    C(s, t, m) = least seconds to run stages s..t forward and backward when the input of s is kept and m bytes are free
               = min over options o of s   time(o) + C(s + 1, t, m - kept(o))
                     and segments s..c-1   forward(s..c-1) + C(c, t, m - x(c)) + C(s, c-1, m)

where time(o) and kept(o) are the seconds and the kept bytes of stage s under option o, and x(c) are the bytes of the
input of c. The cut c is the first stage after a segment that runs again.

A budget limits either the bytes kept for a later backward pass (`kept`, as elsewhere in this package) or, as in the
papers, all bytes alive at any time (`alive`), which include gradients and the working memory of the running stage.

Free bytes are counted in slots of a grid. The grid is exact if all kept sizes are multiples of one unit and the budget
has few enough units. Otherwise kept sizes are rounded to the nearest number of slots, plans are tried in order,
starting with the fastest, and the first plan with true bytes (`chain.simulate`) within the budget is returned. Errors
of rounding to the nearest number partly cancel; errors of rounding up would add up. Identical stages need a table by
number of stages instead of one by (first stage, last stage).

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
"""The bytes that a budget limits: all live bytes at any time, or only those kept for a backward pass."""
_EXTRA_SLOT_SHARE = 0.01
"""Slots beyond the budget, as a share of the budget's slots, for plans that exceed it only because of rounding."""


@dataclasses.dataclass(frozen=True)
class ChainPlan:
    """A plan of a chain, and its cost.

    Args:
        nodes: the plan of the chain.
        seconds: seconds of the forward and the backward pass, as `chain.simulate` returns them.
        peak_bytes: largest number of live bytes at any time, the chain's input included.
        kept_bytes: largest number of bytes kept for a backward pass at any time, the chain's input included.
        exact: whether the plan is certain to be the fastest within the budget; false if sizes were rounded.
    """

    nodes: Nodes
    seconds: float
    peak_bytes: int
    kept_bytes: int
    exact: bool


def rotor(
    stages: Sequence[Stage], input_bytes: int, budget: int, *, slots: int = 2000, bound: Bound = "alive"
) -> ChainPlan:
    """Return the fastest plan of a chain within a budget of bytes.

    Args:
        stages: costs of the chain's stages.
        input_bytes: bytes of the first stage's input.
        budget: largest number of bytes, `input_bytes` included.
        slots: number of slots of the grid if sizes are not multiples of one unit.
        bound: which bytes the budget limits: all live bytes, or only the kept ones.

    Raises:
        UserError: no plan fits; the message gives the least possible budget, and what would lower it.

    Example:
        >>> stages = [Stage(1.0, 2.0, 1)] * 4
        >>> plan = rotor(stages, 1, 6)
        >>> plan.seconds, plan.peak_bytes, plan.exact
        (14.0, 6, True)
        >>> rotor(stages, 1, 3, bound="kept").seconds
        14.0
    """
    problem = _Problem(tuple(stages), input_bytes, bound)
    least_bytes = problem.least_bytes()
    if budget < least_bytes:
        raise _budget_error(problem, budget, least_bytes)
    table = _Table(problem, problem.grid(budget - input_bytes, slots))
    for slot in table.slots_to_try():
        nodes = table.nodes(0, problem.stage_count - 1, slot)
        cost = simulate(nodes, stages, input_bytes)
        if problem.limited_bytes(cost) <= budget:
            seconds = float(table.row(0, problem.stage_count - 1)[slot])
            return ChainPlan(nodes, seconds, cost.peak_bytes, cost.kept_bytes, exact=table.is_exact)
    # the budget is so close to the least possible that no plan of the rounded table is within it
    nodes = problem.least_nodes(0, problem.stage_count - 1)
    cost = simulate(nodes, stages, input_bytes)
    return ChainPlan(nodes, cost.seconds, cost.peak_bytes, cost.kept_bytes, exact=False)


def least_budget(stages: Sequence[Stage], input_bytes: int, bound: Bound = "alive") -> int:
    """Return the least budget, in bytes, with which a chain can run forward and backward.

    Example:
        >>> least_budget([Stage(1.0, 2.0, 1)] * 4, 1)
        5
        >>> least_budget([Stage(1.0, 2.0, 1)] * 4, 1, "kept")
        2
    """
    return _Problem(tuple(stages), input_bytes, bound).least_bytes()


def _budget_error(problem: "_Problem", budget: int, least_bytes: int) -> UserError:
    """Return the error for a budget that is smaller than the least possible budget."""
    least_bytes_by_stage = [
        min(problem.save_need_bytes(index, option, index) for option in range(len(stage.options))) + input_bytes
        for index, (stage, input_bytes) in enumerate(zip(problem.stages, problem.edge_bytes, strict=False))
    ]
    largest_stage_index = max(range(problem.stage_count), key=least_bytes_by_stage.__getitem__)
    return UserError(
        f"a budget of {bytes_text(budget)} ({problem.bound}) is too low for {problem.stage_count} stages: the least "
        f"possible is {bytes_at_least(least_bytes)}, and stage {largest_stage_index} alone takes "
        f"{bytes_at_least(least_bytes_by_stage[largest_stage_index])}; more microbatches, a smaller batch, or "
        "splitting that stage in two would lower it"
    )


class _Problem:
    """The costs of a chain's stages, indexed by stage.

    The first node of a plan of stages first..last (indices, both included) has a code: -1 - option for the `Save` of
    stage first under that option, and the cut c for the `Remat` of stages first..c-1.

    Attributes:
        stages, input_bytes, bound: the arguments; there are `stage_count` stages.
        edge_bytes: bytes of each stage's input, then of the last stage's output.
        elapsed_seconds: for each stage, the forward seconds of the stages before it; then those of all stages.
        is_uniform: whether all stages are identical.
        has_passed_bytes: whether a stage passes on arrays of its input.
        gradient_bytes: for each entry of `edge_bytes`, the bytes of the array's gradient; 0 if the budget limits only
            kept bytes.
        bytes_beyond_input_table: bytes_beyond_input_table[s][c - s - 1] are the bytes of the input of c that the input
            of s does not contain.
        run_need_bytes: run_need_bytes[s][c - s - 1] are the bytes needed to run stages s..c-1 without keeping values.
            They include the output of stage c-1, but not the input of s or a gradient. 0 if the budget limits only kept
            bytes.
    """

    def __init__(self, stages: tuple[Stage, ...], input_bytes: int, bound: Bound) -> None:
        if not stages:
            raise UserError("chain: got no stages, expected at least one")
        self.stages, self.input_bytes, self.stage_count, self.bound = stages, input_bytes, len(stages), bound
        self.edge_bytes = [input_bytes, *(stage.output_bytes for stage in stages)]
        self.elapsed_seconds = np.concatenate([[0.0], np.cumsum([stage.forward_seconds for stage in stages])])
        self.is_uniform = len(set(stages)) == 1 and input_bytes == stages[0].output_bytes
        self.has_passed_bytes = any(stage.passed_bytes for stage in stages)
        self.gradient_bytes = self.edge_bytes if bound == "alive" else [0] * len(self.edge_bytes)
        self.bytes_beyond_input_table: list[list[int]] = []
        self.run_need_bytes: list[list[int]] = []
        for start in range(self.stage_count if not self.is_uniform else 1):
            bytes_beyond_input_row, need_bytes_row, passed_bytes = [], [], math.inf
            run_peak_bytes, bytes_beyond_input = 0, 0
            for index in range(start, self.stage_count):
                stage = stages[index]
                passed_bytes = min(passed_bytes, stage.passed_bytes)
                run_peak_bytes = max(
                    run_peak_bytes, bytes_beyond_input + stage.output_bytes - stage.passed_bytes + stage.working_bytes
                )
                bytes_beyond_input = stage.output_bytes - int(passed_bytes)
                bytes_beyond_input_row.append(bytes_beyond_input)
                need_bytes_row.append(run_peak_bytes if bound == "alive" else 0)
            self.bytes_beyond_input_table.append(bytes_beyond_input_row)
            self.run_need_bytes.append(need_bytes_row)
        if self.is_uniform:
            self.bytes_beyond_input_table *= self.stage_count
            self.run_need_bytes *= self.stage_count

    def limited_bytes(self, cost: ChainCost) -> int:
        """Return the bytes of a plan with this cost that the budget limits: the peak bytes or the kept bytes."""
        return cost.peak_bytes if self.bound == "alive" else cost.kept_bytes

    def saved_bytes(self, index: int, option: int) -> int:
        """Return the bytes that stage `index` keeps for its backward pass: with its output, without its input."""
        return self.stages[index].options[option].kept_bytes + self.bytes_beyond_input_table[index][0]

    def save_need_bytes(self, index: int, option: int, last: int) -> int:
        """Return the bytes that stages index..last need, without their input, while stage `index` runs and is saved."""
        stage = self.stages[index]
        if self.bound == "kept":
            return self.saved_bytes(index, option) if index < last else stage.options[option].kept_bytes
        forward_bytes = self.edge_bytes[last + 1] + stage.working_bytes
        backward_bytes = (
            self.edge_bytes[index] + stage.output_bytes - stage.passed_bytes + stage.options[option].working_bytes
        )
        return self.saved_bytes(index, option) + max(forward_bytes, backward_bytes)

    def save_seconds(self, index: int, option: int) -> float:
        """Return the seconds of the forward and backward pass of stage `index` under an option."""
        stage = self.stages[index]
        return stage.forward_seconds + stage.backward_seconds + stage.options[option].extra_seconds

    # -- the least memory ----------------------------------------------------------------------------------------------

    def least_bytes(self) -> int:
        """Return the fewest bytes that any plan of the chain needs, the chain's input included."""
        if not hasattr(self, "_bytes_and_code_by_span"):
            # for the span of stages first..last: its least bytes, and the code of its plan's first node
            self._bytes_and_code_by_span: dict[tuple[int, int], tuple[int, int]] = {}
            for first, last in self._spans():
                bytes_and_codes = self._least_choices(first, last)
                self._bytes_and_code_by_span[self._span_key(first, last)] = min(
                    bytes_and_codes, key=lambda bytes_and_code: bytes_and_code[0]
                )
        return self.input_bytes + self._least_bytes_of(0, self.stage_count - 1)

    def _least_choices(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield a pair (least bytes, node's code) for each possible first node of a plan of stages first..last."""
        for option in range(len(self.stages[first].options)):
            later_bytes = self.saved_bytes(first, option) + self._least_bytes_of(first + 1, last) if first < last else 0
            yield max(self.save_need_bytes(first, option, last), later_bytes), -1 - option
        for cut in range(first + 1, last + 1):
            run_peak_bytes = self.gradient_bytes[last + 1] + self.run_need_bytes[first][cut - first - 1]
            later_bytes = self.bytes_beyond_input_table[first][cut - first - 1] + self._least_bytes_of(cut, last)
            yield max(run_peak_bytes, later_bytes, self._least_bytes_of(first, cut - 1)), cut

    def least_nodes(self, first: int, last: int) -> Nodes:
        """Return the plan of stages first..last that needs the least memory."""
        self.least_bytes()  # fills `_bytes_and_code_by_span` at its first call
        if first > last:
            return ()
        _, code = self._bytes_and_code_by_span[self._span_key(first, last)]
        if code < 0:
            return (Save(first, -1 - code), *self.least_nodes(first + 1, last))
        cut = code - self._span_key(first, last)[0] + first
        return (Remat(self.least_nodes(first, cut - 1)), *self.least_nodes(cut, last))

    def _least_bytes_of(self, first: int, last: int) -> int:
        """Return the fewest bytes that stages first..last need, without their input; 0 if there are no stages."""
        return self._bytes_and_code_by_span[self._span_key(first, last)][0] if first <= last else 0

    def _span_key(self, first: int, last: int) -> tuple[int, int]:
        """Return the key of stages first..last in `_bytes_and_code_by_span`, by their number if all are identical."""
        return (0, last - first) if self.is_uniform else (first, last)

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Yield the first and last stage of every span of neighboring stages, after all shorter spans inside it."""
        for last in range(self.stage_count):
            for first in (0,) if self.is_uniform else range(last, -1, -1):
                yield first, last

    # -- the least time ------------------------------------------------------------------------------------------------

    def grid(self, free_bytes: int, target_slot_count: int) -> "_Grid":
        """Return a grid of about `target_slot_count` slots for a table.

        The grid is for a budget of `free_bytes` in addition to the chain's input. Identical stages need a smaller
        table, so their grid has about four times as many slots.
        """
        distinct_byte_counts = {
            self.saved_bytes(index, option)
            for index, stage in enumerate(self.stages)
            for option in range(len(stage.options))
        }
        distinct_byte_counts.update(byte_count for row in self.bytes_beyond_input_table for byte_count in row)
        kept_byte_counts = np.array(sorted(distinct_byte_counts), dtype=np.float64)
        unit_bytes = math.gcd(*(int(byte_count) for byte_count in kept_byte_counts)) or 1
        least_slot_count = 4 * target_slot_count if self.is_uniform else target_slot_count
        if free_bytes // unit_bytes <= least_slot_count:
            slot_count = free_bytes // unit_bytes
            return _Grid(float(unit_bytes), float(free_bytes - slot_count * unit_bytes), slot_count + 1, is_exact=True)
        # choose, of several grids, the one that rounds this chain's kept sizes most accurately
        slot_counts = np.arange(least_slot_count, least_slot_count + least_slot_count // 5 + 1)
        sizes_in_slots = kept_byte_counts[None, :] * (slot_counts[:, None] / free_bytes)
        rounding_errors = (np.abs(np.rint(sizes_in_slots) - sizes_in_slots) / slot_counts[:, None]).sum(1)
        slot_count = int(slot_counts[np.argmin(rounding_errors)])
        grid_length = slot_count + 1 + math.ceil(_EXTRA_SLOT_SHARE * slot_count)
        return _Grid(free_bytes / slot_count, remainder=0.0, length=grid_length, is_exact=False)


class _Grid(NamedTuple):
    """The numbers of free bytes for which a table has costs: slot i stands for remainder + unit * i bytes.

    Args:
        unit: bytes of a slot.
        remainder: bytes of the budget that do not fill a slot.
        length: number of slots in the table.
        is_exact: whether all kept sizes are multiples of the unit.
    """

    unit: float
    remainder: float
    length: int
    is_exact: bool

    def slot_count_of(self, byte_count: int) -> int:
        """Return the number of slots that is nearest to a number of bytes."""
        return round(byte_count / self.unit)

    def first_slot(self, needed_bytes: float) -> int:
        """Return the index of the first slot that stands for at least `needed_bytes` free bytes."""
        return max(0, math.ceil((needed_bytes - self.remainder) / self.unit - 1e-9))


class _Table:
    """C(s, t, m) in seconds for all stages s <= t and slots m; infinite if no plan fits.

    Attributes:
        problem, grid: the arguments.
        is_exact: whether the table's plans are certain to be the fastest.
        new_slot_counts: the bytes in `problem.bytes_beyond_input_table` as numbers of slots; only the first row for
            identical stages.
        _rows: _rows[s][t - s] is C(s, t, :), a float array of shape (slots,); only _rows[0] for identical stages.
    """

    def __init__(self, problem: _Problem, grid: _Grid) -> None:
        self.problem, self.grid, self.is_exact = problem, grid, grid.is_exact
        byte_rows = problem.bytes_beyond_input_table[: 1 if problem.is_uniform else None]
        self.new_slot_counts = [[grid.slot_count_of(byte_count) for byte_count in row] for row in byte_rows]
        if problem.is_uniform:
            self._fill_uniform()
        else:
            self._fill()

    def row(self, first: int, last: int) -> CostRow:
        """Return the row C(first, last, :) of the table."""
        return self._rows[0][last - first] if self.problem.is_uniform else self._rows[first][last - first]

    def slots_to_try(self) -> Iterator[int]:
        """Yield the index of a slot for each distinct cost of a plan for the whole chain, the least cost first."""
        row = self.row(0, self.problem.stage_count - 1)
        for seconds in np.unique(row[np.isfinite(row)]):
            yield int(np.argmax(row <= seconds))  # of the slots with this cost, the first takes the least memory

    def nodes(self, first: int, last: int, slot: int) -> Nodes:
        """Return the plan of stages first..last that costs C(first, last, slot)."""
        problem, nodes = self.problem, []
        while first <= last:
            # of each possible first node: the seconds of the plan, and the node's code
            stage, seconds_and_codes = problem.stages[first], []
            for option in range(len(stage.options)):
                later_slot, seconds = slot - self.grid.slot_count_of(problem.saved_bytes(first, option)), math.inf
                if slot >= self.grid.first_slot(problem.save_need_bytes(first, option, last)):
                    if first == last:
                        seconds = problem.save_seconds(first, option)
                    elif later_slot >= 0:
                        seconds = problem.save_seconds(first, option) + float(self.row(first + 1, last)[later_slot])
                seconds_and_codes.append((seconds, -1 - option))
            for cut in range(first + 1, last + 1):
                later_slot = slot - self._new_slot_count(first, cut)
                if later_slot < 0 or slot < self._first_slot_to_run(first, cut, last):
                    continue
                run_seconds = problem.elapsed_seconds[cut] - problem.elapsed_seconds[first]
                seconds_and_codes.append(
                    (run_seconds + self.row(cut, last)[later_slot] + self.row(first, cut - 1)[slot], cut)
                )
            _, code = min(seconds_and_codes, key=lambda seconds_and_code: seconds_and_code[0])
            if code < 0:
                nodes.append(Save(first, -1 - code))
                slot -= self.grid.slot_count_of(problem.saved_bytes(first, -1 - code))
                first += 1
            else:
                nodes.append(Remat(self.nodes(first, code - 1, slot)))
                slot -= self._new_slot_count(first, code)
                first = code
        return tuple(nodes)

    def _new_slot_count(self, first: int, cut: int) -> int:
        """Return the slots for the arrays in the input of stage `cut` that the input of stage `first` does not have."""
        return self.new_slot_counts[0 if self.problem.is_uniform else first][cut - first - 1]

    def _first_slot_to_run(self, first: int, cut: int, last: int) -> int:
        """Return the index of the first slot in which stages first..cut-1 can run without keeping values."""
        problem = self.problem
        return self.grid.first_slot(problem.gradient_bytes[last + 1] + problem.run_need_bytes[first][cut - first - 1])

    def _best_option_row(self, first: int, last: int) -> CostRow:
        """Return the cost of stages first..last by slot; the first stage is saved under the best option per slot."""
        problem, grid = self.problem, self.grid
        best_row = np.full(grid.length, np.inf)
        for option in range(len(problem.stages[first].options)):
            saved_slot_count = grid.slot_count_of(problem.saved_bytes(first, option))
            seconds = problem.save_seconds(first, option)
            first_slot = grid.first_slot(problem.save_need_bytes(first, option, last))
            first_slot = first_slot if first == last else max(first_slot, saved_slot_count)
            if first_slot < grid.length:
                later_slots = slice(first_slot - saved_slot_count, grid.length - saved_slot_count)
                later_seconds = 0.0 if first == last else self.row(first + 1, last)[later_slots]
                np.minimum(best_row[first_slot:], later_seconds + seconds, out=best_row[first_slot:])
        return best_row

    def _shift(self, row: CostRow, slot_count: int) -> CostRow:
        """Return a row of costs after `slot_count` slots are taken: shifted to higher slots, infinite in the first."""
        shifted_row = np.full(self.grid.length, np.inf)
        if slot_count < self.grid.length:
            shifted_row[slot_count:] = row[: self.grid.length - slot_count]
        return shifted_row

    def _fill(self) -> None:
        """Fill the table of different stages: for each last stage, in decreasing order of the first stage."""
        problem, grid, stage_count = self.problem, self.grid, self.problem.stage_count
        self._rows = [np.empty((stage_count - first, grid.length)) for first in range(stage_count)]
        workspace = np.empty((stage_count, grid.length))
        # run_need_rows[s][t]: row s of `problem.run_need_bytes` as an array, up to the cut t
        run_need_rows = [
            [np.array(problem.run_need_bytes[first][: last - first], dtype=np.float64) for last in range(stage_count)]
            for first in range(stage_count)
        ]
        for last in range(stage_count):
            # after_cut_rows[c] is C(c, last, m - x(c)), by slot m, plus the forward seconds from the chain's start to c
            after_cut_rows = np.full((last + 1, grid.length), np.inf)
            for first in range(last, -1, -1):
                cost_row = self._best_option_row(first, last)
                if last > first:
                    # costs by cut and slot if the stages before the cut run again
                    cut_rows = workspace[: last - first]
                    if problem.has_passed_bytes:
                        for cut in range(first + 1, last + 1):
                            after_cut_rows[cut] = self._shift(self.row(cut, last), self._new_slot_count(first, cut))
                            after_cut_rows[cut] += problem.elapsed_seconds[cut]
                    np.add(self._rows[first][: last - first], after_cut_rows[first + 1 :], out=cut_rows)
                    needed_bytes = problem.gradient_bytes[last + 1] + run_need_rows[first][last] - grid.remainder
                    first_slots = np.ceil(needed_bytes / grid.unit - 1e-9)
                    for cut_index, first_slot in enumerate(first_slots.astype(int).tolist()):
                        cut_rows[cut_index, : max(first_slot, 0)] = np.inf
                    np.minimum(cost_row, cut_rows.min(0) - problem.elapsed_seconds[first], out=cost_row)
                self._rows[first][last - first] = cost_row
                if not problem.has_passed_bytes and first:
                    after_cut_rows[first] = (
                        self._shift(cost_row, self._new_slot_count(first - 1, first)) + problem.elapsed_seconds[first]
                    )

    def _fill_uniform(self) -> None:
        """Fill the table of identical stages in order of the number of stages, `last` + 1."""
        problem, grid, stage_count = self.problem, self.grid, self.problem.stage_count
        self._rows = [np.empty((stage_count, grid.length))]
        # rows[n - 1] is C of n stages by slot; after_cut_rows[n - 1] is that row if their input takes slots, too
        rows = self._rows[0]
        after_cut_rows = np.empty((stage_count, grid.length))
        workspace = np.empty((stage_count, grid.length))
        input_slot_count, stage_seconds = self.new_slot_counts[0][0], problem.stages[0].forward_seconds
        segment_seconds = stage_seconds * np.arange(1, stage_count + 1)[:, None]  # by number of stages in a segment
        for last in range(stage_count):
            cost_row = self._best_option_row(0, last)
            if last:
                cut_rows = workspace[:last]
                # a first segment of 1, 2, .. stages, and the stages after it
                np.add(rows[:last], after_cut_rows[last - 1 :: -1], out=cut_rows)
                cut_rows += segment_seconds[:last]
                for cut_index in range(last):
                    cut_rows[cut_index, : self._first_slot_to_run(0, cut_index + 1, last)] = np.inf
                np.minimum(cost_row, cut_rows.min(0), out=cost_row)
            rows[last] = cost_row
            after_cut_rows[last] = self._shift(cost_row, input_slot_count)
