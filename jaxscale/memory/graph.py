"""The optimal save set of a block: values to keep, offload or recompute, at least cost within a byte budget.

This is Checkmate's problem (Jain et al. 2020, arXiv:1910.02653) for one block whose backward pass follows its whole
forward pass, which makes the integer program small. The variables are 0 or 1. For each value, k is 1 if the value is
kept on the device, and o is 1 if it is kept on the host. For each equation, r is 1 if the equation runs again in the
backward pass:

    minimize    sum_e cost_e r_e (+ seconds of copies that do not overlap with computation)
    subject to  k_v + o_v + r_producer(v) >= 1      for every value v that the backward pass reads
                k_u + o_u + r_producer(u) >= r_e    for every value u that equation e reads
                sum_v bytes_v k_v <= budget,  sum_v bytes_v o_v <= host budget

Of the sets of least cost, the smallest is chosen. With a host budget the program makes POFO's choice (Beaumont et al.
2021) for one block. Values that can only be kept together have one name in the traced program, their mark.

Not modeled: at which point of the backward pass a value is recomputed (Checkmate's schedule). JAX recomputes a block as
a whole, so the memory of the recomputation differs between save sets only by the bytes they keep.

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
    """Return the save set of least cost within a budget; if several have that cost, the smallest one.

    Args:
        graph: graph of the block; if `objective` is "seconds" or `host` is given, a graph made with a chip.
        budget: maximum bytes kept on the device, the block's inputs excluded.
        objective: the cost to minimize: recomputed FLOP of matrix products, or modeled seconds.
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
    return _Program(graph, objective, host).minimize_cost(budget)


def smallest_save_set(graph: BlockGraph, max_cost: float, *, objective: SaveSetObjective = "flop") -> SaveSet:
    """Return the smallest save set of a block with a cost of at most `max_cost`.

    Args:
        graph: graph of the block; if `objective` is "seconds", a graph made with a chip.
        max_cost: largest number of recomputed FLOP of matrix products, or of modeled seconds.
        objective: unit of `max_cost`, FLOP or seconds.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.programs.block import block_graph
        >>> w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(8, 8), (4, 8)])
        >>> graph = block_graph(lambda w, x: jnp.tanh(x @ w) @ w, w, x)
        >>> smallest_save_set(graph, 0).bytes, smallest_save_set(graph, 512).bytes
        (128, 0)
    """
    return _Program(graph, objective, host=None).minimize_bytes(max_cost)


def menu(
    graph: BlockGraph,
    budgets_or_count: int | Sequence[int] = 23,
    *,
    objective: SaveSetObjective = "flop",
    host: Host | None = None,
) -> tuple[SaveSet, ...]:
    """Return the curve of cost against memory: optimal save sets for increasing budgets.

    Args:
        graph: graph of the block.
        budgets_or_count: the budgets in bytes, or the number of budgets. If only the number is given, the first budget
            is 0 and the second one covers all residuals. Each next budget is the middle of the gap between two
            solutions that has the largest product of width in bytes and difference in cost.
        objective: the cost to minimize: recomputed FLOP of matrix products, or modeled seconds.
        host: host memory for offloaded values; requires the objective "seconds".

    Returns:
        Save sets by increasing bytes and decreasing cost, without duplicates.
    """
    if isinstance(budgets_or_count, int):
        return _menu(graph, budgets_or_count, objective, host)
    program = _Program(graph, objective, host)
    save_by_bytes = {save.bytes: save for save in map(program.minimize_cost, budgets_or_count)}
    return tuple(save_by_bytes[byte_count] for byte_count in sorted(save_by_bytes))


