"""Search: an order of passes that is faster than any named schedule, for the costs and the memory that there are.

Starts from the named schedules that keep within the memory and from list scheduling (each rank takes, of what is ready,
what stands first in a list of priorities; 48 lists), all timed on the neighbour machine. Then orders are changed at
random, a pass moved, or a backward split or joined, in batches; the best of a batch is taken if it is faster, or, less
and less often, if it is a little slower (simulated annealing). Seeded: the same question has the same answer.
What is returned is never slower than the best named schedule. Of pipelines so small that all orders are soon timed
(`exhaustive.few`), they are.

Microbatches are alike, so that every rank takes those of one kind and stage in order: another order of the same passes
is no faster. The bound: a rank cannot start before its first input comes, and ends with its own passes, or with the
gradients that the ranks before it still make; before its first gradient it can do only as many forwards as it may
keep (which is why memory buys time). No order is below the largest of these over the ranks.

Left out: Chimera's two routes (a named schedule, but not changed), asynchronous schedules, idling on purpose.

References:
    Qi et al. 2024, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), section 3: an automatic schedule by heuristic
    search; Kirkpatrick, Gelatt and Vecchi 1983, simulated annealing.
"""

import collections
import dataclasses
import math
import random
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxscale.errors import UserError
from jaxscale.pipeline.batch_clock import KINDS, BatchClock
from jaxscale.pipeline.costs import Costs
from jaxscale.pipeline.exhaustive import fastest, few
from jaxscale.pipeline.schedule import Action, Kind, Schedule
from jaxscale.pipeline.schedules.searched import NAME
from jaxscale.pipeline.simulate import simulate

_BATCH = 48
_LISTS = 48
_CLOSE = 1e-9  # seconds so near the bound meet it
_HEAT = 0.01  # of the seconds: what a change may cost at first

_F, _B, _I, _W = range(4)  # as in KINDS
Word = list[int]
"""What a rank does, in order: of each pass kind * stages + stage; its microbatch is counted."""


@dataclasses.dataclass(frozen=True)
class Searched:
    """What a search found.

    Args:
        schedule: the fastest.
        seconds: that it takes on the neighbour machine.
        bound: seconds that no schedule of these stages is below, within the memory.
        named: the fastest named schedule within the memory.
        named_seconds: that it takes.
    """

    schedule: Schedule
    seconds: float
    bound: float
    named: str
    named_seconds: float

    @property
    def gain(self) -> float:
        """Share of the named schedule's seconds that the search saved."""
        return 1 - self.seconds / self.named_seconds

    @property
    def distance(self) -> float:
        """How far above the bound, as a share of it."""
        return self.seconds / self.bound - 1

    def __str__(self) -> str:
        return (
            f"{self.schedule.name}: {self.seconds:.6g} s, {self.gain:.2%} less than {self.named}, "
            f"{self.distance:.2%} above the bound"
        )


