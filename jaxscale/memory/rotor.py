"""Rotor: the plan of a chain of unlike stages that takes the least time within a budget of bytes.

Dynamic programming over (first stage, last stage, free bytes) after Beaumont et al. 2019 (arXiv:1911.13214), with a
menu of ways to keep each stage as in Rockmate (Zhao et al. 2023, arXiv:2307.01236):

    C(s, t, m) = least seconds to run stages s..t forward and backward when what enters s is kept and m bytes are free
               = min over options o of s   time(o) + C(s + 1, t, m - kept(o))
                     and segments s..c-1   forward(s..c-1) + C(c, t, m - x(c)) + C(s, c-1, m)

A budget bounds either what is kept for a backward pass to come (`kept`, the meaning that budgets have everywhere else),
or, as in the papers, all that is alive at any time (`alive`): then gradients and what the stage at work needs take room
too.

Free bytes lie on a grid. Where all that is kept comes in multiples of one unit, and the budget has few enough of them,
the grid is exact. Else what is kept is rounded to the nearest slot, plans are read from the table from the top down,
and the first whose true bytes (`chain.simulate`) are within the budget is taken: errors cancel, where rounding up would
add them. Alike stages need one table by length instead of one by (first, last).

Left out: plans that keep a value beyond its segment (non-persistent), and offload, which `memory/selectors.py` has.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxscale.errors import UserError
from jaxscale.memory.chain import ChainCost, Nodes, Remat, Save, Stage, simulate
from jaxscale.values.byte_sizes import bytes_at_least, bytes_text

Row = np.ndarray
Bound = Literal["alive", "kept"]
"""What a budget bounds: all bytes at any time, or those that wait for a backward pass."""
_EXTRA = 0.01  # of the grid lies beyond the budget: sizes that were rounded up can make a plan look too large


@dataclasses.dataclass(frozen=True)
class ChainPlan:
    """What `rotor` found.

    Args:
        nodes: the plan.
        seconds: of the forward and the backward pass, as the table says; `chain.simulate` says the same.
        peak_bytes: most bytes at any time, the chain's input included.
        kept_bytes: most bytes that wait for a backward pass at any time, likewise.
        exact: whether no plan is faster within the budget; else sizes were rounded to the grid.
    """

    nodes: Nodes
    seconds: float
    peak_bytes: int
    kept_bytes: int
    exact: bool


def rotor(
    stages: Sequence[Stage], input_bytes: int, budget: int, *, slots: int = 2000, bound: Bound = "alive"
) -> ChainPlan:
    """The plan of least time within a budget.

    Args:
        stages: of the chain.
        input_bytes: of what enters the first stage.
        budget: bytes, `input_bytes` included.
        slots: fineness of the grid, where sizes have no common unit.
        bound: what the budget bounds.

    Raises:
        UserError: no plan fits; the message tells the least budget that does, and what would lower it.

    Example:
        >>> alike = [Stage(1.0, 2.0, 1)] * 4
        >>> found = rotor(alike, 1, 6)
        >>> found.seconds, found.peak_bytes, found.exact
        (14.0, 6, True)
        >>> rotor(alike, 1, 3, bound="kept").seconds
        14.0
    """
    problem = _Problem(tuple(stages), input_bytes, bound)
    least = problem.least()
    if budget < least:
        raise _infeasible(problem, budget, least)
    table = problem.table(budget - input_bytes, slots)
    for slot in table.slots():
        nodes = table.nodes(0, problem.count - 1, slot)
        cost = simulate(nodes, stages, input_bytes)
        if problem.bounded(cost) <= budget:
            seconds = float(table.row(0, problem.count - 1)[slot])
            return ChainPlan(nodes, seconds, cost.peak_bytes, cost.kept_bytes, table.exact)
    # so near the least that rounding to nearest finds nothing
    nodes = problem.least_nodes(0, problem.count - 1)
    cost = simulate(nodes, stages, input_bytes)
    return ChainPlan(nodes, cost.seconds, cost.peak_bytes, cost.kept_bytes, False)


def least_budget(stages: Sequence[Stage], input_bytes: int, bound: Bound = "alive") -> int:
    """The least bytes within which a chain can be run forward and backward, exactly.

    Example:
        >>> least_budget([Stage(1.0, 2.0, 1)] * 4, 1)
        5
        >>> least_budget([Stage(1.0, 2.0, 1)] * 4, 1, "kept")
        2
    """
    return _Problem(tuple(stages), input_bytes, bound).least()


def _infeasible(problem: "_Problem", budget: int, least: int) -> UserError:
    needs = [min(problem.save_need(at, o, at) for o in range(len(s.options))) for at, s in enumerate(problem.stages)]
    alone = [need + given for need, given in zip(needs, problem.x, strict=False)]
    at = max(range(problem.count), key=alone.__getitem__)
    said = "kept and alive" if problem.bound == "alive" else "kept"
    return UserError(
        f"a budget of {bytes_text(budget)} {said} for a chain of {problem.count} stages: the least possible is "
        f"{bytes_at_least(least)}, of which stage {at} alone takes {bytes_at_least(alone[at])}; "
        "more microbatches, a smaller batch, or a cut of that stage in two would lower it"
    )


class _Problem:
    """A chain's costs as arrays: x[i] is what enters stage i, x[L] what leaves the last."""

    def __init__(self, stages: tuple[Stage, ...], input_bytes: int, bound: Bound) -> None:
        if not stages:
            raise UserError("a chain of no stages: expected at least one")
        self.stages, self.input_bytes, self.count, self.bound = stages, input_bytes, len(stages), bound
        self.x = [input_bytes, *(stage.output_bytes for stage in stages)]
        self.elapsed = np.concatenate([[0.0], np.cumsum([stage.forward_seconds for stage in stages])])
        self.alike = len(set(stages)) == 1 and input_bytes == stages[0].output_bytes
        self.passes = any(stage.passed_bytes for stage in stages)
        # bytes of the gradient of x[i]
        self.gradients = self.x if bound == "alive" else [0] * len(self.x)
        # kept[s][c - s - 1]: bytes of x[c] that x[s] does not hold
        # run_need[s][c - s - 1]: beside x[s] and a gradient, to run s..c-1 keeping x[c] alone
        self.kept: list[list[int]] = []
        self.run_need: list[list[int]] = []
        for start in range(self.count if not self.alike else 1):
            kept, needs, shared, need, before = [], [], math.inf, 0, 0
            for index in range(start, self.count):
                stage = stages[index]
                shared = min(shared, stage.passed_bytes)
                need = max(need, before + stage.output_bytes - stage.passed_bytes + stage.working_bytes)
                before = stage.output_bytes - int(shared)
                kept.append(before)
                needs.append(need if bound == "alive" else 0)
            self.kept.append(kept)
            self.run_need.append(needs)
        if self.alike:
            self.kept, self.run_need = self.kept * self.count, self.run_need * self.count

    def bounded(self, cost: ChainCost) -> int:
        """Of what a plan costs the bytes that the budget bounds."""
        return cost.peak_bytes if self.bound == "alive" else cost.kept_bytes

    def saved(self, stage: int, option: int) -> int:
        """Bytes beside its input while a stage waits for its backward pass."""
        return self.stages[stage].options[option].kept_bytes + self.kept[stage][0]

    def save_need(self, stage: int, option: int, last: int) -> int:
        """Bytes beside its input that a stage takes forward and backward when stages up to `last` follow."""
        one = self.stages[stage]
        if self.bound == "kept":
            return self.saved(stage, option) if stage < last else one.options[option].kept_bytes
        forward = self.x[last + 1] + one.working_bytes
        backward = self.x[stage] + one.output_bytes - one.passed_bytes + one.options[option].working_bytes
        return self.saved(stage, option) + max(forward, backward)

    def save_seconds(self, stage: int, option: int) -> float:
        """Seconds of a stage forward and backward."""
        one = self.stages[stage]
        return one.forward_seconds + one.backward_seconds + one.options[option].extra_seconds

    # -- the least memory ----------------------------------------------------------------------------------------------

    def least(self) -> int:
        """Least bytes at the peak of any plan."""
        if not hasattr(self, "_least"):
            self._least: dict[tuple[int, int], tuple[int, int]] = {}
            for first, last in self._spans():
                choices = [
                    (
                        max(
                            self.save_need(first, o, last),
                            self.saved(first, o) + self._least_of(first + 1, last) if first < last else 0,
                        ),
                        -1 - o,
                    )
                    for o in range(len(self.stages[first].options))
                ]
                choices += [
                    (
                        max(
                            self.gradients[last + 1] + self.run_need[first][c - first - 1],
                            self.kept[first][c - first - 1] + self._least_of(c, last),
                            self._least_of(first, c - 1),
                        ),
                        c,
                    )
                    for c in range(first + 1, last + 1)
                ]
                self._least[self._key(first, last)] = min(choices, key=lambda choice: choice[0])
        return self.input_bytes + self._least_of(0, self.count - 1)

    def least_nodes(self, first: int, last: int) -> Nodes:
        """A plan of the least memory."""
        self.least()
        if first > last:
            return ()
        choice = self._least[self._key(first, last)][1]
        if choice < 0:
            return (Save(first, -1 - choice), *self.least_nodes(first + 1, last))
        cut = choice - self._key(first, last)[0] + first
        return (Remat(self.least_nodes(first, cut - 1)), *self.least_nodes(cut, last))

    def _least_of(self, first: int, last: int) -> int:
        return self._least[self._key(first, last)][0] if first <= last else 0

    def _key(self, first: int, last: int) -> tuple[int, int]:
        return (0, last - first) if self.alike else (first, last)

    def _spans(self) -> Iterator[tuple[int, int]]:
        for last in range(self.count):
            for first in (0,) if self.alike else range(last, -1, -1):
                yield first, last

    # -- the least time ------------------------------------------------------------------------------------------------

    def table(self, free: int, slots: int) -> "_Table":
        """The solved table for so many free bytes beside the chain's input."""
        grid = self._grid(free, slots)
        return _Table(self, grid)

    def _grid(self, free: int, slots: int) -> "_Grid":
        carried = np.array(
            sorted(
                {self.saved(s, o) for s, stage in enumerate(self.stages) for o in range(len(stage.options))}
                | {bytes_ for row in self.kept for bytes_ in row}
            ),
            dtype=np.float64,
        )
        unit = math.gcd(*(int(size) for size in carried)) or 1
        slots = 4 * slots if self.alike else slots
        if free // unit <= slots:
            count = free // unit
            return _Grid(float(unit), count, float(free - count * unit), count + 1, True)
        # of several finenesses the one whose rounding is least wrong for what this chain keeps
        counts = np.arange(slots, slots + slots // 5 + 1)
        in_slots = carried[None, :] * (counts[:, None] / free)
        wrong = (np.abs(np.rint(in_slots) - in_slots) / counts[:, None]).sum(1)
        count = int(counts[np.argmin(wrong)])
        return _Grid(free / count, count, 0.0, count + 1 + math.ceil(_EXTRA * count), False)


class _Grid(NamedTuple):
    """Free bytes by slot: rest + unit * slot.

    Args:
        unit: bytes of a slot.
        budget: slot of the whole budget.
        rest: bytes that fill no slot.
        length: slots of the table, from 0.
        exact: whether what is kept comes in whole slots.
    """

    unit: float
    budget: int
    rest: float
    length: int
    exact: bool

    def size(self, count: int) -> int:
        """Bytes that are kept, in slots."""
        return round(count / self.unit)

    def first(self, need: float) -> int:
        """The first slot that has so many free bytes."""
        return max(0, math.ceil((need - self.rest) / self.unit - 1e-9))


class _Table:
    """C(s, t, m) for all stages s <= t and slots m; infinite where nothing fits."""

    def __init__(self, problem: _Problem, grid: _Grid) -> None:
        self.problem, self.grid, self.exact = problem, grid, grid.exact
        self.sizes = [[grid.size(kept) for kept in row] for row in problem.kept[: 1 if problem.alike else None]]
        if problem.alike:
            self._fill_alike()
        else:
            self._fill()

    def row(self, first: int, last: int) -> Row:
        """C(first, last, :)."""
        return self._rows[0][last - first] if self.problem.alike else self._rows[first][last - first]

    def slots(self) -> Iterator[int]:
        """Slots from which to read a plan, the cheapest plan first; one for each cost."""
        row = self.row(0, self.problem.count - 1)
        before = -1.0
        for slot in range(len(row) - 1, -1, -1):
            if not np.isfinite(row[slot]):
                return
            if row[slot] != before:
                before = float(row[slot])
                # the least slot of this cost takes the least memory
                yield int(np.argmax(row <= before))

    def nodes(self, first: int, last: int, slot: int) -> Nodes:
        """The plan that C(first, last, slot) is the cost of."""
        problem, nodes = self.problem, []
        while first <= last:
            stage, cost = problem.stages[first], []
            for option in range(len(stage.options)):
                after = slot - self.grid.size(problem.saved(first, option))
                fits = slot >= self.grid.first(problem.save_need(first, option, last))
                fits = fits and (after >= 0 or first == last)
                behind = 0.0 if first == last else float(self.row(first + 1, last)[after]) if fits else math.inf
                cost.append((problem.save_seconds(first, option) + behind if fits else math.inf, -1 - option))
            for cut in range(first + 1, last + 1):
                after = slot - self._size(first, cut)
                if after < 0 or slot < self._run_first(first, cut, last):
                    continue
                forward = problem.elapsed[cut] - problem.elapsed[first]
                cost.append((forward + self.row(cut, last)[after] + self.row(first, cut - 1)[slot], cut))
            choice = min(cost, key=lambda c: c[0])[1]
            if choice < 0:
                nodes.append(Save(first, -1 - choice))
                slot -= self.grid.size(problem.saved(first, -1 - choice))
                first += 1
            else:
                nodes.append(Remat(self.nodes(first, choice - 1, slot)))
                slot -= self._size(first, choice)
                first = choice
        return tuple(nodes)

    def _size(self, first: int, cut: int) -> int:
        return self.sizes[0 if self.problem.alike else first][cut - first - 1]

    def _run_first(self, first: int, cut: int, last: int) -> int:
        problem = self.problem
        return self.grid.first(problem.gradients[last + 1] + problem.run_need[first][cut - first - 1])

    def _kept(self, first: int, last: int) -> Row:
        """The best over the options of the first stage."""
        problem, grid = self.problem, self.grid
        best = np.full(grid.length, np.inf)
        for option in range(len(problem.stages[first].options)):
            size, seconds = grid.size(problem.saved(first, option)), problem.save_seconds(first, option)
            low = grid.first(problem.save_need(first, option, last))
            low = low if first == last else max(low, size)
            if low < grid.length:
                behind = 0.0 if first == last else self.row(first + 1, last)[low - size : grid.length - size]
                np.minimum(best[low:], behind + seconds, out=best[low:])
        return best

    def _shifted(self, row: Row, size: int) -> Row:
        """C(c, t, m - size) over m."""
        out = np.full(self.grid.length, np.inf)
        if size < self.grid.length:
            out[size:] = row[: self.grid.length - size]
        return out

    def _fill(self) -> None:
        problem, grid, count = self.problem, self.grid, self.problem.count
        self._rows = [np.empty((count - first, grid.length)) for first in range(count)]
        work = np.empty((count, grid.length))
        needs = [
            [np.array(problem.run_need[first][: last - first], dtype=np.float64) for last in range(count)]
            for first in range(count)
        ]
        for last in range(count):
            # behind[c]: C(c, last, m - x(c)) and the seconds to come to c from the chain's start
            behind = np.full((last + 1, grid.length), np.inf)
            for first in range(last, -1, -1):
                best = self._kept(first, last)
                if last > first:
                    some = work[: last - first]
                    if problem.passes:
                        for cut in range(first + 1, last + 1):
                            behind[cut] = self._shifted(self.row(cut, last), self._size(first, cut))
                            behind[cut] += problem.elapsed[cut]
                    np.add(self._rows[first][: last - first], behind[first + 1 :], out=some)
                    needed = np.ceil((problem.gradients[last + 1] + needs[first][last] - grid.rest) / grid.unit - 1e-9)
                    for index, low in enumerate(needed.astype(int).tolist()):
                        some[index, : max(low, 0)] = np.inf
                    np.minimum(best, some.min(0) - problem.elapsed[first], out=best)
                self._rows[first][last - first] = best
                if not problem.passes and first:
                    behind[first] = self._shifted(best, self._size(first - 1, first)) + problem.elapsed[first]

    def _fill_alike(self) -> None:
        problem, grid, count = self.problem, self.grid, self.problem.count
        self._rows = [np.empty((count, grid.length))]
        rows = self._rows[0]
        behind = np.empty((count, grid.length))
        work = np.empty((count, grid.length))
        size, seconds = self.sizes[0][0], problem.stages[0].forward_seconds
        ahead = seconds * np.arange(1, count + 1)[:, None]
        for last in range(count):
            best = self._kept(0, last)
            if last:
                some = work[:last]
                # segments of 1, 2, .. stages, and what is behind each
                np.add(rows[:last], behind[last - 1 :: -1] if last else behind[:0], out=some)
                some += ahead[:last]
                for index in range(last):
                    some[index, : self._run_first(0, index + 1, last)] = np.inf
                np.minimum(best, some.min(0), out=best)
            rows[last] = best
            behind[last] = self._shifted(best, size)
