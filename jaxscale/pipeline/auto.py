"""Auto: which schedule, how many microbatches, what waits for a backward and which partition, by simulation (`auto:P`).

Every named synchronous schedule is made for every number of microbatches, its blocks are cut into stages
(`partition.py`) within the devices' memory, and what takes the fewest seconds on the neighbour machine for the same
batch is taken; among equals what holds least. More microbatches shorten the bubble, but each takes its share of the
batch's time only as far as the prices say: give measured ones, and small microbatches will not look better than they
are. What cannot be faster, even without any bubble, is not tried.

Left out: asynchronous schedules, which train differently, and searched ones (`search.py`), which are made for one
partition.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxscale.errors import UserError, unknown
from jaxscale.pipeline.partition import Model, Partition, TooLarge, partition
from jaxscale.pipeline.price import Device
from jaxscale.pipeline.schedule import Schedule
from jaxscale.pipeline.schedules import METHODS
from jaxscale.pipeline.search import NAME
from jaxscale.pipeline.tables import Stash

Prices = Model | Mapping[str, Model]
_CLOSE = 1e-9


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to run the pipeline, and what it comes to.

    Args:
        name: of the schedule.
        ranks: p.
        microbatches: m.
        chunks: v, where the schedule takes it.
        stash: what waits for a backward.
        partition: the blocks of each stage; `None` where there is none.
        reason: why there is none.
    """

    name: str
    ranks: int
    microbatches: int
    chunks: int | None
    stash: Stash
    partition: Partition | None = None
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.ranks}x{self.microbatches}" + ("" if self.chunks is None else f",v={self.chunks}")

    @property
    def seconds(self) -> float:
        """Of the whole batch; infinite without a partition."""
        return float("inf") if self.partition is None else self.partition.seconds


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is best, and what else was looked at.

    Args:
        best: the fastest.
        partition: its blocks.
        candidates: all that were priced or refused, the fastest first.
        skipped: how many cannot be faster, whatever their bubble.

    Example:
        >>> from jaxscale.pipeline.price import Price
        >>> batch = Model((Price(8.0, 8.0, 8.0, stash_bytes=80),) * 8)
        >>> found = choose(batch.share, 2, [4, 8], [Device(memory_bytes=160)] * 2)
        >>> str(found.best), found.partition.boundaries, found.partition.seconds
        ('chimera:2x8', (0, 4, 8), 96.0)
    """

    best: Candidate
    partition: Partition
    candidates: tuple[Candidate, ...]
    skipped: int

    def __str__(self) -> str:
        wide = max(len(str(one)) for one in self.candidates)
        lines = []
        for one in self.candidates:
            told = f"{one.seconds:.6g} s, {max(one.partition.bytes)} bytes" if one.partition else one.reason
            lines.append(f"{str(one).ljust(wide)}  {one.stash.ljust(9)}  {told}")
        return "\n".join([*lines, f"{self.skipped} more cannot be faster"])


def choose(
    prices: Callable[[int], Prices],
    ranks: int,
    microbatches: Sequence[int],
    devices: Sequence[Device] | None = None,
    *,
    names: Sequence[str] | None = None,
    chunks: Sequence[int] = (2,),
    stashes: Sequence[Stash] = ("residuals", "input"),
    width: int = 64,
) -> Choice:
    """The fastest schedule, microbatches, stash and partition within the memory.

    Args:
        prices: of a model, for one microbatch when a batch is cut into so many; `Model.share` of a whole batch's.
        ranks: p, devices on the pipe axis.
        microbatches: the numbers to try.
        devices: of each rank in order; `None`: alike, without a bound on memory.
        names: of schedules to try; `None`: all synchronous ones.
        chunks: v to try with those that take it, beside 1.
        stashes: what may wait for a backward.
        width: as of `partition`.

    Raises:
        TooLarge: none fits: with what the nearest needs.
        UserError: an unknown or asynchronous schedule; no schedule that is defined here.
    """
    known = [name for name, method in METHODS.items() if not method.steps and name != NAME]
    for name in names or ():
        if name not in known:
            raise unknown("synchronous schedule", name, known)
    refused: list[Candidate] = []
    priced: list[Candidate] = []
    nearest: TooLarge | None = None
    skipped = 0
    best = float("inf")
    for schedule, candidate in _candidates(names or known, ranks, microbatches, chunks, stashes, refused):
        model = prices(candidate.microbatches)
        if _least(model, schedule, candidate.stash) >= best:
            skipped += 1
            continue
        try:
            found = partition(model, schedule, devices, stash=candidate.stash, width=width)
        except TooLarge as error:
            nearest = error if nearest is None or error.ratio < nearest.ratio else nearest
            refused.append(dataclasses.replace(candidate, reason=str(error)))
            continue
        except UserError as error:
            refused.append(dataclasses.replace(candidate, reason=str(error)))
            continue
        priced.append(dataclasses.replace(candidate, partition=found))
        best = min(best, found.seconds)
    ordered = sorted(priced, key=lambda one: one.seconds)
    if not ordered:
        if nearest is not None:
            raise TooLarge(f"pipeline auto:{ranks}: nothing fits; the nearest is {nearest}", nearest.ratio)
        reasons = sorted({one.reason for one in refused})
        raise UserError(f"pipeline auto:{ranks}: no schedule can run: {'; '.join(reasons) or 'none was asked for'}")
    equals = [one for one in ordered if one.seconds <= best * (1 + _CLOSE)]
    chosen = min(equals, key=lambda one: max(one.partition.bytes) if one.partition else 0)
    assert chosen.partition is not None
    others = [one for one in ordered if one is not chosen]
    return Choice(chosen, chosen.partition, (chosen, *others, *refused), skipped)


def _candidates(
    names: Sequence[str],
    ranks: int,
    microbatches: Sequence[int],
    chunks: Sequence[int],
    stashes: Sequence[Stash],
    refused: list[Candidate],
) -> Iterator[tuple[Schedule, Candidate]]:
    """The schedules that are defined, the likeliest to be fast first, so that most are skipped; others are refused."""
    order = {name: place for place, name in enumerate(("zb-v", "zb-h1", "zb-h2", "dualpipe-v", "lockstep"))}
    for stash in stashes:
        for count in sorted(microbatches, reverse=True):
            for name in sorted(names, key=lambda name: order.get(name, len(order))):
                method = METHODS[name]
                for v in sorted({1, *chunks}) if method.interleaves else (None,):
                    candidate = Candidate(name, ranks, count, v, stash)
                    try:
                        schedule = method.schedule(ranks, count, v)
                    except UserError as error:
                        refused.append(dataclasses.replace(candidate, reason=str(error)))
                        continue
                    yield schedule, candidate


def _least(prices: Prices, schedule: Schedule, stash: Stash) -> float:
    """Seconds if no rank ever idled, every block on the kind of device that is fastest at it."""
    models = [prices] if isinstance(prices, Model) else list(prices.values())
    again = 2 if stash == "input" else 1
    whole = 0.0
    for blocks in zip(*(model.blocks for model in models), strict=True):
        whole += min(again * block.forward + block.input_gradient + block.weight_gradient for block in blocks)
    return schedule.microbatches * whole / schedule.ranks