@functools.lru_cache(maxsize=64)
def _menu(graph: BlockGraph, budget_count: int, objective: SaveSetObjective, host: Host | None) -> tuple[SaveSet, ...]:
    """Return the curve of `menu` for a number of budgets; cached, because several rules need the same curve."""
    program = _Program(graph, objective, host)
    smallest_save, largest_save = program.minimize_cost(0), program.minimize_cost(graph.needed_bytes)
    if smallest_save.bytes == largest_save.bytes:
        return (smallest_save,)
    saves = [smallest_save, largest_save]
    # each gap: the save sets below and above it, and the start and stop of the range of untried budgets in it
    gaps = [(smallest_save, largest_save, smallest_save.bytes + 1, largest_save.bytes)]

    def gap_area(gap: tuple[SaveSet, SaveSet, int, int]) -> float:
        """Return the number of untried budgets in a gap times the difference in cost between its save sets."""
        low_save, high_save, start, stop = gap
        return (stop - start) * (cost_of(low_save, objective) - cost_of(high_save, objective))

    for _ in range(budget_count - 2):
        gaps = [gap for gap in gaps if gap[2] < gap[3]]
        if not gaps:
            break
        low_save, high_save, start, stop = gap = max(gaps, key=gap_area)
        gaps.remove(gap)
        budget = (start + stop) // 2
        middle_save = program.minimize_cost(budget)
        if middle_save.bytes > low_save.bytes:
            saves.append(middle_save)
            gaps += [(low_save, middle_save, start, middle_save.bytes), (middle_save, high_save, budget + 1, stop)]
        else:
            gaps.append((low_save, high_save, budget + 1, stop))
    return tuple(sorted(saves, key=lambda save: save.bytes))


