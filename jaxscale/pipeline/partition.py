"""Partition: which blocks make which stage, so that the pipeline is fastest and every device's memory suffices.

The objective is what the executor takes: the schedule's seconds on the neighbour machine, with devices in the given
order. Those are the longest path through the schedule's table, a maximum of linear functions of the stages' costs. One
function is made least by dynamic programming over (stage, block) as in PipeDream and Pipe-torch, with each device's own
price list and each link's own rate; the maximum by playing the two against each other (the program answers the mean
of the paths so far, the clock the mean of the partitions), by moving boundaries, and
by branch and bound. `Partition.bound` tells what no partition can beat; where it meets the seconds, none is faster.

Memory is a maximum of linear functions too (`footprint.py`), and as in MadPipe and DAPPLE it depends on the schedule:
stage 0 of 1f1b waits with p activations, the last with one. A stage that alone needs too much is never looked at.

Devices may be unlike (a price list for each kind), as may links. HetPipe runs several pipelines of unlike devices side
by side; in one program they share their partition, so at each place the slowest of them counts (`virtual_workers.py`).

Left out: which device stands where, replicated stages, and stages of no block; the reduction of gradients and the
update after the last tick.

References:
    Narayanan et al. 2019, "PipeDream" (SOSP); Zhan and Zhang 2019, "Pipe-torch" (CBD); Park et al. 2020, "HetPipe"
    (arXiv:2005.14038); Fan et al. 2021, "DAPPLE" (arXiv:2007.01045); Beaumont, Eyraud-Dubois and Shilova 2021,
    "MadPipe" (hal-03025305).
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxscale.errors import UserError, unknown
from jaxscale.pipeline.chain_cut import AT, FEATURES, Chain, features
from jaxscale.pipeline.clock import Clock, Path
from jaxscale.pipeline.costs import Costs
from jaxscale.pipeline.footprint import footprints
from jaxscale.pipeline.price import Device, Price
from jaxscale.pipeline.schedule import Kind, Schedule
from jaxscale.pipeline.tables import Stash
from jaxscale.values.byte_sizes import bytes_at_least

_TURNS = 24  # of program against clock
_BLUR = 0.002  # of the seconds: paths so near the longest count too, so that the clock's answers change little
_TIMED = 3  # features that are seconds, the first ones
_POWERS = (2, 4, 8)
_MOVED = 2  # starts whose boundaries are moved
_FUNCTIONS = 4  # of memory that branch and bound looks ahead for; all are checked in the end
_CLOSE = 1e-9  # a bound so near the seconds meets them


@dataclasses.dataclass(frozen=True)
class Model:
    """The prices of a model on one kind of device.

    Args:
        blocks: in order.
        first: what the first stage does before its blocks (the embedding).
        last: what the last does behind them (the head and the loss, with its chunked logits as working bytes).
        shared_bytes: on every device: what all stages read (embedding and head gathered, their gradients).
    """

    blocks: tuple[Price, ...]
    first: Price | None = None
    last: Price | None = None
    shared_bytes: float = 0

    def share(self, parts: float) -> "Model":
        """The prices of a microbatch of so many, where these are of a whole batch and its time is in proportion."""
        first, last = (None if price is None else price.share(parts) for price in (self.first, self.last))
        return Model(tuple(block.share(parts) for block in self.blocks), first, last, self.shared_bytes)


class TooLarge(UserError):
    """No partition fits.

    Args:
        message: what the user reads.
        ratio: how many times the memory is needed, by the partition that needs least.
    """

    def __init__(self, message: str, ratio: float) -> None:
        super().__init__(message)
        self.ratio = ratio


@dataclasses.dataclass(frozen=True)
class Partition:
    """Blocks cut into stages.

    Args:
        boundaries: stage s is blocks boundaries[s] to boundaries[s + 1] - 1.
        seconds: what the schedule takes, on the neighbour machine.
        bytes: that each rank holds at most.
        bound: seconds that no partition within the memory is below.
        costs: of the stages, as `simulate` takes them.
        schedule: name of the schedule.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> model = Model((Price(1, 1, 1),) * 6, last=Price(2, 2, 2))
        >>> found = partition(model, METHODS["gpipe"].schedule(2, 4))
        >>> found.boundaries, found.seconds, found.exact
        ((0, 4, 6), 60.0, True)
        >>> print(found)
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
        wide = max(map(len, ranges))
        for stage, text in enumerate(ranges):
            f, i, w = (getattr(self.costs, name)[stage] for name in ("forward", "input", "weight"))
            lines.append(f"  stage {stage}  blocks {text.ljust(wide)}  F {f:.4g}  I {i:.4g}  W {w:.4g}")
        lines += [f"  rank {rank}  {bytes_at_least(count)}" for rank, count in enumerate(self.bytes)]
        return "\n".join(lines)


