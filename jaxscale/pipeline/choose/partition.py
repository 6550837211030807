"""Partition: the blocks of each stage, so that the pipeline is fastest and fits the memory of every device.

The objective is the executor's time: the schedule's seconds on the neighbour machine, with devices in the given order.
These are the longest path through the schedule's table, a maximum of linear functions of the stages' costs. Dynamic
programming over (stage, block) minimises one function, as in PipeDream and Pipe-torch, with a price list for each
device and a rate for each link. The maximum is minimised by a game between the two (the program answers the mean of the
paths so far, the clock the mean of the partitions), by moving boundaries, and by branch and bound. No partition is
faster than `Partition.bound`; a partition whose seconds meet it is optimal.

Memory is a maximum of linear functions too (`footprint.py`), and as in MadPipe and DAPPLE it depends on the schedule:
stage 0 of 1f1b holds p activations, the last stage one. Stages that exceed the memory by themselves are excluded.

Devices may be unlike (a price list for each kind), as may links. HetPipe runs several pipelines of unlike devices side
by side; in one program they share their partition, so at each place the slowest of them counts (`virtual_workers.py`).

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

from jaxscale.errors import UserError, unknown
from jaxscale.pipeline.choose.chain_cut import FEATURES, INDEX, BlockChain, features
from jaxscale.pipeline.choose.footprint import footprints
from jaxscale.pipeline.choose.price import Device, ModelPrices
from jaxscale.pipeline.clock.clock import Clock, Path
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.run.lifetimes import Stash
from jaxscale.pipeline.schedule import Kind, Schedule
from jaxscale.values.byte_sizes import bytes_at_least

_TURNS = 24  # of the game between program and clock
_BLUR = 0.002  # share of the seconds: paths so near the longest count too, so the clock's answers change little
_TIMED = 3  # the first features, which are seconds
_POWERS = (2, 4, 8)
_REFINED = 2  # starts that are refined by moving boundaries
_FUNCTIONS = 4  # memory functions that branch and bound looks ahead for; all are checked in the end
_CLOSE = 1e-9  # relative distance at which a bound meets the seconds


class TooLarge(UserError):
    """No partition fits.

    Args:
        message: for the user.
        ratio: needed memory over available memory, of the partition that needs least.
    """

    def __init__(self, message: str, ratio: float) -> None:
        super().__init__(message)
        self.ratio = ratio


@dataclasses.dataclass(frozen=True)
class Partition:
    """Blocks cut into stages.

    Args:
        boundaries: stage s is blocks boundaries[s] to boundaries[s + 1] - 1.
        seconds: of the schedule, on the neighbour machine.
        bytes: the most that each rank holds.
        bound: a lower bound on the seconds of every partition within the memory.
        costs: of the stages, for `simulate`.
        schedule: name of the schedule.

    Example:
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
        seconds = zip(ranges, self.costs.forward, self.costs.input, self.costs.weight, strict=True)
        for stage, (text, f, i, w) in enumerate(seconds):
            lines.append(f"  stage {stage}  blocks {text.ljust(width)}  F {f:.4g}  I {i:.4g}  W {w:.4g}")
        lines += [f"  rank {rank}  {bytes_at_least(count)}" for rank, count in enumerate(self.bytes)]
        return "\n".join(lines)


