"""The search for a partition: which blocks each stage has, so that the pipeline is fast and fits the devices' memory.

The objective is the executor's time: the schedule's seconds on the `neighbour` machine, with devices in the given
order. The time is the length of the longest path through the schedule's table. So it is a maximum of linear functions
of the stages' costs, one for each path. Dynamic programming over (stage, block) minimizes one function, as in PipeDream
and Pipe-torch, with a price list for each device and a rate for each link. Three methods minimize the maximum: moving
boundaries, branch and bound, and a game between the dynamic program and the clock. In each turn of the game the program
finds the best partition for the mean of the paths so far, and the clock finds the longest path for the mean costs of
the partitions so far. No partition is faster than `Partition.bound`, so a partition that reaches the bound is optimal.

Memory is a maximum of linear functions too (`footprint.py`). As in MadPipe and DAPPLE it depends on the schedule: stage
0 of 1f1b holds p activations, and the last stage holds one. Stages that exceed the memory by themselves are excluded.

Devices may be of several kinds, each with a price list, and links may differ too. HetPipe runs several pipelines of
unlike devices side by side. In one program these pipelines have the same partition, so at each position the slowest
device sets the time (`virtual_workers.py`).

Left out: the order of devices, replicated stages, stages without blocks, the reduction of gradients, and the update
after the last tick.

References:
    Narayanan et al. 2019, "PipeDream" (SOSP); Zhan and Zhang 2019, "Pipe-torch" (CBD); Park et al. 2020, "HetPipe"
    (arXiv:2005.14038); Fan et al. 2021, "DAPPLE" (arXiv:2007.01045); Beaumont, Eyraud-Dubois and Shilova 2021,
    "MadPipe" (hal-03025305).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxscale.errors import UserError
from jaxscale.pipeline.choose.chain_cut import FEATURES, INDEX
from jaxscale.pipeline.choose.price import ModelPrices, PipelineDevice
from jaxscale.pipeline.choose.problem import Problem
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.run.lifetimes import Stash
from jaxscale.values.byte_sizes import bytes_at_least

_GAME_TURNS = 24  # number of turns of the game between program and clock
_BLUR = 0.002  # the clock averages over the paths whose seconds differ from the longest path's by at most this share
_START_EXPONENTS = (2, 4, 8)  # the search also starts from cuts with the least sum of stage bounds to these powers
_REFINED_STARTS = 2  # number of starts that are refined by moving boundaries
_MAX_FUNCTIONS = 4  # number of memory functions that branch and bound uses; found cuts are checked against all
_TOLERANCE = 1e-9  # relative difference up to which seconds count as equal to their bound


class TooLarge(UserError):
    """The error that is raised if no partition fits the memory.

    Args:
        message: error message for the user.
        ratio: needed bytes divided by available bytes of the partition that needs the least memory.
    """

    def __init__(self, message: str, ratio: float) -> None:
        super().__init__(message)
        self.ratio = ratio


@dataclasses.dataclass(frozen=True)
class Partition:
    """The blocks of each stage, and the seconds and bytes of the pipeline.

    Args:
        boundaries: stage s has the blocks boundaries[s] to boundaries[s + 1] - 1.
        seconds: seconds of the schedule on the `neighbour` machine.
        bytes: for each rank, the most bytes that the rank holds at once.
        bound: a lower bound on the seconds of every partition that fits the memory.
        costs: costs of the stages, for `simulate`.
        schedule: name of the schedule.

    Example:
        >>> from jaxscale.pipeline.choose.price import Price
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> model = ModelPrices((Price(1, 1, 1),) * 6, last=Price(2, 2, 2))
        >>> fastest = partition(model, METHODS["gpipe"].schedule(2, 4))
        >>> fastest.boundaries, fastest.seconds, fastest.exact
        ((0, 4, 6), 60.0, True)
        >>> print(fastest)
        gpipe: 60 s, no partition is faster
          stage 0  blocks 0-3  F 4  I 4  W 4
          stage 1  blocks 4-5  F 4  I 4  W 4
          rank 0  0B
          rank 1  0B
    """

    boundaries: tuple[int, ...]
    seconds: float
    bytes: tuple[int, ...]
    bound: float
    costs: Costs
    schedule: str

    @property
    def stages(self) -> tuple[range, ...]:
        """For each stage, the range of its blocks."""
        return tuple(map(range, self.boundaries, self.boundaries[1:]))

    @property
    def exact(self) -> bool:
        """Whether it is certain that no partition is faster."""
        return self.seconds <= self.bound * (1 + _TOLERANCE)

    def __str__(self) -> str:
        gap_text = f"at most {self.seconds / self.bound - 1:.2%} above the best"
        lines = [f"{self.schedule}: {self.seconds:.6g} s, {'no partition is faster' if self.exact else gap_text}"]
        range_texts = [f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else f"{blocks[0]}" for blocks in self.stages]
        width = max(map(len, range_texts))
        stage_rows = zip(range_texts, self.costs.forward, self.costs.input, self.costs.weight, strict=True)
        for stage, (range_text, f, i, w) in enumerate(stage_rows):
            lines.append(f"  stage {stage}  blocks {range_text.ljust(width)}  F {f:.4g}  I {i:.4g}  W {w:.4g}")
        lines += [f"  rank {rank}  {bytes_at_least(count)}" for rank, count in enumerate(self.bytes)]
        return "\n".join(lines)


def partition(
    model: ModelPrices | Mapping[str, ModelPrices],
    schedule: Schedule,
    devices: Sequence[PipelineDevice] | None = None,
    *,
    stash: Stash = "residuals",
    width: int | None = None,
) -> Partition:
    """Find the fastest partition of a model that fits its devices.

    Args:
        model: prices of the model. If devices differ, a dict of prices by the name of the kind of device.
        schedule: the actions of each rank, in order.
        devices: the device of each rank, in order; `None`: equal devices without a memory limit, on links that take no
            time.
        stash: what a stage keeps for a backward: the residuals, or only its input. With the input, the backward runs
            the forward again.
        width: number of partial partitions that branch and bound keeps. With a larger number the search takes longer,
            and its result is nearer to the best. `None`: 65536 / stages^2, and at least 256. This default solves 32
            blocks on 4 devices exactly.

    Raises:
        TooLarge: no partition fits; the message gives the least memory that suffices and ways to need less.
        UserError: there are more stages than blocks, the number of devices is not the number of ranks, or a kind of
            device has no prices.

    Example:
        >>> from jaxscale.pipeline.choose.price import Price
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> prices = {"new": ModelPrices((Price(1, 1, 1),) * 9), "old": ModelPrices((Price(2, 2, 2),) * 9)}
        >>> devices = [PipelineDevice(kind="new"), PipelineDevice(kind="old")]
        >>> partition(prices, METHODS["lockstep"].schedule(2, 16), devices).boundaries
        (0, 6, 9)
    """
    search_width = max(256, 65536 // schedule.stages**2) if width is None else width
    search = _Search(Problem(model, schedule, devices, stash), search_width)
    search.limit_memory()
    return search.fastest_partition()


@dataclasses.dataclass
class _Search:
    """The search for the fastest partition of a problem.

    A cut is an array of boundaries, int[stages + 1]. A linear is an array float[stage, feature] with the coefficients
    of a linear function of the stages' features.

    Args:
        problem: the model, schedule and devices.
        width: number of partial partitions that branch and bound keeps.
        smallest_cut: the cut that needs the least memory; `limit_memory` sets it. `None`: memory is not limited.
    """

    problem: Problem
    width: int
    smallest_cut: np.ndarray | None = None

    def limit_memory(self) -> None:
        """Exclude stages that exceed the memory by themselves, and find the cut that needs the least memory.

        Raises:
            TooLarge: no partition fits.
        """
        memory_linears = []  # each is the bytes of a rank at one point in time, divided by the memory of the rank
        for rank, linear in self.problem.footprints:
            memory_bytes = self.problem.devices[rank].memory_bytes
            if memory_bytes is not None:
                shared_linear = np.zeros_like(linear)
                shared_linear[self.problem.schedule.stages_of(rank)[0], INDEX["one"]] = self.problem.shared_bytes[rank]
                memory_linears.append((linear + shared_linear) / memory_bytes)
        if not memory_linears:
            return
        self.smallest_cut, least_ratio = self._least_memory_cut(memory_linears)
        if least_ratio > 1 + 1e-12:
            raise self._too_large_error(self.smallest_cut, least_ratio)
        for linear in memory_linears:
            if (linear.any(1)).sum() == 1:
                self.problem.chain.exclude_above(linear, 1.0)
            else:
                self.problem.memory_linears.append(linear)

    def _least_memory_cut(self, memory_linears: list[np.ndarray]) -> tuple[np.ndarray, float]:
        """Return (cut, ratio): a cut that needs little memory, and its largest ratio of bytes to memory.

        The ratio is the largest over all ranks and points in time. The search stops at the first cut with a ratio of at
        most 1; if it finds none, it returns the cut with the least ratio.

        Args:
            memory_linears: a linear for each rank and point in time: the bytes of the rank divided by its memory.
        """
        chain = self.problem.chain
        largest_ratios = chain.largest_contributions(memory_linears)
        least_ratio, cut = chain.least_cost_cut(largest_ratios, use_max=True)
        if all(linear.any(1).sum() == 1 for linear in memory_linears):
            return cut, least_ratio
        ratio_coefficients = np.stack(memory_linears).reshape(len(memory_linears), -1)
        moment_ratios = ratio_coefficients @ chain.stage_features(cut[None]).ravel()
        least_ratio, active_indices = float(moment_ratios.max()), [int(moment_ratios.argmax())]
        while least_ratio > 1:
            active_linears = [memory_linears[index] for index in active_indices]
            cuts = chain.branch_and_bound(
                active_linears, (), largest_ratios, least_ratio * (1 - 1e-12), self.width
            ).cuts
            if not len(cuts):
                return cut, least_ratio
            cut_ratios = chain.stage_features(cuts).reshape(len(cuts), -1) @ ratio_coefficients.T
            lowest_index = int(cut_ratios.max(1).argmin())
            binding_index = int(cut_ratios[lowest_index].argmax())
            if cut_ratios[lowest_index, binding_index] < least_ratio:
                least_ratio, cut = float(cut_ratios[lowest_index, binding_index]), cuts[lowest_index]
            elif binding_index in active_indices or len(active_indices) >= _MAX_FUNCTIONS:
                return cut, least_ratio
            active_indices.append(binding_index)
        return cut, least_ratio

    def _too_large_error(self, cut: np.ndarray, ratio: float) -> TooLarge:
        """Return the error for a model that does not fit: its smallest cut, `cut`, needs `ratio` times the memory."""
        problem, schedule = self.problem, self.problem.schedule
        needed_bytes = problem.bytes(cut)
        memory_bytes = [device.memory_bytes for device in problem.devices]
        rank = max(range(len(needed_bytes)), key=lambda rank: needed_bytes[rank] / (memory_bytes[rank] or np.inf))
        hints = ["smaller microbatches"]
        if problem.stash == "residuals":
            hints.append("the stash of inputs alone (a stage's forward is run again), or a memory plan that keeps less")
        if max(schedule.live) > schedule.ranks * schedule.chunks:
            hints.append("a schedule with fewer activations alive (1f1b)")
        hints.append("more devices on the pipe axis, or weights sharded over data (ZeRO)")
        return TooLarge(
            f"{schedule.name}: no partition of {problem.blocks} blocks into {schedule.stages} stages fits. The "
            f"smallest needs {bytes_at_least(needed_bytes[rank])} on rank {rank}, which has "
            f"{bytes_at_least(int(memory_bytes[rank] or 0))} (a ratio of {ratio:.2f}). Ways to lower it: "
            f"{'; '.join(hints)}",
            ratio,
        )

    def fastest_partition(self) -> Partition:
        """Return the fastest partition that the search finds, with its lower bound."""
        chain, stage_bounds = self.problem.chain, self.problem.stage_bounds()
        scaled_bounds = stage_bounds / stage_bounds[np.isfinite(stage_bounds)].max()
        start_cuts = [chain.least_cost_cut(scaled_bounds, use_max=True)[1]]
        # cuts that are more even than the cut with the least maximum
        start_cuts += [chain.least_cost_cut(scaled_bounds**exponent)[1] for exponent in _START_EXPONENTS]
        start_cuts += [] if self.smallest_cut is None else [self.smallest_cut]
        distinct_cuts = np.unique(np.stack(start_cuts), axis=0)
        start_seconds = self.problem.seconds(distinct_cuts)
        fastest_indices = start_seconds.argsort(kind="stable")[:_REFINED_STARTS]
        refined_seconds_and_cuts = [
            self._refine(float(start_seconds[index]), distinct_cuts[index]) for index in fastest_indices
        ]
        best_seconds, best_cut = min(refined_seconds_and_cuts, key=lambda seconds_and_cut: seconds_and_cut[0])
        chain.possible &= stage_bounds <= best_seconds * (1 + _TOLERANCE)
        best_seconds, best_cut, lower_bound = self._branch_and_bound(best_seconds, best_cut, -np.inf, [], stage_bounds)
        if best_seconds > lower_bound * (1 + _TOLERANCE):
            game_bound, bound_linear, game_cuts = self._play_game(best_cut, best_seconds)
            game_seconds = self.problem.seconds(game_cuts)
            if game_seconds.min() < best_seconds:
                best_seconds, best_cut = self._refine(float(game_seconds.min()), game_cuts[game_seconds.argmin()])
            best_seconds, best_cut, lower_bound = self._branch_and_bound(
                best_seconds, best_cut, max(lower_bound, game_bound), [bound_linear], stage_bounds
            )
        return self._partition(best_cut, float(best_seconds), float(min(lower_bound, best_seconds)))

    def _branch_and_bound(
        self,
        start_seconds: float,
        start_cut: np.ndarray,
        start_bound: float,
        start_paths: list[np.ndarray],
        stage_bounds: np.ndarray,
    ) -> tuple[float, np.ndarray, float]:
        """Repeat branch and bound while it finds a faster cut.

        Args:
            start_seconds: seconds of `start_cut`.
            start_cut: int[stages + 1], the fastest cut so far.
            start_bound: a lower bound on the seconds of every cut.
            start_paths: linears; for no cut is their value above the cut's seconds.
            stage_bounds: float[stage, begin, end], a lower bound on the seconds of every cut with this stage.

        Returns:
            (seconds, cut, bound): the seconds of the fastest cut, that cut, and a lower bound on every cut's seconds.
        """
        best_seconds, best_cut, lower_bound, paths = start_seconds, start_cut, start_bound, start_paths
        limit_linears = self._tightest_linears(best_cut)
        while best_seconds > lower_bound * (1 + _TOLERANCE):
            paths = [*paths, self.problem.path(best_cut)]
            bounded_cuts = self.problem.chain.branch_and_bound(
                paths, limit_linears, stage_bounds, best_seconds, self.width
            )
            if not len(bounded_cuts.cuts):
                return best_seconds, best_cut, max(lower_bound, min(best_seconds, bounded_cuts.lower_bound))
            cut_seconds = self.problem.seconds(bounded_cuts.cuts)
            fastest_index = int(cut_seconds.argmin())
            least_seconds = float(cut_seconds[fastest_index])
            lower_bound = max(lower_bound, min(best_seconds, least_seconds, bounded_cuts.lower_bound))
            is_faster = least_seconds < best_seconds * (1 - _TOLERANCE)
            if least_seconds < best_seconds:
                best_seconds, best_cut = least_seconds, bounded_cuts.cuts[fastest_index]
            if np.isinf(bounded_cuts.lower_bound) or not is_faster:
                break
            best_seconds, best_cut = self._refine(best_seconds, best_cut)
        return best_seconds, best_cut, lower_bound

    def _tightest_linears(self, cut: np.ndarray) -> list[np.ndarray]:
        """Return at most `_MAX_FUNCTIONS` memory functions: those that are nearest to their limit for a cut."""
        stage_features = self.problem.chain.stage_features(cut[None])[0]
        ranked_linears = sorted(self.problem.memory_linears, key=lambda linear: -(stage_features * linear).sum())
        return ranked_linears[:_MAX_FUNCTIONS]

    def _play_game(self, start_cut: np.ndarray, best_seconds: float) -> tuple[float, np.ndarray, np.ndarray]:
        """Play the game between the dynamic program and the clock.

        In each turn the clock finds the longest path for the mean of the costs so far. Then the program finds the
        fastest cut for the mean of the clock's paths so far.

        Args:
            start_cut: the fastest cut so far, with which the game starts.
            best_seconds: seconds of `start_cut`.

        Returns:
            (bound, linear, cuts): a lower bound on the seconds of every cut, the linear from which the bound follows,
            and the cuts of all turns, int[turn, stages + 1].
        """
        problem = self.problem
        blur = _BLUR * best_seconds
        mean_pass_seconds, mean_link_seconds = (batch_costs[0] for batch_costs in problem.costs(start_cut[None]))
        mean_linear = np.zeros((problem.schedule.stages, len(FEATURES)))
        cut, lower_bound, bound_linear, turn_cuts = start_cut, -np.inf, mean_linear, []
        for turn in range(_GAME_TURNS):
            path_linear = problem.linear(cut, problem.clock.path(mean_pass_seconds, mean_link_seconds, blur))
            mean_linear = mean_linear + (path_linear - mean_linear) * (2 / (turn + 2))
            turn_bound, cut = problem.chain.least_cost_cut(problem.chain.contributions(mean_linear))
            if turn_bound > lower_bound:
                lower_bound, bound_linear = turn_bound, mean_linear
            turn_cuts.append(cut)
            if best_seconds <= lower_bound * (1 + _TOLERANCE):
                break
            pass_seconds, link_seconds = (batch_costs[0] for batch_costs in problem.costs(cut[None]))
            mean_pass_seconds = mean_pass_seconds + (pass_seconds - mean_pass_seconds) / (turn + 4)
            mean_link_seconds = mean_link_seconds + (link_seconds - mean_link_seconds) / (turn + 4)
        return lower_bound, bound_linear, np.stack(turn_cuts)

    def _refine(self, start_seconds: float, start_cut: np.ndarray) -> tuple[float, np.ndarray]:
        """Move boundaries while this makes the cut faster, and return (seconds, cut).

        A move shifts one boundary, or several adjacent boundaries.

        Args:
            start_seconds: seconds of `start_cut`.
            start_cut: int[stages + 1], the cut to start from.
        """
        best_seconds, best_cut = start_seconds, start_cut
        inner_boundary_count = self.problem.schedule.stages - 1
        if not inner_boundary_count:
            return best_seconds, best_cut
        # each move shifts the inner boundaries begin to end by one block or two, left or right
        all_begins, all_ends = np.triu_indices(inner_boundary_count)
        is_tried = (all_ends - all_begins < 3) | (all_begins == 0) | (all_ends == inner_boundary_count - 1)
        begins, ends = all_begins[is_tried], all_ends[is_tried]
        boundary_indices = np.arange(inner_boundary_count)
        # int[move, boundary]: the change of each inner boundary
        moves = ((boundary_indices >= begins[:, None]) & (boundary_indices <= ends[:, None])).astype(int)
        moves = np.concatenate([moves, -moves, 2 * moves[begins == ends], -2 * moves[begins == ends]])
        while True:
            moved_cuts = np.repeat(best_cut[None], len(moves), 0)
            moved_cuts[:, 1:-1] += moves
            valid_cuts = moved_cuts[(np.diff(moved_cuts) > 0).all(1)]
            if not len(valid_cuts):
                return best_seconds, best_cut
            cut_seconds = self.problem.seconds(valid_cuts)
            if cut_seconds.min() >= best_seconds * (1 - _TOLERANCE):
                return best_seconds, best_cut
            best_seconds, best_cut = float(cut_seconds.min()), valid_cuts[cut_seconds.argmin()]

    def _partition(self, cut: np.ndarray, seconds: float, lower_bound: float) -> Partition:
        """Return the `Partition` with the boundaries of a cut."""
        # by feature, the values of the stages
        stage_values_of = dict(zip(FEATURES, self.problem.chain.stage_features(cut[None])[0].T.tolist(), strict=True))
        return Partition(
            boundaries=tuple(map(int, cut)),
            seconds=seconds,
            bytes=self.problem.bytes(cut),
            bound=lower_bound,
            costs=Costs(
                forward=tuple(stage_values_of["forward"]),
                input=tuple(stage_values_of["input_gradient"]),
                weight=tuple(stage_values_of["weight_gradient"]),
                links=tuple(self.problem.costs(cut[None])[1][0].tolist()),
                stash=tuple(map(math.ceil, stage_values_of["stash_bytes"])),
                pending=tuple(map(math.ceil, stage_values_of["between_bytes"])),
            ),
            schedule=self.problem.schedule.name,
        )
