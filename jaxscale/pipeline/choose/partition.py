"""Partition: the blocks of each stage, so that the pipeline is fastest and fits the memory of every device.

The objective is the executor's time: the schedule's seconds on the neighbour machine, with devices in the given order.
These are the longest path through the schedule's table, a maximum of linear functions of the stages' costs. Dynamic
programming over (stage, block) minimises one function, as in PipeDream and Pipe-torch, with a price list for each
device and a rate for each link. Three methods minimise the maximum: moving boundaries, branch and bound, and a game
between the dynamic program and the clock. In each turn of the game the program finds the best partition for the mean of
the paths so far, and the clock finds the longest path for the mean costs of the partitions so far. No partition is
faster than `Partition.bound`; a partition whose seconds meet it is optimal.

Memory is a maximum of linear functions too (`footprint.py`), and as in MadPipe and DAPPLE it depends on the schedule:
stage 0 of 1f1b holds p activations, the last stage one. Stages that exceed the memory by themselves are excluded.

Devices may be unlike (a price list for each kind), as may links. HetPipe runs several pipelines of unlike devices side
by side. In one program they share their partition, so the slowest device at each place counts (`virtual_workers.py`).

Left out: the order of devices, replicated stages, and stages of no block; the reduction of gradients and the update
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

_TURNS = 24  # of the game between program and clock
_BLUR = 0.002  # share of the seconds: paths so near the longest count too, so the clock's answers change little
_POWERS = (2, 4, 8)  # exponents of the stage bounds whose least sums give starts of the search
_REFINED = 2  # starts that are refined by moving boundaries
_FUNCTIONS = 4  # memory functions that branch and bound looks ahead for; all are checked in the end
_CLOSE = 1e-9  # relative distance at which a bound meets the seconds


class TooLarge(UserError):
    """No partition fits the memory.

    Args:
        message: error message for the user.
        ratio: needed memory divided by available memory, for the partition that needs least.
    """

    def __init__(self, message: str, ratio: float) -> None:
        super().__init__(message)
        self.ratio = ratio


@dataclasses.dataclass(frozen=True)
class Partition:
    """The blocks of each stage, and the seconds and bytes of the pipeline.

    Args:
        boundaries: stage s is blocks boundaries[s] to boundaries[s + 1] - 1.
        seconds: seconds of the schedule on the neighbour machine.
        bytes: the most bytes that each rank holds.
        bound: a lower bound on the seconds of every partition within the memory.
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
        """The blocks of each stage."""
        return tuple(map(range, self.boundaries, self.boundaries[1:]))

    @property
    def exact(self) -> bool:
        """Whether no partition is faster."""
        return self.seconds <= self.bound * (1 + _CLOSE)

    def __str__(self) -> str:
        gap = "no partition is faster" if self.exact else f"at most {self.seconds / self.bound - 1:.2%} above the best"
        lines = [f"{self.schedule}: {self.seconds:.6g} s, {gap}"]
        ranges = [f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else f"{blocks[0]}" for blocks in self.stages]
        width = max(map(len, ranges))
        stage_rows = zip(ranges, self.costs.forward, self.costs.input, self.costs.weight, strict=True)
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
        model: prices of the model; for unlike devices, its prices by kind of device.
        schedule: the actions of each rank, in order.
        devices: the device of each rank, in order; `None`: equal devices without a memory bound, on links that take no
            time.
        stash: what a stage keeps for a backward: the residuals, or its input, from which the backward runs the forward
            again.
        width: number of partial partitions that branch and bound keeps; with more it is slower and comes nearer to the
            best. `None`: 65536 / stages^2, at least 256, which solves 32 blocks on 4 devices exactly.

    Raises:
        TooLarge: no partition fits; the message has the least memory that suffices and ways to lower it.
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
    width = max(256, 65536 // schedule.stages**2) if width is None else width
    search = _Search(Problem(model, schedule, devices, stash), width)
    search.fit()
    return search.solve()


@dataclasses.dataclass
class _Search:
    """The search for the fastest partition of a problem.

    `width` is that of `partition`. A cut is an array of boundaries, int[stages + 1]. A linear is float[stage, feature],
    the coefficients of a linear function of the stages' features.
    """

    problem: Problem
    width: int
    smallest: np.ndarray | None = None
    """The partition that needs least memory, if memory is bounded."""

    def fit(self) -> None:
        """Exclude stages that exceed the memory by themselves, and find the partition that needs least.

        Raises:
            TooLarge: no partition fits.
        """
        memory_ratios = []
        for rank, linear in self.problem.footprints:
            memory = self.problem.devices[rank].memory_bytes
            if memory is not None:
                shared_linear = np.zeros_like(linear)
                shared_linear[self.problem.schedule.stages_of(rank)[0], INDEX["one"]] = self.problem.shared_bytes[rank]
                memory_ratios.append((linear + shared_linear) / memory)
        if not memory_ratios:
            return
        self.smallest, least_ratio = self._least_memory(memory_ratios)
        if least_ratio > 1 + 1e-12:
            raise self._too_large(self.smallest, least_ratio)
        for linear in memory_ratios:
            if (linear.any(1)).sum() == 1:
                self.problem.chain.exclude_above(linear, 1.0)
            else:
                self.problem.memory_functions.append(linear)

    def _least_memory(self, ratios: list[np.ndarray]) -> tuple[np.ndarray, float]:
        """Return a cut and its ratio of bytes to memory: at most 1 if the search finds such a cut, otherwise the least.

        `ratios` are linears, each the bytes of a rank at some moment divided by the memory of the rank.
        """
        chain = self.problem.chain
        largest_ratios = chain.largest(ratios)
        least_ratio, cut = chain.shortest(largest_ratios, use_max=True)
        if all(linear.any(1).sum() == 1 for linear in ratios):
            return cut, least_ratio
        ratio_functions = np.stack(ratios).reshape(len(ratios), -1)
        peaks = ratio_functions @ chain.stage_features(cut[None]).ravel()
        least_ratio, active_indices = float(peaks.max()), [int(peaks.argmax())]
        while least_ratio > 1:
            active_ratios = [ratios[index] for index in active_indices]
            cuts = chain.branch(active_ratios, (), largest_ratios, least_ratio * (1 - 1e-12), self.width).cuts
            if not len(cuts):
                return cut, least_ratio
            cut_ratios = chain.stage_features(cuts).reshape(len(cuts), -1) @ ratio_functions.T
            lowest_index = int(cut_ratios.max(1).argmin())
            binding_index = int(cut_ratios[lowest_index].argmax())
            if cut_ratios[lowest_index, binding_index] < least_ratio:
                least_ratio, cut = float(cut_ratios[lowest_index, binding_index]), cuts[lowest_index]
            elif binding_index in active_indices or len(active_indices) >= _FUNCTIONS:
                return cut, least_ratio
            active_indices.append(binding_index)
        return cut, least_ratio

    def _too_large(self, cut: np.ndarray, ratio: float) -> TooLarge:
        """Make the error for a model whose smallest partition needs `ratio` times the memory."""
        problem, schedule = self.problem, self.problem.schedule
        needed_bytes = problem.bytes(cut)
        limits = [device.memory_bytes for device in problem.devices]
        rank = max(range(len(needed_bytes)), key=lambda rank: needed_bytes[rank] / (limits[rank] or np.inf))
        hints = ["smaller microbatches"]
        if problem.stash == "residuals":
            hints.append("the stash of inputs alone (a stage's forward is run again), or a memory plan that keeps less")
        if max(schedule.live) > schedule.ranks * schedule.chunks:
            hints.append("a schedule with fewer activations alive (1f1b)")
        hints.append("more devices on the pipe axis, or weights sharded over data (ZeRO)")
        return TooLarge(
            f"{schedule.name}: no partition of {problem.blocks} blocks into {schedule.stages} stages fits. The "
            f"smallest needs {bytes_at_least(needed_bytes[rank])} on rank {rank}, which has "
            f"{bytes_at_least(int(limits[rank] or 0))} (a ratio of {ratio:.2f}). Ways to lower it: "
            f"{'; '.join(hints)}",
            ratio,
        )

    def solve(self) -> Partition:
        """Return the fastest partition of the search, with its bound."""
        chain, stage_bounds = self.problem.chain, self.problem.stage_bounds()
        scaled_bounds = stage_bounds / stage_bounds[np.isfinite(stage_bounds)].max()
        start_cuts = [chain.shortest(scaled_bounds, use_max=True)[1]]
        start_cuts += [chain.shortest(scaled_bounds**power)[1] for power in _POWERS]  # flatter than the least maximum
        start_cuts += [] if self.smallest is None else [self.smallest]
        cuts = np.unique(np.stack(start_cuts), axis=0)
        cut_seconds = self.problem.seconds(cuts)
        fastest_indices = cut_seconds.argsort(kind="stable")[:_REFINED]
        refinements = [self._refine(float(cut_seconds[index]), cuts[index]) for index in fastest_indices]
        best, cut = min(refinements, key=lambda pair: pair[0])  # the fewest seconds, and the partition that takes them
        chain.possible &= stage_bounds <= best * (1 + _CLOSE)
        best, cut, bound = self._branch_and_bound(best, cut, -np.inf, [], stage_bounds)
        if best > bound * (1 + _CLOSE):
            game_bound, linear, game_cuts = self._play_game(cut, best)
            cut_seconds = self.problem.seconds(game_cuts)
            if cut_seconds.min() < best:
                best, cut = self._refine(float(cut_seconds.min()), game_cuts[cut_seconds.argmin()])
            best, cut, bound = self._branch_and_bound(best, cut, max(bound, game_bound), [linear], stage_bounds)
        return self._partition(cut, float(best), float(min(bound, best)))

    def _branch_and_bound(
        self, best: float, cut: np.ndarray, bound: float, paths: list[np.ndarray], stage_bounds: np.ndarray
    ) -> tuple[float, np.ndarray, float]:
        """Return (seconds, cut, bound) after branch and bound, which is repeated while it finds a faster partition.

        Args:
            best: seconds of `cut`.
            cut: int[stages + 1], the fastest partition so far.
            bound: a lower bound on the seconds of every partition.
            paths: linears that are never above the seconds.
            stage_bounds: float[stage, begin, end], a lower bound on the seconds of every partition with that stage.
        """
        limits = self._tightest_functions(cut)
        while best > bound * (1 + _CLOSE):
            paths = [*paths, self.problem.path(cut)]
            survivors = self.problem.chain.branch(paths, limits, stage_bounds, best, self.width)
            if not len(survivors.cuts):
                return best, cut, max(bound, min(best, survivors.bound))
            seconds = self.problem.seconds(survivors.cuts)
            lowest_index = int(seconds.argmin())
            least_seconds = float(seconds[lowest_index])
            bound = max(bound, min(best, least_seconds, survivors.bound))
            is_faster = least_seconds < best * (1 - _CLOSE)
            if least_seconds < best:
                best, cut = least_seconds, survivors.cuts[lowest_index]
            if np.isinf(survivors.bound) or not is_faster:
                break
            best, cut = self._refine(best, cut)
        return best, cut, bound

    def _tightest_functions(self, cut: np.ndarray) -> list[np.ndarray]:
        """Return the memory functions whose values for a cut are nearest their limit, at most `_FUNCTIONS`."""
        stage_features = self.problem.chain.stage_features(cut[None])[0]
        return sorted(self.problem.memory_functions, key=lambda linear: -(stage_features * linear).sum())[:_FUNCTIONS]

    def _play_game(self, cut: np.ndarray, best: float) -> tuple[float, np.ndarray, np.ndarray]:
        """Play a game between the dynamic program and the clock, from a cut whose seconds are `best`.

        The clock finds the longest path for the mean of the costs so far. The program finds the shortest cut for the
        mean of the clock's paths so far. Return a lower bound on the seconds, the linear function that gives it, and
        the cuts that were tried, int[turn, stages + 1].
        """
        problem = self.problem
        blur = _BLUR * best
        pass_seconds, link_seconds = (costs[0] for costs in problem.costs(cut[None]))
        mean_path = np.zeros((problem.schedule.stages, len(FEATURES)))
        bound, best_linear, cuts = -np.inf, mean_path, []
        for turn in range(_TURNS):
            path = problem.linear(cut, problem.clock.path(pass_seconds, link_seconds, blur))
            mean_path = mean_path + (path - mean_path) * (2 / (turn + 2))
            lower_bound, cut = problem.chain.shortest(problem.chain.values(mean_path))
            if lower_bound > bound:
                bound, best_linear = lower_bound, mean_path
            cuts.append(cut)
            if best <= bound * (1 + _CLOSE):
                break
            costs = problem.costs(cut[None])
            pass_seconds = pass_seconds + (costs[0][0] - pass_seconds) / (turn + 4)
            link_seconds = link_seconds + (costs[1][0] - link_seconds) / (turn + 4)
        return bound, best_linear, np.stack(cuts)

    def _refine(self, best: float, cut: np.ndarray) -> tuple[float, np.ndarray]:
        """Move one boundary, or several neighbours together, while that makes a cut faster; return (seconds, cut).

        `best` is the seconds of the given cut.
        """
        inner_count = self.problem.schedule.stages - 1
        if not inner_count:
            return best, cut
        # each move shifts the inner boundaries begin to end by one block or two, left or right
        begin, end = np.triu_indices(inner_count)
        is_tried = (end - begin < 3) | (begin == 0) | (end == inner_count - 1)
        begin, end = begin[is_tried], end[is_tried]
        boundary = np.arange(inner_count)
        # int[move, boundary]: the change of each inner boundary
        moves = ((boundary >= begin[:, None]) & (boundary <= end[:, None])).astype(int)
        moves = np.concatenate([moves, -moves, 2 * moves[begin == end], -2 * moves[begin == end]])
        while True:
            cuts = np.repeat(cut[None], len(moves), 0)
            cuts[:, 1:-1] += moves
            cuts = cuts[(np.diff(cuts) > 0).all(1)]
            if not len(cuts):
                return best, cut
            seconds = self.problem.seconds(cuts)
            if seconds.min() >= best * (1 - _CLOSE):
                return best, cut
            best, cut = float(seconds.min()), cuts[seconds.argmin()]

    def _partition(self, cut: np.ndarray, seconds: float, bound: float) -> Partition:
        """Make the `Partition` with the boundaries of a cut."""
        columns = dict(zip(FEATURES, self.problem.chain.stage_features(cut[None])[0].T.tolist(), strict=True))
        return Partition(
            boundaries=tuple(map(int, cut)),
            seconds=seconds,
            bytes=self.problem.bytes(cut),
            bound=bound,
            costs=Costs(
                forward=tuple(columns["forward"]),
                input=tuple(columns["input_gradient"]),
                weight=tuple(columns["weight_gradient"]),
                links=tuple(self.problem.costs(cut[None])[1][0].tolist()),
                stash=tuple(map(math.ceil, columns["stash_bytes"])),
                pending=tuple(map(math.ceil, columns["between_bytes"])),
            ),
            schedule=self.problem.schedule.name,
        )
