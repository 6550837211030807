"""The choice of schedule, number of microbatches, stash and partition by simulation (`auto:P`).

Every named synchronous schedule is tried with every number of microbatches, and the model's blocks are divided into
stages (`partition.py`) that fit the devices' memory. The candidate that takes the fewest seconds for the same batch on
the `neighbour` machine wins. If several candidates take equal seconds, the candidate that needs the least memory wins.
More microbatches shorten the bubble, but a small microbatch may take more than its share of the batch's time; measured
prices show this. A candidate is skipped if, even without a bubble, it would not be faster than the best so far.

Left out: asynchronous schedules, which train differently, and searched schedules (`search.py`), which are made for one
partition.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxscale.errors import UserError, unknown
from jaxscale.pipeline.choose.partition import ModelPrices, Partition, TooLarge, partition
from jaxscale.pipeline.choose.price import PipelineDevice
from jaxscale.pipeline.choose.search import NAME
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.run.lifetimes import Stash
from jaxscale.pipeline.schedules import METHODS

Prices = ModelPrices | Mapping[str, ModelPrices]
"""The prices of a model on one kind of device, or a dict of them by the name of the kind."""
_TOLERANCE = 1e-9  # relative difference up to which seconds count as equal


@dataclasses.dataclass(frozen=True)
class PipelineCandidate:
    """A schedule, a number of microbatches and a stash, with their partition or the reason why there is none.

    Args:
        name: name of the schedule.
        ranks: p, number of ranks.
        microbatches: m, number of microbatches.
        chunks: v, number of stages per rank; `None` if the schedule's v cannot be chosen.
        stash: what a stage keeps from a forward to its backward.
        partition: the blocks of each stage; `None` if there is no partition.
        reason: the error message if there is no partition; otherwise empty.
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
        """Seconds of the whole batch; infinite without a partition."""
        return float("inf") if self.partition is None else self.partition.seconds


@dataclasses.dataclass(frozen=True)
class Choice:
    """The result of `choose_pipeline`: the best candidate, and all other candidates.

    Args:
        best: the fastest candidate.
        partition: the partition of the fastest candidate.
        candidates: all candidates with a partition, the fastest first, followed by all candidates without a partition.
        skipped: number of further candidates that were skipped: even without a bubble, they would not be faster.

    Example:
        >>> from jaxscale.pipeline.choose.price import Price
        >>> batch = ModelPrices((Price(8.0, 8.0, 8.0, stash_bytes=80),) * 8)
        >>> choice = choose_pipeline(batch.share, 2, [4, 8], [PipelineDevice(memory_bytes=160)] * 2)
        >>> str(choice.best), choice.partition.boundaries, choice.partition.seconds
        ('chimera:2x8', (0, 4, 8), 96.0)
    """

    best: PipelineCandidate
    partition: Partition
    candidates: tuple[PipelineCandidate, ...]
    skipped: int

    def __str__(self) -> str:
        width = max(len(str(candidate)) for candidate in self.candidates)
        lines = []
        for candidate in self.candidates:
            candidate_partition = candidate.partition
            outcome_text = (
                f"{candidate.seconds:.6g} s, {max(candidate_partition.bytes)} bytes"
                if candidate_partition
                else candidate.reason
            )
            lines.append(f"{str(candidate).ljust(width)}  {candidate.stash.ljust(9)}  {outcome_text}")
        return "\n".join([*lines, f"{self.skipped} more cannot be faster"])


