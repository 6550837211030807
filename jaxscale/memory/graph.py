"""The optimal save set of a block: values to keep, offload or recompute, at least cost within a byte budget.

This is Checkmate's problem (Jain et al. 2020, arXiv:1910.02653) for one block whose backward pass follows its whole
forward pass, which makes the integer program small. For each value, k and o in {0, 1} are 1 if the value is kept on the
device or on the host; for each equation, r in {0, 1} is 1 if it runs again in the backward pass:

    least    sum_e cost_e r_e (+ seconds of copies that nothing hides)
    where    k_v + o_v + r_producer(v) >= 1      for every value v that the backward pass reads
             k_u + o_u + r_producer(u) >= r_e    for every value u that equation e reads
             sum_v bytes_v k_v <= budget,  sum_v bytes_v o_v <= host budget

Of the sets of least cost, the smallest is chosen. With a host budget the program makes POFO's choice (Beaumont et al.
2021) for one block. Values that can only be kept together have one name in the traced program, their mark.

Left out: when within the backward pass a value is recomputed (Checkmate's schedule). JAX recomputes a block as a whole,
so the memory of the recomputation differs between save sets only by the bytes they keep.

The solver is HiGHS, through scipy.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, cast

from jaxscale.errors import UserError
from jaxscale.memory.decision import SaveSet
from jaxscale.memory.plan import SaveSetObjective
from jaxscale.memory.save_set import EVERYTHING, Host, check_request, cost_of, hidden_seconds, recompute, save_set
from jaxscale.programs.block import BlockGraph


def solve(graph: BlockGraph, budget: int, *, objective: SaveSetObjective = "flop", host: Host | None = None) -> SaveSet:
    """The save set of least cost within a budget, and of several such sets the smallest.

    Args:
        graph: graph of the block; it needs seconds (a chip) if `objective` is "seconds" or `host` is given.
        budget: most bytes kept on the device, besides the block's inputs.
        objective: the cost to minimize: recomputed FLOP of matrix products, or modelled seconds.
        host: host memory for offloaded values; requires the objective "seconds".

    Raises:
        UserError: the budget is negative, or the objective is "seconds" and the graph has no chip.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.programs.block import block_graph
        >>> w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(8, 8), (4, 8)])
        >>> graph = block_graph(lambda w, x: jnp.tanh(x @ w) @ w, w, x)
        >>> solve(graph, 0).flop, solve(graph, 128).flop, solve(graph, 128).keep
        (512, 0, ('dot_general',))
    """
    return _Program(graph, objective, host).at(budget)


def smallest(graph: BlockGraph, max_cost: float, *, objective: SaveSetObjective = "flop") -> SaveSet:
    """The smallest save set of a block whose cost is at most `max_cost`.

    Args:
        graph: graph of the block; it needs seconds if `objective` is "seconds".
        max_cost: most recomputed FLOP of matrix products, or most modelled seconds.
        objective: unit of `max_cost`, FLOP or seconds.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.programs.block import block_graph
        >>> w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(8, 8), (4, 8)])
        >>> graph = block_graph(lambda w, x: jnp.tanh(x @ w) @ w, w, x)
        >>> smallest(graph, 0).bytes, smallest(graph, 512).bytes
        (128, 0)
    """
    return _Program(graph, objective, None).within(max_cost)


def menu(
    graph: BlockGraph,
    points: int | Sequence[int] = 23,
    *,
    objective: SaveSetObjective = "flop",
    host: Host | None = None,
) -> tuple[SaveSet, ...]:
    """The curve of cost against memory: optimal save sets, the first of which keeps nothing.

    Args:
        graph: graph of the block.
        points: number of budgets to solve for, each in the middle of the gap that is widest in bytes and cost; or the
            budgets, in bytes.
        objective: the cost to minimize, as in `solve`.
        host: host memory for offloaded values, as in `solve`.

    Returns:
        Save sets by rising bytes and falling cost, without duplicates.
    """
    if isinstance(points, int):
        return _menu(graph, points, objective, host)
    program = _Program(graph, objective, host)
    save_by_bytes = {save.bytes: save for save in map(program.at, points)}
    return tuple(save_by_bytes[size] for size in sorted(save_by_bytes))


@functools.lru_cache(maxsize=64)
def _menu(graph: BlockGraph, points: int, objective: SaveSetObjective, host: Host | None) -> tuple[SaveSet, ...]:
    """`menu` for a number of points; cached, because several budgets and rules need the same curve of a model."""
    program = _Program(graph, objective, host)
    saves = [program.at(0), program.at(graph.needed_bytes)]
    saves = saves[:1] if saves[0].bytes == saves[1].bytes else saves
    # (lower save set, higher save set, start and stop of the budgets between them that were not tried yet)
    gaps = [(saves[0], saves[1], saves[0].bytes + 1, saves[1].bytes)] if len(saves) > 1 else []

    def gap_area(gap: tuple[SaveSet, SaveSet, int, int]) -> float:
        return (gap[3] - gap[2]) * (cost_of(gap[0], objective) - cost_of(gap[1], objective))

    for _ in range(points - 2):
        gaps = [gap for gap in gaps if gap[2] < gap[3]]
        if not gaps:
            break
        low_save, high_save, start, stop = gap = max(gaps, key=gap_area)
        gaps.remove(gap)
        budget = (start + stop) // 2
        middle_save = program.at(budget)
        if middle_save.bytes > low_save.bytes:
            saves.append(middle_save)
            gaps += [(low_save, middle_save, start, middle_save.bytes), (middle_save, high_save, budget + 1, stop)]
        else:
            gaps.append((low_save, high_save, budget + 1, stop))
    return tuple(sorted(saves, key=lambda save: save.bytes))


class _Program:
    """The integer program of a graph, built once for all budgets.

    Its columns are variables: ("keep", mark), ("host", mark) and ("run", equation) are 0 or 1; ("out", "") and
    ("back", "") are the exposed seconds of copies to and from the host.
    """

    def __init__(self, graph: BlockGraph, objective: SaveSetObjective, host: Host | None) -> None:
        if objective == "flop" and host is not None:
            raise UserError(
                "the objective 'flop' does not support a host, because copies to it cost seconds: use 'seconds'"
            )
        check_request(graph, 0, objective)
        self.graph, self.host = graph, host
        self.objective: SaveSetObjective = objective
        self.equations = sorted(recompute(graph, ()).equations)
        # values of one name are kept together or not at all
        self.groups: dict[str, list[int]] = {}
        for index in self._candidates():
            mark = graph.values[index].mark
            assert mark is not None, "candidates have a name"
            self.groups.setdefault(mark, []).append(index)
        self.marks = list(self.groups)
        self.mark_bytes = {mark: sum(graph.values[i].bytes for i in self.groups[mark]) for mark in self.marks}
        self._build()

    def _cost(self, equation: int) -> float:
        """The cost of running the equation with this index."""
        return cost_of(self.graph.equations[equation], self.objective)

    def _candidates(self) -> list[int]:
        """Indices of the values worth keeping.

        A value is not worth keeping if it follows at no cost from a smaller value or from the block's inputs.
        """
        graph = self.graph
        free_indices = {index for index, value in enumerate(graph.values) if value.producer < 0}
        candidate_indices = []
        for number in self.equations:
            equation = graph.equations[number]
            is_free = self._cost(number) == 0
            if is_free and all(index in free_indices for index in equation.inputs):
                free_indices.update(equation.outputs)
                continue
            for index in equation.outputs:
                value = graph.values[index]
                source = graph.values[equation.inputs[0]] if len(equation.inputs) == 1 else None
                is_implied = is_free and source is not None and source.mark is not None and source.bytes <= value.bytes
                if value.mark is not None and not is_implied:
                    candidate_indices.append(index)
        return candidate_indices

    def _build(self) -> None:
        """Build the rows, columns and costs of the integer program."""
        import numpy as np
        from scipy.sparse import csr_array

        marks, graph, host = self.marks, self.graph, self.host
        column: dict[tuple[str, Any], int] = {("keep", mark): i for i, mark in enumerate(marks)}
        if host is not None:
            host_marks = [
                mark
                for mark in marks
                if host.names is None or any(graph.values[i].name in host.names for i in self.groups[mark])
            ]
            column |= {("host", mark): len(column) + i for i, mark in enumerate(host_marks)}
        self.choice_count = len(column)
        column |= {("run", equation): len(column) + i for i, equation in enumerate(self.equations)}
        if host is not None:
            column |= {("out", ""): len(column), ("back", ""): len(column) + 1}
        self.column = column
        scale = max((self._cost(equation) for equation in self.equations), default=0.0) or 1.0
        self.unit = max(self.mark_bytes.values(), default=0) or 1
        cost = np.zeros(len(column))
        for equation in self.equations:
            cost[column["run", equation]] = self._cost(equation) / scale
        # the terms of a row by column, and the least value of their sum
        rows: list[tuple[dict[int, float], float]] = []
        mark_of = {index: mark for mark, indices in self.groups.items() for index in indices}

        def availability_terms(index: int) -> dict[int, float]:
            """Terms of the sum that is at least 1 if a value is kept, on the host, or recomputed."""
            terms = {column["run", graph.values[index].producer]: 1.0}
            if index in mark_of:
                columns = [column.get((kind, mark_of[index])) for kind in ("keep", "host")]
                terms |= {number: 1.0 for number in columns if number is not None}
            return terms

        rows += [(availability_terms(index), 1.0) for index in graph.needed]
        for equation in self.equations:
            for index in graph.equations[equation].inputs:
                if graph.values[index].producer >= 0:
                    rows.append(({**availability_terms(index), column["run", equation]: -1.0}, 0.0))
        if host is not None:
            copy_bytes = {column["host", mark]: self.mark_bytes[mark] for kind, mark in column if kind == "host"}
            hidden_forward, hidden_backward = hidden_seconds(graph, host)
            cost[column["out", ""]] = cost[column["back", ""]] = 1.0
            copy_seconds = {number: -size / host.bandwidth / scale for number, size in copy_bytes.items()}
            rows.append(({**copy_seconds, column["out", ""]: 1.0}, -hidden_forward / scale))
            rerun_seconds = {column["run", equation]: self._cost(equation) / scale for equation in self.equations}
            rows.append(({**copy_seconds, **rerun_seconds, column["back", ""]: 1.0}, -hidden_backward / scale))
            host_sizes = {number: -size / self.unit for number, size in copy_bytes.items()}
            rows.append((host_sizes, -host.budget / self.unit))
            rows += [
                ({column["host", mark]: -1.0, column["keep", mark]: -1.0}, -1.0)
                for kind, mark in column
                if kind == "host"
            ]
        row_numbers = [row for row, (terms, _) in enumerate(rows) for _ in terms]
        columns = [number for terms, _ in rows for number in terms]
        factors = [factor for terms, _ in rows for factor in terms.values()]
        self.matrix = csr_array((factors, (row_numbers, columns)), shape=(len(rows), len(column)))
        self.least = np.array([least for _, least in rows])
        self.cost, self.scale = cost, scale
        self.bytes = np.zeros(len(column))
        for mark in marks:
            self.bytes[column["keep", mark]] = self.mark_bytes[mark] / self.unit

    def at(self, budget: int) -> SaveSet:
        """The optimum for a budget in bytes."""
        check_request(self.graph, budget, self.objective)
        best_solution = self._solve(self.cost, budget)
        if best_solution is None:
            raise RuntimeError(f"the integer program of block {self.graph.fingerprint} has no solution")
        least_cost = float(self.cost @ best_solution)
        # the smallest set of this cost, if the solver's tolerance admits one
        smallest_solution = self._solve(self.bytes, budget, least_cost * (1 + 1e-9) + 1e-9)
        solutions = (self._set(solution) for solution in (best_solution, smallest_solution) if solution is not None)
        save = min(solutions, key=lambda save: (cost_of(save, self.objective), save.bytes))
        keeps_everything = budget >= self.graph.needed_bytes and cost_of(save, self.objective) > 0
        return save_set(self.graph, (EVERYTHING,)) if keeps_everything else save

    def within(self, max_cost: float) -> SaveSet:
        """The smallest set whose cost is at most `max_cost`."""
        everything = save_set(self.graph, (EVERYTHING,))
        if cost_of(self.at(self.graph.needed_bytes), self.objective) > max_cost:
            return everything
        scaled_cost = max_cost / self.scale
        solution = self._solve(self.bytes, self.graph.needed_bytes, scaled_cost * (1 + 1e-9) + 1e-9)
        if solution is None:
            return everything
        save = self._set(solution)
        return save if cost_of(save, self.objective) <= max_cost * (1 + 1e-9) else everything

    def _set(self, solution: Any) -> SaveSet:
        """The save set that a solution of the integer program describes."""
        names: dict[str, list[str]] = {"keep": [], "host": []}
        for (kind, mark), number in self.column.items():
            if kind in names and solution[number] > 0.5:
                names[kind] += [self.graph.values[index].name for index in self.groups[str(mark)]]
        return save_set(self.graph, names["keep"], names["host"], self.host)

    def _solve(self, weights: Any, budget: int, max_cost: float = math.inf) -> Any:
        """The variables that minimize the sum with these weights, within a budget in bytes and a scaled cost.

        Returns `None` if no choice satisfies both limits.
        """
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp

        count = len(self.column)
        if not self.choice_count or not count:
            return np.ones(count)  # nothing to choose: every equation runs
        upper_bounds = np.ones(count)
        for key in (("out", ""), ("back", "")):
            if key in self.column:
                upper_bounds[self.column[key]] = np.inf
        integrality = np.zeros(count)
        # runs are integral if the choices are; declaring them integral makes HiGHS faster, and it prints no repairs
        integrality[: self.choice_count + len(self.equations)] = 1
        lower_bounds: Any = np.zeros(count)
        bounds = Bounds(lower_bounds, cast(Any, upper_bounds))
        limit_bytes = float(budget)
        while True:
            constraints = [LinearConstraint(self.matrix, cast(Any, self.least), np.inf)]
            constraints.append(LinearConstraint(self.bytes[None, :], -np.inf, limit_bytes / self.unit))
            if math.isfinite(max_cost):
                constraints.append(LinearConstraint(self.cost[None, :], -np.inf, max_cost))
            optimum = milp(
                weights, integrality=integrality, bounds=bounds, constraints=constraints, options={"mip_rel_gap": 0}
            )
            if optimum.x is None:
                return None
            kept_bytes = sum(self.mark_bytes[mark] for mark in self.marks if optimum.x[self.column["keep", mark]] > 0.5)
            if kept_bytes <= budget:
                return optimum.x
            limit_bytes -= kept_bytes - budget  # the solver's tolerance allowed slightly too many bytes