class _Program:
    """The integer program of a graph, built once for all budgets.

    Each variable has one column. The variables ("keep", mark), ("host", mark) and ("run", index of an equation) are 0
    or 1. The variable ("out", "") is the seconds of copies to the host that do not overlap with computation, and
    ("back", "") is those of copies from the host; both are in units of `cost_scale`.

    Attributes:
        graph, host, objective: the arguments.
        equation_indices: indices of the equations that run again if nothing is kept.
        indices_by_mark: for each mark of a value worth keeping, the indices of the values with that mark.
        marks: the keys of `indices_by_mark`.
        bytes_by_mark: for each mark, the bytes of its values.
        column_by_variable: the column of each variable.
        choice_count: number of "keep" and "host" variables, which have the first columns.
        row_matrix: sparse float array; each row times the variables is at least the row's entry in `least_sums`.
        least_sums: float array with one entry for each row.
        cost_weights: float array with a weight for each column; the weighted sum is the cost divided by `cost_scale`.
        cost_scale: largest cost of an equation.
        byte_weights: float array with a weight for each column; the weighted sum is the kept bytes in units of
            `byte_unit`.
        byte_unit: largest number of bytes of a mark.
    """

    def __init__(self, graph: BlockGraph, objective: SaveSetObjective, host: Host | None) -> None:
        if objective == "flop" and host is not None:
            raise UserError(
                "the objective 'flop' does not support a host, because copies to a host cost seconds: use 'seconds'"
            )
        check_request(graph, 0, objective)
        self.graph, self.host = graph, host
        self.objective: SaveSetObjective = objective
        self.equation_indices = sorted(recompute(graph, ()).equation_indices)
        # values of one mark are kept together or not at all
        self.indices_by_mark: dict[str, list[int]] = {}
        for index in self._candidate_indices():
            mark = graph.values[index].mark
            assert mark is not None, "candidates have a mark"
            self.indices_by_mark.setdefault(mark, []).append(index)
        self.marks = list(self.indices_by_mark)
        self.bytes_by_mark = {
            mark: sum(graph.values[index].bytes for index in indices) for mark, indices in self.indices_by_mark.items()
        }
        self._build()

    def _cost(self, equation_index: int) -> float:
        """Return the cost of running the equation with this index."""
        return cost_of(self.graph.equations[equation_index], self.objective)

    def _candidate_indices(self) -> list[int]:
        """Return the indices of the values worth keeping.

        A value is not worth keeping if it is computed at no cost from a value that is not larger, or from the block's
        inputs.
        """
        graph = self.graph
        free_indices = {index for index, value in enumerate(graph.values) if value.producer < 0}
        candidate_indices = []
        for equation_index in self.equation_indices:
            equation = graph.equations[equation_index]
            is_free = self._cost(equation_index) == 0
            if is_free and all(index in free_indices for index in equation.inputs):
                free_indices.update(equation.outputs)
                continue
            for index in equation.outputs:
                value = graph.values[index]
                only_operand = graph.values[equation.inputs[0]] if len(equation.inputs) == 1 else None
                is_marked = only_operand is not None and only_operand.mark is not None
                is_redundant = is_free and only_operand is not None and is_marked and only_operand.bytes <= value.bytes
                if value.mark is not None and not is_redundant:
                    candidate_indices.append(index)
        return candidate_indices

    def _build(self) -> None:
        """Set the attributes that describe rows, columns and costs; `e` is the index of an equation."""
        import numpy as np
        from scipy.sparse import csr_array

        marks, graph, host = self.marks, self.graph, self.host
        column_by_variable: dict[tuple[str, Any], int] = {("keep", mark): i for i, mark in enumerate(marks)}
        host_marks: list[str] = []
        if host is not None:
            host_marks = [
                mark
                for mark in marks
                if host.names is None or any(graph.values[i].name in host.names for i in self.indices_by_mark[mark])
            ]
            column_by_variable |= {("host", mark): len(column_by_variable) + i for i, mark in enumerate(host_marks)}
        self.choice_count = len(column_by_variable)
        column_by_variable |= {("run", e): len(column_by_variable) + i for i, e in enumerate(self.equation_indices)}
        if host is not None:
            column_by_variable |= {("out", ""): len(column_by_variable), ("back", ""): len(column_by_variable) + 1}
        self.column_by_variable = column_by_variable
        cost_scale = max((self._cost(e) for e in self.equation_indices), default=0.0) or 1.0
        self.byte_unit = max(self.bytes_by_mark.values(), default=0) or 1
        cost_weights = np.zeros(len(column_by_variable))
        for e in self.equation_indices:
            cost_weights[column_by_variable["run", e]] = self._cost(e) / cost_scale
        # each row: its nonzero factors by column, and the least value of the sum of factors times variables
        constraint_rows: list[tuple[dict[int, float], float]] = []
        mark_by_index = {index: mark for mark, indices in self.indices_by_mark.items() for index in indices}

        def availability_terms(index: int) -> dict[int, float]:
            """Return the factors, by column, of a sum that is >= 1 if the value is kept, offloaded or recomputed."""
            terms = {column_by_variable["run", graph.values[index].producer]: 1.0}
            if index in mark_by_index:
                choice_columns = [column_by_variable.get((kind, mark_by_index[index])) for kind in ("keep", "host")]
                terms |= {column: 1.0 for column in choice_columns if column is not None}
            return terms

        constraint_rows += [(availability_terms(index), 1.0) for index in graph.needed]
        for e in self.equation_indices:
            for index in graph.equations[e].inputs:
                if graph.values[index].producer >= 0:
                    constraint_rows.append(({**availability_terms(index), column_by_variable["run", e]: -1.0}, 0.0))
        if host is not None:
            bytes_by_column = {column_by_variable["host", mark]: self.bytes_by_mark[mark] for mark in host_marks}
            hidden_forward_seconds, hidden_backward_seconds = hidden_seconds(graph, host)
            cost_weights[column_by_variable["out", ""]] = cost_weights[column_by_variable["back", ""]] = 1.0
            copy_terms = {
                column: -byte_count / host.bandwidth / cost_scale for column, byte_count in bytes_by_column.items()
            }
            constraint_rows.append(
                ({**copy_terms, column_by_variable["out", ""]: 1.0}, -hidden_forward_seconds / cost_scale)
            )
            rerun_terms = {column_by_variable["run", e]: self._cost(e) / cost_scale for e in self.equation_indices}
            constraint_rows.append(
                (
                    {**copy_terms, **rerun_terms, column_by_variable["back", ""]: 1.0},
                    -hidden_backward_seconds / cost_scale,
                )
            )
            host_terms = {column: -byte_count / self.byte_unit for column, byte_count in bytes_by_column.items()}
            constraint_rows.append((host_terms, -host.budget / self.byte_unit))
            constraint_rows += [
                ({column_by_variable["host", mark]: -1.0, column_by_variable["keep", mark]: -1.0}, -1.0)
                for mark in host_marks
            ]
        row_indices = [row_index for row_index, (terms, _) in enumerate(constraint_rows) for _ in terms]
        columns = [column for terms, _ in constraint_rows for column in terms]
        factors = [factor for terms, _ in constraint_rows for factor in terms.values()]
        self.row_matrix = csr_array(
            (factors, (row_indices, columns)), shape=(len(constraint_rows), len(column_by_variable))
        )
        self.least_sums = np.array([least_sum for _, least_sum in constraint_rows])
        self.cost_weights, self.cost_scale = cost_weights, cost_scale
        self.byte_weights = np.zeros(len(column_by_variable))
        for mark in marks:
            self.byte_weights[column_by_variable["keep", mark]] = self.bytes_by_mark[mark] / self.byte_unit

    def minimize_cost(self, budget: int) -> SaveSet:
        """Return the save set of least cost within a budget in bytes; if several have that cost, the smallest one."""
        check_request(self.graph, budget, self.objective)
        best_solution = self._solve(self.cost_weights, budget)
        if best_solution is None:
            raise RuntimeError(f"the integer program of block {self.graph.fingerprint} has no solution")
        least_cost = float(self.cost_weights @ best_solution)
        # the smallest set of this cost, if the solver's tolerance admits one
        smallest_solution = self._solve(self.byte_weights, budget, least_cost * (1 + 1e-9) + 1e-9)
        solutions = [solution for solution in (best_solution, smallest_solution) if solution is not None]
        candidate_sets = map(self._save_set_of, solutions)
        cheapest_set = min(
            candidate_sets, key=lambda candidate_set: (cost_of(candidate_set, self.objective), candidate_set.bytes)
        )
        is_everything_cheaper = budget >= self.graph.needed_bytes and cost_of(cheapest_set, self.objective) > 0
        return save_set(self.graph, (EVERYTHING,)) if is_everything_cheaper else cheapest_set

    def minimize_bytes(self, max_cost: float) -> SaveSet:
        """Return the smallest save set with a cost of at most `max_cost`."""
        full_set = save_set(self.graph, (EVERYTHING,))
        if cost_of(self.minimize_cost(self.graph.needed_bytes), self.objective) > max_cost:
            return full_set
        scaled_max_cost = max_cost / self.cost_scale
        solution = self._solve(self.byte_weights, self.graph.needed_bytes, scaled_max_cost * (1 + 1e-9) + 1e-9)
        if solution is None:
            return full_set
        smallest_set = self._save_set_of(solution)
        return smallest_set if cost_of(smallest_set, self.objective) <= max_cost * (1 + 1e-9) else full_set

    def _save_set_of(self, solution: Any) -> SaveSet:
        """Return the save set of a solution, a float array with the value of each column's variable."""
        names_by_kind: dict[str, list[str]] = {"keep": [], "host": []}
        for (kind, mark), column in self.column_by_variable.items():
            if kind in names_by_kind and solution[column] > 0.5:
                names_by_kind[kind] += [self.graph.values[index].name for index in self.indices_by_mark[str(mark)]]
        return save_set(self.graph, names_by_kind["keep"], names_by_kind["host"], self.host)

    def _solve(self, weights: Any, budget: int, max_cost: float = math.inf) -> Any:
        """Return the feasible solution of least weighted sum, a float array with an entry per column; or `None`.

        Args:
            weights: float array with the weight of each column.
            budget: maximum bytes kept on the device.
            max_cost: largest permitted cost, as a multiple of `cost_scale`.
        """
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp

        variable_count = len(self.column_by_variable)
        if not self.choice_count or not variable_count:
            return np.ones(variable_count)  # nothing to choose: every equation runs
        upper_bounds = np.ones(variable_count)
        for variable in (("out", ""), ("back", "")):
            if variable in self.column_by_variable:
                upper_bounds[self.column_by_variable[variable]] = np.inf
        integrality = np.zeros(variable_count)
        # "run" variables are integral if the choices are; HiGHS is faster, without warnings, if all are declared so
        integrality[: self.choice_count + len(self.equation_indices)] = 1
        lower_bounds: Any = np.zeros(variable_count)
        bounds = Bounds(lower_bounds, cast(Any, upper_bounds))
        limit_bytes = float(budget)
        while True:
            constraints = [LinearConstraint(self.row_matrix, cast(Any, self.least_sums), np.inf)]
            constraints.append(LinearConstraint(self.byte_weights[None, :], -np.inf, limit_bytes / self.byte_unit))
            if math.isfinite(max_cost):
                constraints.append(LinearConstraint(self.cost_weights[None, :], -np.inf, max_cost))
            optimum = milp(
                weights, integrality=integrality, bounds=bounds, constraints=constraints, options={"mip_rel_gap": 0}
            )
            if optimum.x is None:
                return None
            kept_marks = [mark for mark in self.marks if optimum.x[self.column_by_variable["keep", mark]] > 0.5]
            kept_bytes = sum(self.bytes_by_mark[mark] for mark in kept_marks)
            if kept_bytes <= budget:
                return optimum.x
            limit_bytes -= kept_bytes - budget  # the solver's tolerance allowed slightly too many bytes