def search(
    costs: Costs | Mapping[int, Costs],
    ranks: int,
    microbatches: int,
    activations: float | None = None,
    *,
    copies: int = 2,
    changes: int = 4000,
    seed: int = 0,
) -> Searched:
    """The fastest schedule that was found within a memory.

    Args:
        costs: of one stage a rank; or by stages a rank, `{1: ..., 2: ...}`: schedules of any of them are tried.
        ranks: p.
        microbatches: m.
        activations: of one rank's share of the model and one microbatch, that a rank may hold; `None`: p.
        copies: of each stage's weights: 2 admits Chimera among the named.
        changes: how many orders are tried for each kind of route.
        seed: of the random changes.

    Raises:
        UserError: costs of another number of stages; less memory than any named schedule needs.

    Example:
        >>> costs = Costs((1.0, 1.3), (1.2, 0.9), (0.7, 1.1))
        >>> found = search(costs, 2, 4)
        >>> found.seconds <= found.named_seconds, found.schedule.live
        (True, (2, 2))
    """
    by_chunks = {1: costs} if isinstance(costs, Costs) else dict(costs)
    for chunks, one in by_chunks.items():
        if one.stages != chunks * ranks:
            raise UserError(
                f"costs of {one.stages} stages, expected {chunks * ranks}: {chunks} for each of {ranks} ranks"
            )
    activations = float(ranks) if activations is None else float(activations)
    floor = min(
        bound(one, ranks, microbatches, activations, one_route=chunks == 1 and copies == 1)
        for chunks, one in by_chunks.items()
    )
    named = []
    for pair in _named(by_chunks, ranks, microbatches, activations, copies):
        named.append(pair)
        if pair[0] <= floor * (1 + _CLOSE):  # none is faster
            break
    if not named:
        raise UserError(f"search: no named schedule holds as few as {activations:g} activations; 1f1b needs {ranks}")
    named.sort(key=lambda pair: pair[0])
    best, schedule = named[0]
    first = named[0]
    tried: set[tuple[int, ...]] = set()
    for _, start in named:
        route = start.routes[0]
        if len(start.routes) > 1 or route in tried or best <= floor * (1 + _CLOSE):
            continue
        tried.add(route)
        starts = [one.orders for _, one in named if one.routes == start.routes][:3]
        search_ = _Route(by_chunks[start.stages // ranks], route, ranks, microbatches, activations, seed)
        seconds, orders = search_.run(starts, changes, floor)
        if seconds < best * (1 - 1e-12):
            found = Schedule(NAME, orders, start.stages, microbatches, (route,), (0,) * microbatches)
            best, schedule = simulate(found, by_chunks[start.stages // ranks]).seconds, found
    return Searched(schedule, best, min(floor, best), first[1].name, first[0])


def _named(
    costs: Mapping[int, Costs], ranks: int, microbatches: int, activations: float, copies: int
) -> Iterator[tuple[float, Schedule]]:
    """The named synchronous schedules within the memory, with their seconds."""
    from jaxscale.pipeline.schedules import METHODS  # one of them is the search itself

    for method in sorted(
        METHODS.values(), key=lambda method: method.name != "zb-h1"
    ):  # the likeliest to meet the bound
        if method.steps or method.name == NAME:
            continue
        for chunks in {*costs} if method.interleaves else (method.chunks,):
            try:
                schedule = method.schedule(ranks, microbatches, chunks)
            except UserError:  # not defined for these numbers
                continue
            own = costs.get(schedule.stages // ranks)
            if own is None or len(schedule.routes) > copies:
                continue
            if max(schedule.live) * ranks / schedule.stages <= activations + 1e-9:
                yield simulate(schedule, own).seconds, schedule


def bound(costs: Costs, ranks: int, microbatches: int, activations: float, *, one_route: bool = True) -> float:
    """Seconds that no schedule is below, whatever its order, on either machine.

    For the stage s of a rank, with forwards F, input gradients I, weight gradients W and m microbatches:

        start = sum of F before s,  there and back = F of s and all behind, I of all behind
        idle  = max(0, there and back - (forwards that it may keep) * F of s)
        start + idle + m (F + I + W) of s
        start + idle + m (F + I) of s + I of all before s + W of stage 0

    Where a rank may have several stages, or a stage several ranks, what each has depends on the route: then the work of
    all ranks in equal parts, and a microbatch's way there and back.

    Args:
        costs: of the stages.
        ranks: p.
        microbatches: m.
        activations: that a rank may hold, of one rank's share of the model.
        one_route: whether stage s is on rank s alone.

    Example:
        >>> bound(Costs((1.0,) * 4, (1.0,) * 4, (1.0,) * 4), 4, 8, 4)
        27.0
    """
    f, m = costs.forward, microbatches
    whole = [min(costs.input[s] + costs.weight[s], costs.seconds(Kind.B, s)) for s in range(costs.stages)]
    back = [min(costs.input[s], whole[s]) for s in range(costs.stages)]
    least = sum(f) + sum(back) + whole[0] - back[0]
    if not one_route:
        return max(least, m * (sum(f) + sum(whole)) / ranks)
    for s in range(costs.stages):
        there = sum(f[s:]) + sum(back[s + 1 :])
        begun = sum(f[:s]) + max(0.0, there - min(m, math.floor(activations + 1e-9)) * f[s])
        least = max(least, begun + m * (f[s] + whole[s]))
        least = max(least, begun + m * (f[s] + back[s]) + sum(back[:s]) + whole[0] - back[0])
    return least


class _Route:
    """The search among schedules of one route."""

    def __init__(
        self, costs: Costs, route: tuple[int, ...], ranks: int, microbatches: int, activations: float, seed: int
    ) -> None:
        self.costs, self.route, self.ranks, self.microbatches = costs, route, ranks, microbatches
        self.limit = math.floor(activations * len(route) / ranks + 1e-9)
        self.clock = BatchClock(costs, route, ranks, microbatches)
        self.rng = random.Random(seed)
        self.stages = [[s for s, at in enumerate(route) if at == rank] for rank in range(ranks)]

    def run(
        self, starts: Sequence[Sequence[Sequence[Action]]], changes: int, floor: float
    ) -> tuple[float, tuple[tuple[Action, ...], ...]]:
        """The fastest orders that were found."""
        one_each = self.route == tuple(range(self.ranks))
        if one_each and few(self.ranks, self.microbatches, self.limit):
            return fastest(self.costs, self.microbatches, self.limit)
        states = [[self._word(order) for order in orders] for orders in starts]
        states += [listed for _ in range(_LISTS) if (listed := self._listed()) is not None]
        numbers = np.stack([np.stack([self._numbers(word) for word in words]) for words in states])
        seconds = self.clock.seconds(numbers)
        rank = np.argsort(seconds, kind="stable")
        best, kept = float(seconds[rank[0]]), states[rank[0]]
        # half of the changes from the best start, the rest from the two after it
        for place, share in zip(rank[:3], (2, 1, 1), strict=False):
            if best <= floor * (1 + _CLOSE):
                break
            found, words = self._anneal(float(seconds[place]), states[place], numbers[place], changes * share // 4)
            if found < best:
                best, kept = found, words
        return best, tuple(tuple(self._actions(word)) for word in kept)

    def _anneal(self, now: float, words: list[Word], numbers: np.ndarray, changes: int) -> tuple[float, list[Word]]:
        best, kept = now, words
        rounds = max(1, changes // _BATCH)
        for turn in range(rounds):
            heat = _HEAT * best * (1 - turn / rounds) ** 2
            trial, changed = [], np.repeat(numbers[None], _BATCH, 0)
            for index in range(_BATCH):
                rank = self.rng.randrange(self.ranks)
                word = self._changed(words[rank], rank)
                trial.append((rank, word))
                changed[index, rank] = self._numbers(word)
            seconds = self.clock.seconds(changed)
            pick = int((seconds + np.array([self.rng.random() * 1e-9 * best for _ in range(_BATCH)])).argmin())
            if seconds[pick] <= now - heat * math.log(1 - self.rng.random()):
                rank, word = trial[pick]
                words = [*words[:rank], word, *words[rank + 1 :]]
                numbers, now = changed[pick], float(seconds[pick])
                if now < best:
                    best, kept = now, words
        return best, kept

    def _changed(self, word: Word, rank: int) -> Word:
        """A word that is a little different, and valid."""
        for _ in range(50):
            new = list(word)
            for _ in range(self.rng.choice((1, 1, 2))):
                self._change(new)
            if new != word and self._valid(new):
                return new
        return word

    def _change(self, word: Word) -> None:
        rng, at = self.rng, int(self.rng.random() * len(word))
        kind, stage = divmod(word[at], self.clock.stages)
        weight = _W * self.clock.stages + stage
        if kind == _B and rng.random() < 0.5:  # split
            word[at] = _I * self.clock.stages + stage
            word.insert(min(len(word), at + 1 + rng.randrange(4)), weight)
        elif kind == _I and rng.random() < 0.3:  # join with the next weight gradient
            if weight in word[at:]:
                del word[word.index(weight, at)]
                word[at] = _B * self.clock.stages + stage
        else:
            letter = word.pop(at)
            far = len(word) if rng.random() < 0.1 else 6
            word.insert(max(0, min(len(word), at + rng.randint(-far, far))), letter)

    def _valid(self, word: Word) -> bool:
        """Whether forwards come before their gradients, those before theirs, and no more wait than may."""
        stages, limit = self.clock.stages, self.limit
        forward, apart = [0] * stages, [0] * stages  # that wait for a gradient, and for W alone
        waiting = 0
        for letter in word:
            kind, stage = divmod(letter, stages)
            if kind == _F:
                forward[stage] += 1
                waiting += 1
                if waiting > limit:
                    return False
            elif kind == _W:
                waiting -= 1
                apart[stage] -= 1
                if apart[stage] < 0:
                    return False
            else:
                forward[stage] -= 1
                if forward[stage] < 0:
                    return False
                if kind == _B:
                    waiting -= 1
                else:
                    apart[stage] += 1
        return True

    def _word(self, order: Sequence[Action]) -> Word:
        return [KINDS.index(action.kind) * self.clock.stages + action.stage for action in order]

    def _passes(self, word: Word) -> list[int]:
        """The numbers of `BatchClock`: microbatches of each kind and stage in order, W of those whose I is alone."""
        stages, m = self.clock.stages, self.microbatches
        forward, gradient = [0] * stages, [0] * stages
        apart: list[collections.deque[int]] = [collections.deque() for _ in range(stages)]
        found = []
        for letter in word:
            kind, stage = divmod(letter, stages)
            if kind == _F:
                microbatch = forward[stage]
                forward[stage] += 1
            elif kind == _W:
                microbatch = apart[stage].popleft()
            else:
                microbatch = gradient[stage]
                gradient[stage] += 1
                if kind == _I:
                    apart[stage].append(microbatch)
            found.append(letter * m + microbatch)
        return found

    def _actions(self, word: Word) -> Iterator[Action]:
        for number in self._passes(word):
            letter, microbatch = divmod(number, self.microbatches)
            kind, stage = divmod(letter, self.clock.stages)
            yield Action(KINDS[kind], stage, microbatch)

    def _numbers(self, word: Word) -> np.ndarray:
        found = np.full(self.clock.length + 1, self.clock.end)
        found[: len(word)] = self._passes(word)
        return found

    def _listed(self) -> list[Word] | None:
        """Orders by one list of priorities; `None` where they get stuck for memory."""
        rng, stages, m = self.rng, self.clock.stages, self.microbatches
        first = [rng.random() + rng.random(), 0.0, rng.random() + rng.random(), rng.random()]
        deep = rng.choice((0.0, 1.0, -1.0))  # whether later stages of a rank go before earlier ones
        even = rng.random() * rng.choice((0, 1))  # how much a pass is put off that is longer than its tick so far
        back = _B if rng.random() < 0.3 else _I
        first[back] = first[_I]
        warm = [self.limit if rng.random() < 0.3 else max(1, self.limit - rank) for rank in range(self.ranks)]
        takes = [[self.costs.seconds(kind, stage) for stage in range(stages)] for kind in KINDS]
        unit = max(self.costs.forward) or 1.0
        count = [[0] * stages for _ in KINDS]
        waiting = [0] * self.ranks
        words: list[Word] = [[] for _ in range(self.ranks)]
        left = stages * m * (2 if back == _B else 3)
        while left:
            taken: list[tuple[int, int, int]] = []
            longest = 0.0
            for rank, own in enumerate(self.stages):
                ready = []
                ahead = warm[rank] if len(own) == 1 else self.limit
                for stage in own:
                    f, g, w = count[_F][stage], count[back][stage], count[_W][stage]
                    before = count[_F][stage - 1] if stage else m
                    behind = count[back][stage + 1] if stage + 1 < stages else m
                    if f < before and waiting[rank] < self.limit and f - g < ahead:
                        ready.append((_F, stage))
                    if g < min(f, behind):
                        ready.append((back, stage))
                    if back == _I and w < g:
                        ready.append((_W, stage))
                if not ready:
                    continue
                worth = [
                    first[kind]
                    + (kind == _W and waiting[rank] >= self.limit) * 0.5
                    + deep * stage / stages
                    - even * max(0.0, takes[kind][stage] - longest) / unit
                    for kind, stage in ready
                ]
                kind, stage = ready[worth.index(max(worth))]
                longest = max(longest, takes[kind][stage])
                taken.append((rank, kind, stage))
            if not taken:
                return None
            for rank, kind, stage in taken:
                count[kind][stage] += 1
                waiting[rank] += (1, -1, 0, -1)[kind]
                words[rank].append(kind * stages + stage)
            left -= len(taken)
        return words