def partition(
    model: ModelPrices | Mapping[str, ModelPrices],
    schedule: Schedule,
    devices: Sequence[Device] | None = None,
    *,
    stash: Stash = "residuals",
    width: int | None = None,
) -> Partition:
    """The fastest partition of a model that fits its devices.

    Args:
        model: its prices; for unlike devices, the prices on each kind.
        schedule: the actions of each rank, in order.
        devices: of each rank in order; `None`: alike devices without a memory bound, on links that take no time.
        stash: what waits for a backward: residuals, or the stage's input, whose forward then runs again.
        width: partial partitions that branch and bound keeps; more are slower, and nearer the best. `None`:
            65536 / stages^2, 256 at least; then 32 blocks on 4 devices are solved exactly.

    Raises:
        TooLarge: nothing fits; the message names the least memory that suffices and ways to lower it.
        UserError: more stages than blocks, a number of devices that differs from the ranks, a kind without prices.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> prices = {"new": ModelPrices((Price(1, 1, 1),) * 9), "old": ModelPrices((Price(2, 2, 2),) * 9)}
        >>> devices = [Device(kind="new"), Device(kind="old")]
        >>> partition(prices, METHODS["lockstep"].schedule(2, 16), devices).boundaries
        (0, 6, 9)
    """
    problem = _Problem(model, schedule, devices, stash)
    width = max(256, 65536 // schedule.stages**2) if width is None else width
    problem.fit(width)
    return problem.solve(width)


class _Problem:
    """One model, schedule and list of devices, as features and linear functions."""

    def __init__(
        self,
        model: ModelPrices | Mapping[str, ModelPrices],
        schedule: Schedule,
        devices: Sequence[Device] | None,
        stash: Stash,
    ) -> None:
        self.schedule, self.stash = schedule, stash
        self.devices = tuple(devices) if devices is not None else (Device(),) * schedule.ranks
        if len(self.devices) != schedule.ranks:
            raise UserError(f"partition: {len(self.devices)} devices for the {schedule.ranks} ranks of {schedule.name}")
        kinds = sorted({device.kind for device in self.devices})
        models = dict.fromkeys(kinds, model) if isinstance(model, ModelPrices) else dict(model)
        for kind in kinds:
            if kind not in models:
                raise unknown("kind of device", kind, models)
        self.models = [models[kind] for kind in kinds]
        self.blocks = len(self.models[0].blocks)
        for kind, prices in zip(kinds, self.models, strict=True):
            if len(prices.blocks) != self.blocks:
                raise UserError(f"prices of {len(prices.blocks)} blocks on {kind!r}, of {self.blocks} on {kinds[0]!r}")
        if schedule.stages > self.blocks:
            raise UserError(
                f"{schedule.name} of {schedule.ranks} ranks has {schedule.stages} stages, the model {self.blocks} "
                "blocks: a stage needs one block at least; use fewer devices on the pipe axis, or fewer chunks (v)"
            )
        if len(kinds) > 1 and len(schedule.routes) > 1:
            raise UserError(
                f"{schedule.name} does every stage on several devices, and they are unlike ({', '.join(kinds)}): "
                "use a schedule of one route, such as 1f1b"
            )
        rank_kind = [kinds.index(device.kind) for device in self.devices]
        tables = [features(prices.blocks, prices.first, prices.last, stash == "input") for prices in self.models]
        self.chain = BlockChain(schedule.stages, tables, [rank_kind[rank] for rank in schedule.routes[0]])
        self.clock = Clock(schedule)
        self._pass_stages = np.array([stage for _, stage in self.clock.passes])
        self._pass_features = np.array([[name in _SECONDS[kind] for name in FEATURES] for kind, _ in self.clock.passes])
        self._pass_features = self._pass_features.astype(float)
        passes = np.arange(len(self._pass_stages))
        self._pass_weights = np.zeros((schedule.stages, _TIMED, len(passes)))
        self._pass_weights[self._pass_stages, :, passes] = self._pass_features[:, :_TIMED]
        self._pass_weights = self._pass_weights.reshape(-1, len(passes))
        self._crossings = np.array(self.clock.crossings, int).reshape(-1, 2)
        self._message_features = np.zeros((len(self._crossings), len(FEATURES)))
        for row, link in zip(self._message_features, self._crossings[:, 1], strict=True):
            row[[INDEX["leaves"], INDEX["one"]]] = 1 / self.devices[link].link, self.devices[link].latency
        self.footprints = footprints(schedule)
        self.shared_bytes = [self.models[kind].shared_bytes for kind in rank_kind]
        self.memory_functions: list[np.ndarray] = []
        self.smallest: np.ndarray | None = None

    # costs of a partition

    def costs(self, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the clock's passes, float[cut, pass], and of messages on each link, float[cut, rank]."""
        stage_features = self.chain.stage_features(cuts)
        passes = stage_features[:, :, :_TIMED].reshape(len(cuts), -1) @ self._pass_weights
        links = np.zeros((len(cuts), self.schedule.ranks))
        for stage, link in self._crossings:
            device = self.devices[link]
            seconds = stage_features[:, stage, INDEX["leaves"]] / device.link + device.latency
            np.maximum(links[:, link], seconds, out=links[:, link])
        return passes, links

    def seconds(self, cuts: np.ndarray) -> np.ndarray:
        """Seconds of each of a batch of partitions, infinite for those that do not fit the memory."""
        parts = [self.clock.seconds(*self.costs(cuts[at : at + 1024])) for at in range(0, len(cuts), 1024)]
        return np.where(self.fits(cuts), np.concatenate(parts), np.inf)

    def fits(self, cuts: np.ndarray) -> np.ndarray:
        """bool[cut]: whether each of a batch of partitions fits every device's memory."""
        stages = np.arange(self.schedule.stages)
        fits = np.all(self.chain.possible[stages, cuts[:, :-1], cuts[:, 1:]], axis=1)
        if self.memory_functions:
            functions = np.stack(self.memory_functions).reshape(len(self.memory_functions), -1)
            ratios = self.chain.stage_features(cuts).reshape(len(cuts), -1) @ functions.T
            fits &= ratios.max(1) <= 1 + 1e-12
        return fits

    def path(self, cut: np.ndarray) -> np.ndarray:
        """float[stage, feature]: the linear function whose value is the seconds of a partition."""
        passes, links = self.costs(cut[None])
        return self._linear(cut, self.clock.path(passes[0], links[0]))

    def _linear(self, cut: np.ndarray, path: Path) -> np.ndarray:
        """A path as a linear function; on each link the longest message counts."""
        linear = np.zeros((self.schedule.stages, len(FEATURES)))
        np.add.at(linear, self._pass_stages, path.passes[:, None] * self._pass_features)
        if len(self._crossings):
            seconds = (self.chain.stage_features(cut[None])[0, self._crossings[:, 0]] * self._message_features).sum(1)
            for link in np.flatnonzero(path.links):
                messages = np.flatnonzero(self._crossings[:, 1] == link)
                if len(messages):
                    index = messages[seconds[messages].argmax()]
                    linear[self._crossings[index, 0]] += path.links[link] * self._message_features[index]
        return linear

    def bytes(self, cut: np.ndarray) -> tuple[int, ...]:
        """The most bytes that each rank holds."""
        stage_features = self.chain.stage_features(cut[None])[0]
        peaks = [0.0] * self.schedule.ranks
        for rank, linear in self.footprints:
            peaks[rank] = max(peaks[rank], float((stage_features * linear).sum()) + self.shared_bytes[rank])
        return tuple(int(np.ceil(count - 1e-6)) for count in peaks)

    # memory

    def fit(self, width: int) -> None:
        """Exclude stages that exceed the memory by themselves, and find the partition that needs least.

        Raises:
            UserError: nothing fits.
        """
        ratios = []
        for rank, linear in self.footprints:
            memory = self.devices[rank].memory_bytes
            if memory is not None:
                shared = np.zeros_like(linear)
                shared[self.schedule.stages_of(rank)[0], INDEX["one"]] = self.shared_bytes[rank]
                ratios.append((linear + shared) / memory)
        if not ratios:
            return
        self.smallest, least = self._least_memory(ratios, width)
        if least > 1 + 1e-12:
            raise self._too_large(self.smallest, least)
        for linear in ratios:
            if (linear.any(1)).sum() == 1:
                self.chain.allow(linear, 1.0)
            else:
                self.memory_functions.append(linear)

    def _least_memory(self, ratios: list[np.ndarray], width: int) -> tuple[np.ndarray, float]:
        """A partition whose largest ratio is at most 1, else the one whose largest ratio is least."""
        largest = self.chain.largest(ratios)
        best, cut = self.chain.shortest(largest, most=True)
        if all(linear.any(1).sum() == 1 for linear in ratios):
            return cut, best
        functions = np.stack(ratios)
        functions = functions.reshape(len(functions), -1)
        peaks = functions @ self.chain.stage_features(cut[None]).ravel()
        best, active = float(peaks.max()), [int(peaks.argmax())]
        while best > 1:
            cuts = self.chain.branch([ratios[index] for index in active], (), largest, best * (1 - 1e-12), width).cuts
            if not len(cuts):
                return cut, best
            needs = self.chain.stage_features(cuts).reshape(len(cuts), -1) @ functions.T
            lowest = int(needs.max(1).argmin())
            binding = int(needs[lowest].argmax())
            if needs[lowest, binding] < best:
                best, cut = float(needs[lowest, binding]), cuts[lowest]
            elif binding in active or len(active) >= _FUNCTIONS:
                return cut, best
            active.append(binding)
        return cut, best

    def _too_large(self, cut: np.ndarray, ratio: float) -> TooLarge:
        needs = self.bytes(cut)
        limits = [device.memory_bytes for device in self.devices]
        rank = max(range(len(needs)), key=lambda rank: needs[rank] / (limits[rank] or np.inf))
        memory = int(limits[rank] or 0)
        hints = ["smaller microbatches"]
        if self.stash == "residuals":
            hints.append("the stash of inputs alone (a stage's forward is run again), or a memory plan that keeps less")
        if max(self.schedule.live) * self.schedule.ranks > self.schedule.ranks**2 * self.schedule.chunks:
            hints.append("a schedule with fewer activations alive (1f1b)")
        hints.append("more devices on the pipe axis, or weights sharded over data (ZeRO)")
        return TooLarge(
            f"{self.schedule.name}: no partition of {self.blocks} blocks into {self.schedule.stages} stages fits; the "
            f"smallest needs {bytes_at_least(needs[rank])} on rank {rank}, which has "
            f"{bytes_at_least(memory)} ({ratio:.2f} times as much); ways to lower it: {'; '.join(hints)}",
            ratio,
        )

    # time

    def solve(self, width: int) -> Partition:
        """The fastest partition of the search, with the bound."""
        stage_bounds = self._stage_bounds()
        scaled_bounds = stage_bounds / stage_bounds[np.isfinite(stage_bounds)].max()
        starts = [self.chain.shortest(scaled_bounds, most=True)[1]]
        starts += [self.chain.shortest(scaled_bounds**power)[1] for power in _POWERS]  # flatter than the least maximum
        starts += [] if self.smallest is None else [self.smallest]
        cuts = np.unique(np.stack(starts), axis=0)
        seconds = self.seconds(cuts)
        fastest = seconds.argsort(kind="stable")[:_REFINED]
        refinements = [self._refine(float(seconds[index]), cuts[index]) for index in fastest]
        best, cut = min(refinements, key=lambda pair: pair[0])
        self.chain.possible &= stage_bounds <= best * (1 + _CLOSE)
        best, cut, bound = self._branch_and_bound(best, cut, -np.inf, [], stage_bounds, width)
        if best > bound * (1 + _CLOSE):
            game_bound, linear, game_cuts = self._play(cut, best)
            seconds = self.seconds(game_cuts)
            if seconds.min() < best:
                best, cut = self._refine(float(seconds.min()), game_cuts[seconds.argmin()])
            best, cut, bound = self._branch_and_bound(best, cut, max(bound, game_bound), [linear], stage_bounds, width)
        return self._partition(cut, float(best), float(min(bound, best)))

    def _branch_and_bound(
        self, best: float, cut: np.ndarray, bound: float, paths: list[np.ndarray], stage_bounds: np.ndarray, width: int
    ) -> tuple[float, np.ndarray, float]:
        """Branch and bound, repeated while it finds a faster partition: seconds, partition, bound."""
        limits = self._tightest(cut)
        while best > bound * (1 + _CLOSE):
            paths = [*paths, self.path(cut)]
            survivors = self.chain.branch(paths, limits, stage_bounds, best, width)
            if not len(survivors.cuts):
                return best, cut, max(bound, min(best, survivors.bound))
            seconds = self.seconds(survivors.cuts)
            lowest = int(seconds.argmin())
            least = float(seconds[lowest])
            bound = max(bound, min(best, least, survivors.bound))
            improved = least < best * (1 - _CLOSE)
            if least < best:
                best, cut = least, survivors.cuts[lowest]
            if np.isinf(survivors.bound) or not improved:
                break
            best, cut = self._refine(best, cut)
        return best, cut, bound

    def _tightest(self, cut: np.ndarray) -> list[np.ndarray]:
        """The memory functions that are nearest their limit."""
        stage_features = self.chain.stage_features(cut[None])[0]
        return sorted(self.memory_functions, key=lambda linear: -(stage_features * linear).sum())[:_FUNCTIONS]

    def _stage_bounds(self) -> np.ndarray:
        """float[stage, begin, end]: a lower bound on the seconds by one stage: all its passes on its busiest rank."""
        linear = np.zeros((self.schedule.stages, len(FEATURES)))
        number = {key: index for index, key in enumerate(self.clock.passes)}
        for order in self.schedule.orders:
            work = np.zeros_like(linear)
            for action in order:
                work[action.stage] += self._pass_features[number[action.kind, action.stage]]
            larger = work.sum(1) > linear.sum(1)
            linear[larger] = work[larger]
        return self.chain.values(linear)

    def _play(self, cut: np.ndarray, best: float) -> tuple[float, np.ndarray, np.ndarray]:
        """A game between program and clock: a bound, its linear function, and the partitions that were tried.

        The clock answers the mean of the costs so far, the program the mean of the clock's paths so far.
        """
        blur = _BLUR * best
        passes, links = (costs[0] for costs in self.costs(cut[None]))
        average = np.zeros((self.schedule.stages, len(FEATURES)))
        bound, best_linear, cuts = -np.inf, average, []
        for turn in range(_TURNS):
            path = self._linear(cut, self.clock.path(passes, links, blur))
            average = average + (path - average) * (2 / (turn + 2))
            value, cut = self.chain.shortest(self.chain.values(average))
            if value > bound:
                bound, best_linear = value, average
            cuts.append(cut)
            if best <= bound * (1 + _CLOSE):
                break
            costs = self.costs(cut[None])
            passes = passes + (costs[0][0] - passes) / (turn + 4)
            links = links + (costs[1][0] - links) / (turn + 4)
        return bound, best_linear, np.stack(cuts)

    def _refine(self, best: float, cut: np.ndarray) -> tuple[float, np.ndarray]:
        """A partition after moving one boundary or several neighbours together, while that makes it faster."""
        inner = self.schedule.stages - 1
        if not inner:
            return best, cut
        begin, end = np.triu_indices(inner)
        selection = (end - begin < 3) | (begin == 0) | (end == inner - 1)
        begin, end = begin[selection], end[selection]
        boundary = np.arange(inner)
        moves = ((boundary >= begin[:, None]) & (boundary <= end[:, None])).astype(int)
        moves = np.concatenate([moves, -moves, 2 * moves[begin == end], -2 * moves[begin == end]])
        while True:
            cuts = np.repeat(cut[None], len(moves), 0)
            cuts[:, 1:-1] += moves
            cuts = cuts[(np.diff(cuts) > 0).all(1)]
            if not len(cuts):
                return best, cut
            seconds = self.seconds(cuts)
            if seconds.min() >= best * (1 - _CLOSE):
                return best, cut
            best, cut = float(seconds.min()), cuts[seconds.argmin()]

    def _partition(self, cut: np.ndarray, seconds: float, bound: float) -> Partition:
        columns = dict(zip(FEATURES, self.chain.stage_features(cut[None])[0].T.tolist(), strict=True))
        return Partition(
            boundaries=tuple(map(int, cut)),
            seconds=seconds,
            bytes=self.bytes(cut),
            bound=bound,
            costs=Costs(
                forward=tuple(columns["forward"]),
                input=tuple(columns["input_gradient"]),
                weight=tuple(columns["weight_gradient"]),
                links=tuple(self.costs(cut[None])[1][0].tolist()),
                stash=tuple(map(math.ceil, columns["stash_bytes"])),
                pending=tuple(map(math.ceil, columns["between_bytes"])),
            ),
            schedule=self.schedule.name,
        )


_SECONDS: dict[Kind, tuple[str, ...]] = {
    Kind.F: ("forward",),
    Kind.I: ("input_gradient",),
    Kind.W: ("weight_gradient",),
    Kind.B: ("input_gradient", "weight_gradient"),
    Kind.U: (),
}