def partition(
    model: Model | Mapping[str, Model],
    schedule: Schedule,
    devices: Sequence[Device] | None = None,
    *,
    stash: Stash = "residuals",
    width: int | None = None,
) -> Partition:
    """The fastest partition of a model that fits its devices.

    Args:
        model: its prices; where devices are unlike, those of each kind.
        schedule: who does what, in order.
        devices: of each rank in order; `None`: alike, without a bound on memory, links that take no time.
        stash: what waits for a backward: residuals, or what enters the stage, whose forward is then run again.
        width: partial partitions that branch and bound keeps; more of them are slower, and nearer the best. `None`:
            65536 / stages^2, 256 at least; then 32 blocks on 4 devices are solved exactly.

    Raises:
        TooLarge: nothing fits: with the least memory that would do, and what would lower it.
        UserError: more stages than blocks, another number of devices than ranks, a kind without prices.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> prices = {"new": Model((Price(1, 1, 1),) * 9), "old": Model((Price(2, 2, 2),) * 9)}
        >>> devices = [Device(kind="new"), Device(kind="old")]
        >>> partition(prices, METHODS["lockstep"].schedule(2, 16), devices).boundaries
        (0, 6, 9)
    """
    problem = _Problem(model, schedule, devices, stash)
    width = max(256, 65536 // schedule.stages**2) if width is None else width
    if problem.bounded:
        problem.fit(width)
    return problem.solve(width)


class _Problem:
    """One model, schedule and list of devices, as features and linear functions."""

    def __init__(
        self,
        model: Model | Mapping[str, Model],
        schedule: Schedule,
        devices: Sequence[Device] | None,
        stash: Stash,
    ) -> None:
        self.schedule, self.stash = schedule, stash
        self.devices = tuple(devices) if devices is not None else (Device(),) * schedule.ranks
        if len(self.devices) != schedule.ranks:
            raise UserError(f"partition: {len(self.devices)} devices for the {schedule.ranks} ranks of {schedule.name}")
        kinds = sorted({device.kind for device in self.devices})
        models = dict.fromkeys(kinds, model) if isinstance(model, Model) else dict(model)
        for kind in kinds:
            if kind not in models:
                raise unknown("kind of device", kind, models)
        self.models = [models[kind] for kind in kinds]
        self.blocks = len(self.models[0].blocks)
        for kind, one in zip(kinds, self.models, strict=True):
            if len(one.blocks) != self.blocks:
                raise UserError(f"prices of {len(one.blocks)} blocks on {kind!r}, of {self.blocks} on {kinds[0]!r}")
        if schedule.stages > self.blocks:
            raise UserError(
                f"{schedule.name} of {schedule.ranks} ranks has {schedule.stages} stages, the model {self.blocks} "
                "blocks: a stage needs one block at least; take fewer devices on the pipe axis, or fewer chunks (v)"
            )
        if len(kinds) > 1 and len(schedule.routes) > 1:
            raise UserError(
                f"{schedule.name} does every stage on several devices, and they are unlike ({', '.join(kinds)}): "
                "take a schedule of one route, such as 1f1b"
            )
        rank_kind = [kinds.index(device.kind) for device in self.devices]
        tables = [features(one.blocks, one.first, one.last, stash == "input") for one in self.models]
        self.chain = Chain(schedule.stages, tables, [rank_kind[rank] for rank in schedule.routes[0]])
        self.clock = Clock(schedule)
        self._passes = np.zeros((len(self.clock.passes), len(FEATURES)))
        for index, (kind, _) in enumerate(self.clock.passes):
            self._passes[index, [AT[name] for name in _SECONDS[kind]]] = 1
        self._stage = np.array([stage for _, stage in self.clock.passes])
        self._timed = np.zeros((schedule.stages, _TIMED, len(self._stage)))
        self._timed[self._stage, :, np.arange(len(self._stage))] = self._passes[:, :_TIMED]
        self._timed = self._timed.reshape(-1, len(self._stage))
        self._senders = [self.devices[link] for _, link in self.clock.crossings]
        self._crossings = np.array(self.clock.crossings, int).reshape(-1, 2)
        self._messages = np.zeros((len(self._crossings), len(FEATURES)))
        for index, (_, link) in enumerate(self._crossings):
            self._messages[index, AT["leaves"]] = 1 / self.devices[link].link
            self._messages[index, AT["one"]] = self.devices[link].latency
        self.held = footprints(schedule)
        self.shared = [self.models[kind].shared_bytes for kind in rank_kind]
        self.bounded = any(device.memory_bytes is not None for device in self.devices)
        self.holds: list[np.ndarray] = []
        self.start: np.ndarray | None = None

    # what a partition takes

    def costs(self, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the clock's passes, float[cut, pass], and of messages, float[cut, rank]."""
        found = self.chain.of(cuts)
        passes = found[:, :, :_TIMED].reshape(len(cuts), -1) @ self._timed
        links = np.zeros((len(cuts), self.schedule.ranks))
        for (stage, link), device in zip(self._crossings, self._senders, strict=True):
            takes = found[:, stage, AT["leaves"]] / device.link + device.latency
            np.maximum(links[:, link], takes, out=links[:, link])
        return passes, links

    def seconds(self, cuts: np.ndarray) -> np.ndarray:
        """Seconds of each of a batch of partitions, infinite where the memory does not suffice."""
        parts = [self.clock.seconds(*self.costs(cuts[at : at + 1024])) for at in range(0, len(cuts), 1024)]
        return np.where(self.fits(cuts), np.concatenate(parts), np.inf)

    def fits(self, cuts: np.ndarray) -> np.ndarray:
        """Which of a batch of partitions every device has the memory for."""
        stages = np.arange(self.schedule.stages)
        fits = np.all(self.chain.possible[stages, cuts[:, :-1], cuts[:, 1:]], axis=1)
        if self.holds:
            held = self.chain.of(cuts).reshape(len(cuts), -1) @ np.stack(self.holds).reshape(len(self.holds), -1).T
            fits &= held.max(1) <= 1 + 1e-12
        return fits

    def path(self, cut: np.ndarray) -> np.ndarray:
        """float[stage, feature]: the linear function that the seconds of a partition are the value of."""
        passes, links = self.costs(cut[None])
        return self._linear(cut, self.clock.path(passes[0], links[0]))

    def _linear(self, cut: np.ndarray, path: Path) -> np.ndarray:
        """A path as a linear function; of the messages on a link that of the stage where they are largest counts."""
        linear = np.zeros((self.schedule.stages, len(FEATURES)))
        np.add.at(linear, self._stage, path.passes[:, None] * self._passes)
        if len(self._crossings):
            takes = (self.chain.of(cut[None])[0, self._crossings[:, 0]] * self._messages).sum(1)
            for link in np.flatnonzero(path.links):
                on = np.flatnonzero(self._crossings[:, 1] == link)
                if len(on):
                    index = on[takes[on].argmax()]
                    linear[self._crossings[index, 0]] += path.links[link] * self._messages[index]
        return linear

    def bytes(self, cut: np.ndarray) -> tuple[int, ...]:
        """Bytes that each rank holds at most."""
        found = self.chain.of(cut[None])[0]
        most = [0.0] * self.schedule.ranks
        for rank, linear in self.held:
            most[rank] = max(most[rank], float((found * linear).sum()) + self.shared[rank])
        return tuple(int(np.ceil(count - 1e-6)) for count in most)

    # memory

    def fit(self, width: int) -> None:
        """Leave no stage that alone needs too much, and start from the partition that needs least.

        Raises:
            UserError: nothing fits.
        """
        ratios = []
        for rank, linear in self.held:
            memory = self.devices[rank].memory_bytes
            if memory is not None:
                shared = np.zeros_like(linear)
                shared[self.schedule.stages_of(rank)[0], AT["one"]] = self.shared[rank]
                ratios.append((linear + shared) / memory)
        self.start, least = self._least_memory(ratios, width)
        if least > 1 + 1e-12:
            raise self._too_large(self.start, least)
        for linear in ratios:
            if (linear.any(1)).sum() == 1:
                self.chain.allow(linear, 1.0)
            else:
                self.holds.append(linear)

    def _least_memory(self, ratios: list[np.ndarray], width: int) -> tuple[np.ndarray, float]:
        """A partition whose largest ratio is at most 1, else that whose largest is least."""
        alone = self.chain.largest(ratios)
        best, cut = self.chain.shortest(alone, most=True)
        if all(linear.any(1).sum() == 1 for linear in ratios):
            return cut, best
        every = np.stack(ratios)
        every = every.reshape(len(every), -1)
        most = every @ self.chain.of(cut[None]).ravel()
        best, used = float(most.max()), [int(most.argmax())]
        while best > 1:
            cuts = self.chain.branch([ratios[index] for index in used], (), alone, best * (1 - 1e-12), width).cuts
            if not len(cuts):
                return cut, best
            needs = self.chain.of(cuts).reshape(len(cuts), -1) @ every.T
            lowest = int(needs.max(1).argmin())
            binding = int(needs[lowest].argmax())
            if needs[lowest, binding] < best:
                best, cut = float(needs[lowest, binding]), cuts[lowest]
            elif binding in used or len(used) >= _FUNCTIONS:
                return cut, best
            used.append(binding)
        return cut, best

    def _too_large(self, cut: np.ndarray, ratio: float) -> TooLarge:
        needs = self.bytes(cut)
        given = [device.memory_bytes for device in self.devices]
        rank = max(range(len(needs)), key=lambda rank: needs[rank] / (given[rank] or np.inf))
        memory = int(given[rank] or 0)
        lower = ["smaller microbatches"]
        if self.stash == "residuals":
            lower.append("the stash of inputs alone (a stage's forward is run again), or a memory plan that keeps less")
        if max(self.schedule.live) * self.schedule.ranks > self.schedule.ranks**2 * self.schedule.chunks:
            lower.append("a schedule with fewer activations alive (1f1b)")
        lower.append("more devices on the pipe axis, or weights sharded over data (ZeRO)")
        return TooLarge(
            f"{self.schedule.name}: no partition of {self.blocks} blocks into {self.schedule.stages} stages fits; the "
            f"one that needs least needs {bytes_at_least(needs[rank])} on rank {rank}, which has "
            f"{bytes_at_least(memory)} ({ratio:.2f} times as much); what would lower it: {'; '.join(lower)}",
            ratio,
        )

    # time

    def solve(self, width: int) -> Partition:
        """The fastest partition that was found, with the bound."""
        alone = self._alone()
        scaled = alone / alone[np.isfinite(alone)].max()
        starts = [self.chain.shortest(scaled, most=True)[1]]
        starts += [self.chain.shortest(scaled**power)[1] for power in _POWERS]  # flatter than the least maximum
        starts += [] if self.start is None else [self.start]
        cuts = np.unique(np.stack(starts), axis=0)
        seconds = self.seconds(cuts)
        moved = [self._moved(float(seconds[index]), cuts[index]) for index in seconds.argsort(kind="stable")[:_MOVED]]
        best, cut = min(moved, key=lambda one: one[0])
        self.chain.possible &= alone <= best * (1 + _CLOSE)
        best, cut, bound = self._branched(best, cut, -np.inf, [], alone, width)
        if best > bound * (1 + _CLOSE):
            value, weights, played = self._play(cut, best)
            seconds = self.seconds(played)
            if seconds.min() < best:
                best, cut = self._moved(float(seconds.min()), played[seconds.argmin()])
            best, cut, bound = self._branched(best, cut, max(bound, value), [weights], alone, width)
        return self._value(cut, float(best), float(min(bound, best)))

    def _branched(
        self, best: float, cut: np.ndarray, bound: float, paths: list[np.ndarray], alone: np.ndarray, width: int
    ) -> tuple[float, np.ndarray, float]:
        """Branch and bound from a partition on, again while it finds a faster one: seconds, partition, bound."""
        holds = self._tightest(cut)
        while best > bound * (1 + _CLOSE):
            paths = [*paths, self.path(cut)]
            found = self.chain.branch(paths, holds, alone, best, width)
            if not len(found.cuts):
                return best, cut, max(bound, min(best, found.bound))
            seconds = self.seconds(found.cuts)
            lowest = int(seconds.argmin())
            better = float(seconds[lowest])
            bound = max(bound, min(best, better, found.bound))
            improved = better < best * (1 - _CLOSE)
            if better < best:
                best, cut = better, found.cuts[lowest]
            if np.isinf(found.bound) or not improved:
                break
            best, cut = self._moved(best, cut)
        return best, cut, bound

    def _tightest(self, cut: np.ndarray) -> list[np.ndarray]:
        """Of the linear functions of memory those that are nearest their limit."""
        found = self.chain.of(cut[None])[0]
        return sorted(self.holds, key=lambda linear: -(found * linear).sum())[:_FUNCTIONS]

    def _alone(self) -> np.ndarray:
        """float[stage, begin, end]: a bound on the seconds by one stage: all its passes on the rank that has most."""
        linear = np.zeros((self.schedule.stages, len(FEATURES)))
        number = {one: index for index, one in enumerate(self.clock.passes)}
        for order in self.schedule.orders:
            here = np.zeros_like(linear)
            for action in order:
                here[action.stage] += self._passes[number[action.kind, action.stage]]
            more = here.sum(1) > linear.sum(1)
            linear[more] = here[more]
        return self.chain.values(linear)

    def _play(self, cut: np.ndarray, best: float) -> tuple[float, np.ndarray, np.ndarray]:
        """The program against the clock: a bound, the linear function that it is of, and the partitions it went by.

        The clock answers the mean of the costs so far, the program the mean of the clock's paths so far.
        """
        blur = _BLUR * best
        passes, links = (costs[0] for costs in self.costs(cut[None]))
        average = np.zeros((self.schedule.stages, len(FEATURES)))
        bound, weights, played = -np.inf, average, []
        for turn in range(_TURNS):
            path = self._linear(cut, self.clock.path(passes, links, blur))
            average = average + (path - average) * (2 / (turn + 2))
            value, cut = self.chain.shortest(self.chain.values(average))
            if value > bound:
                bound, weights = value, average
            played.append(cut)
            if best <= bound * (1 + _CLOSE):
                break
            answer = self.costs(cut[None])
            passes = passes + (answer[0][0] - passes) / (turn + 4)
            links = links + (answer[1][0] - links) / (turn + 4)
        return bound, weights, np.stack(played)

    def _moved(self, best: float, cut: np.ndarray) -> tuple[float, np.ndarray]:
        """A partition after moving boundaries, one or several neighbours together, while that makes it faster."""
        inner = self.schedule.stages - 1
        if not inner:
            return best, cut
        begin, end = np.triu_indices(inner)
        near = (end - begin < 3) | (begin == 0) | (end == inner - 1)
        begin, end = begin[near], end[near]
        which = np.arange(inner)
        moves = ((which >= begin[:, None]) & (which <= end[:, None])).astype(int)
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

    def _value(self, cut: np.ndarray, seconds: float, bound: float) -> Partition:
        found = self.chain.of(cut[None])[0]
        links = self.costs(cut[None])[1][0]
        columns = {
            "forward": AT["forward"],
            "input": AT["input_gradient"],
            "weight": AT["weight_gradient"],
        }
        return Partition(
            boundaries=tuple(map(int, cut)),
            seconds=seconds,
            bytes=self.bytes(cut),
            bound=bound,
            costs=Costs(
                **{name: tuple(map(float, found[:, column])) for name, column in columns.items()},
                links=tuple(map(float, links)),
                stash=tuple(int(np.ceil(count)) for count in found[:, AT["stash_bytes"]]),
                pending=tuple(int(np.ceil(count)) for count in found[:, AT["between_bytes"]]),
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