def choose_pipeline(
    prices_of: Callable[[int], Prices],
    ranks: int,
    microbatches: Sequence[int],
    devices: Sequence[PipelineDevice] | None = None,
    *,
    names: Sequence[str] | None = None,
    chunks: Sequence[int] = (2,),
    stashes: Sequence[Stash] = ("residuals", "input"),
    width: int = 64,
) -> Choice:
    """Choose the fastest schedule, number of microbatches, stash and partition that fit the memory.

    Args:
        prices_of: function from a number of microbatches to the prices of a model for one microbatch. An example is
            `batch_prices.share`, if `batch_prices` are the `ModelPrices` for a whole batch.
        ranks: p, number of devices on the pipe axis.
        microbatches: the numbers of microbatches to try.
        devices: the device of each rank, in order; `None`: equal devices without a memory limit.
        names: names of the schedules to try; `None`: all synchronous schedules.
        chunks: values of v to try in addition to 1, for schedules whose v can be chosen.
        stashes: the values of `stash` to try: what a stage keeps from a forward to its backward.
        width: number of partial partitions that branch and bound keeps, as in `partition`.

    Raises:
        TooLarge: no candidate fits; the message gives the bytes of the candidate that comes nearest to the memory.
        UserError: a schedule is unknown or asynchronous, or no schedule is defined for these numbers of ranks,
            microbatches and chunks.
    """
    synchronous_names = [name for name, method in METHODS.items() if not method.steps and name != NAME]
    for name in names or ():
        if name not in synchronous_names:
            raise unknown("synchronous schedule", name, synchronous_names)
    refused_candidates: list[PipelineCandidate] = []
    feasible_candidates: list[PipelineCandidate] = []
    nearest_error: TooLarge | None = None  # the error of the candidate that comes nearest to the memory
    skip_count, best_seconds = 0, float("inf")
    for candidate in _candidates(names or synchronous_names, ranks, microbatches, chunks, stashes):
        prices = prices_of(candidate.microbatches)
        try:
            schedule = METHODS[candidate.name].schedule(ranks, candidate.microbatches, candidate.chunks)
            if _least_seconds(prices, schedule, candidate.stash) >= best_seconds:
                skip_count += 1
                continue
            candidate_partition = partition(prices, schedule, devices, stash=candidate.stash, width=width)
        except UserError as error:
            if isinstance(error, TooLarge) and (nearest_error is None or error.ratio < nearest_error.ratio):
                nearest_error = error
            refused_candidates.append(dataclasses.replace(candidate, reason=str(error)))
        else:
            feasible_candidates.append(dataclasses.replace(candidate, partition=candidate_partition))
            best_seconds = min(best_seconds, candidate_partition.seconds)
    ranked_candidates = sorted(feasible_candidates, key=lambda candidate: candidate.seconds)
    if not ranked_candidates:
        if nearest_error is not None:
            message = f"pipeline auto:{ranks}: no candidate fits. The nearest is {nearest_error}"
            raise TooLarge(message, nearest_error.ratio)
        reasons = sorted({candidate.reason for candidate in refused_candidates})
        raise UserError(f"pipeline auto:{ranks}: no schedule can run: {'; '.join(reasons) or 'none was named'}")
    tied_candidates = [
        candidate for candidate in ranked_candidates if candidate.seconds <= best_seconds * (1 + _TOLERANCE)
    ]
    winner = min(tied_candidates, key=lambda candidate: max(candidate.partition.bytes) if candidate.partition else 0)
    assert winner.partition is not None
    slower_candidates = [candidate for candidate in ranked_candidates if candidate is not winner]
    return Choice(winner, winner.partition, (winner, *slower_candidates, *refused_candidates), skip_count)


def _candidates(
    names: Sequence[str], ranks: int, microbatches: Sequence[int], chunks: Sequence[int], stashes: Sequence[Stash]
) -> Iterator[PipelineCandidate]:
    """Yield the candidates to try. Likely fast candidates come first, so that most of the later ones are skipped."""
    likely_names = ("zb-v", "zb-h1", "zb-h2", "dualpipe-v", "lockstep")
    position_of = {name: position for position, name in enumerate(likely_names)}
    for stash in stashes:
        for microbatch_count in sorted(microbatches, reverse=True):
            for name in sorted(names, key=lambda name: position_of.get(name, len(position_of))):
                for v in sorted({1, *chunks}) if METHODS[name].interleaves else (None,):
                    yield PipelineCandidate(name, ranks, microbatch_count, v, stash)


def _least_seconds(prices: Prices, schedule: Schedule, stash: Stash) -> float:
    """Return the seconds of the batch if no rank idles and every block is on its fastest device: a lower bound."""
    model_prices = [prices] if isinstance(prices, ModelPrices) else list(prices.values())
    forward_run_count = 2 if stash == "input" else 1
    seconds = 0.0
    for block_prices in zip(*(kind_prices.blocks for kind_prices in model_prices), strict=True):
        seconds += min(
            forward_run_count * block_price.forward + block_price.input_gradient + block_price.weight_gradient
            for block_price in block_prices
        )
    return schedule.microbatches * seconds / schedule.ranks
