"""Search: an order of passes that is faster than any named schedule, for given costs and memory.

The search starts from the named schedules within the memory and from 48 list schedules, in which each rank runs the
ready pass of highest priority in a random list. All are timed on the neighbour machine. Then the search changes orders
at random, in batches: it moves a pass, splits a backward, or joins the halves of one. It accepts the best of a batch if
that is faster or, less and less often, if it is a little slower (simulated annealing). The search is seeded, so equal
arguments give equal results. The result is never slower than the best named schedule. For very small pipelines
(`exhaustive.are_few`) all orders are timed.

All microbatches take equally long, so every rank runs the passes of one kind and stage in the order of microbatches: no
other order is faster. A lower bound on the seconds follows from three facts. A rank cannot start before its first input
arrives. Before its first gradient it runs at most as many forwards as it may hold, so memory buys time. It ends with
its own passes, or with the gradients of the ranks before it. The largest of these times over the ranks bounds every
order.

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
from jaxscale.pipeline.action import KINDS, Action, Kind
from jaxscale.pipeline.choose.exhaustive import are_few, fastest
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.many_orders import BatchClock
from jaxscale.pipeline.clock.simulate import simulate
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.schedules.searched import NAME

_BATCH = 48  # changed orders that are timed at once
_LISTS = 48  # random lists of priorities to start from
_CLOSE = 1e-9  # relative distance at which seconds count as equal to the bound
_HEAT = 0.01  # share of the seconds that a change may cost at first

_F, _B, _I, _W = range(4)  # as in KINDS
Word = list[int]
"""The passes of a rank in order. Each is a letter, kind * stages + stage. Its microbatch is the number of equal letters
before it."""


@dataclasses.dataclass(frozen=True)
class Searched:
    """The result of a search.

    Args:
        schedule: the fastest schedule.
        seconds: seconds of that schedule on the neighbour machine.
        bound: a lower bound on the seconds of every schedule of these stages within the memory.
        named: name of the fastest named schedule within the memory.
        named_seconds: seconds of that named schedule.
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
        """Seconds above the bound, as a share of the bound."""
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
    """Search for the fastest schedule within a memory.

    Args:
        costs: costs of the stages, with one stage per rank; or costs by the number of stages per rank,
            `{1: ..., 2: ...}`, to try schedules of each number.
        ranks: p, number of ranks.
        microbatches: m, number of microbatches.
        activations: the most activations that a rank may hold, each of one microbatch and one rank's share of the
            model; `None`: p.
        copies: the most copies of each stage's weights; 2 admits Chimera among the named schedules.
        changes: number of changed orders to try for each route.
        seed: seed of the random changes.

    Raises:
        UserError: the costs have a wrong number of stages, or every named schedule needs more memory.

    Example:
        >>> costs = Costs((1.0, 1.3), (1.2, 0.9), (0.7, 1.1))
        >>> fastest = search(costs, 2, 4)
        >>> fastest.seconds <= fastest.named_seconds, fastest.schedule.live
        (True, (2, 2))
    """
    costs_by_chunks = {1: costs} if isinstance(costs, Costs) else dict(costs)
    for chunks, stage_costs in costs_by_chunks.items():
        if stage_costs.stages != chunks * ranks:
            raise UserError(
                f"got costs of {stage_costs.stages} stages, expected {chunks * ranks}: {chunks} for each rank"
            )
    activations = float(ranks) if activations is None else float(activations)
    floor = min(
        bound(stage_costs, ranks, microbatches, activations, one_route=chunks == 1 and copies == 1)
        for chunks, stage_costs in costs_by_chunks.items()
    )
    named_schedules = []
    for pair in _named_schedules(costs_by_chunks, ranks, microbatches, activations, copies):
        named_schedules.append(pair)
        if pair[0] <= floor * (1 + _CLOSE):  # no schedule is faster
            break
    if not named_schedules:
        raise UserError(f"search: no named schedule holds at most {activations:g} activations; 1f1b holds {ranks}")
    named_schedules.sort(key=lambda pair: pair[0])
    named_seconds, named_schedule = named_schedules[0]
    best_seconds, schedule = named_seconds, named_schedule
    for routes in dict.fromkeys(named_schedule.routes for _, named_schedule in named_schedules):
        if len(routes) > 1 or best_seconds <= floor * (1 + _CLOSE):
            continue
        stage_costs = costs_by_chunks[len(routes[0]) // ranks]
        starts = [named_schedule.orders for _, named_schedule in named_schedules if named_schedule.routes == routes][:3]
        route_search = _RouteSearch(stage_costs, routes[0], ranks, microbatches, activations, seed)
        seconds, orders = route_search.run(starts, changes, floor)
        if seconds < best_seconds * (1 - 1e-12):
            schedule = Schedule(NAME, orders, len(routes[0]), microbatches, routes, (0,) * microbatches)
            best_seconds = simulate(schedule, stage_costs).seconds
    return Searched(schedule, best_seconds, min(floor, best_seconds), named_schedule.name, named_seconds)


def _named_schedules(
    costs: Mapping[int, Costs], ranks: int, microbatches: int, activations: float, copies: int
) -> Iterator[tuple[float, Schedule]]:
    """Yield (seconds, schedule) of the named synchronous schedules within the memory."""
    from jaxscale.pipeline.schedules import METHODS  # one of them is the search itself

    # zb-h1 first, which is the likeliest to meet the bound
    for method in sorted(METHODS.values(), key=lambda method: method.name != "zb-h1"):
        if method.steps or method.name == NAME:
            continue
        for chunks in {*costs} if method.interleaves else (method.chunks,):
            try:
                schedule = method.schedule(ranks, microbatches, chunks)
            except UserError:  # not defined for these numbers
                continue
            stage_costs = costs.get(schedule.stages // ranks)
            if stage_costs is None or len(schedule.routes) > copies:
                continue
            if max(schedule.live) * ranks / schedule.stages <= activations + 1e-9:
                yield simulate(schedule, stage_costs).seconds, schedule


def bound(costs: Costs, ranks: int, microbatches: int, activations: float, *, one_route: bool = True) -> float:
    """Return a lower bound on the seconds of every schedule, whatever its order, on either machine.

    For the stage s of a rank, with forwards F, input gradients I, weight gradients W and m microbatches, the
    last two lines are lower bounds; the largest of them over all stages is the result:

        start      = F of all stages before s
        round trip = F of s and of all stages after s + I of all stages after s
        idle       = max(0, round trip - (activations that the rank may hold) * F of s)
        start + idle + m (F + I + W) of s
        start + idle + m (F + I) of s + I of all stages before s + W of stage 0

    If a rank may have several stages, or a stage several ranks, the stages of a rank depend on the route. In that case
    the bound is the larger of two times: the work of all stages in equal parts for the ranks, and the round trip of one
    microbatch through all stages.

    Args:
        costs: costs of the stages.
        ranks: p, number of ranks.
        microbatches: m, number of microbatches.
        activations: the most activations that a rank may hold, each of one rank's share of the model.
        one_route: whether stage s is on rank s alone.

    Example:
        >>> bound(Costs((1.0,) * 4, (1.0,) * 4, (1.0,) * 4), 4, 8, 4)
        27.0
    """
    f, m = costs.forward, microbatches
    backward = [min(costs.input[s] + costs.weight[s], costs.seconds(Kind.B, s)) for s in range(costs.stages)]
    inputs = [min(costs.input[s], backward[s]) for s in range(costs.stages)]
    seconds = sum(f) + sum(inputs) + backward[0] - inputs[0]
    if not one_route:
        return max(seconds, m * (sum(f) + sum(backward)) / ranks)
    for s in range(costs.stages):
        round_trip = sum(f[s:]) + sum(inputs[s + 1 :])
        earliest = sum(f[:s]) + max(0.0, round_trip - min(m, math.floor(activations + 1e-9)) * f[s])
        seconds = max(seconds, earliest + m * (f[s] + backward[s]))
        seconds = max(seconds, earliest + m * (f[s] + inputs[s]) + sum(inputs[:s]) + backward[0] - inputs[0])
    return seconds


class _RouteSearch:
    """A search among the schedules of one route."""

    def __init__(
        self, costs: Costs, route: tuple[int, ...], ranks: int, microbatches: int, activations: float, seed: int
    ) -> None:
        self.costs, self.route, self.ranks, self.microbatches = costs, route, ranks, microbatches
        self.limit = math.floor(activations * len(route) / ranks + 1e-9)
        self.clock = BatchClock(costs, route, ranks, microbatches)
        self.rng = random.Random(seed)
        self.stages = [[s for s, stage_rank in enumerate(route) if stage_rank == rank] for rank in range(ranks)]

    def run(
        self, starts: Sequence[Sequence[Sequence[Action]]], changes: int, floor: float
    ) -> tuple[float, tuple[tuple[Action, ...], ...]]:
        """Return the seconds and the orders of the fastest schedule.

        Args:
            starts: the named schedules that the search starts from, each as the actions of each rank.
            changes: number of changed orders to try.
            floor: a lower bound on the seconds, at which the search stops.
        """
        has_one_stage_each = self.route == tuple(range(self.ranks))
        if has_one_stage_each and are_few(self.ranks, self.microbatches, self.limit):
            return fastest(self.costs, self.microbatches, self.limit)
        word_lists = [[self._word(order) for order in orders] for orders in starts]
        word_lists += [random_words for _ in range(_LISTS) if (random_words := self._list_schedule()) is not None]
        numbers = np.stack([np.stack([self._row(self._passes(word)) for word in words]) for words in word_lists])
        seconds = self.clock.seconds(numbers)
        ranking = np.argsort(seconds, kind="stable")
        best_seconds, best_words = float(seconds[ranking[0]]), word_lists[ranking[0]]
        # half of the changes from the best start, a quarter from each of the next two
        for i, quarters in zip(ranking[:3], (2, 1, 1), strict=False):
            if best_seconds <= floor * (1 + _CLOSE):
                break
            lowest_seconds, words = self._anneal(float(seconds[i]), word_lists[i], numbers[i], changes * quarters // 4)
            if lowest_seconds < best_seconds:
                best_seconds, best_words = lowest_seconds, words
        return best_seconds, tuple(tuple(map(self._action, self._passes(word) or ())) for word in best_words)

    def _anneal(self, current: float, words: list[Word], numbers: np.ndarray, changes: int) -> tuple[float, list[Word]]:
        """Change orders at random, and return the seconds and the words of the best orders.

        `current` is the seconds of the orders that `words` and `numbers`, their rows of `BatchClock`, describe.
        """
        best_seconds, best_words = current, words
        rounds = max(1, changes // _BATCH)
        for round_number in range(rounds):
            heat = _HEAT * best_seconds * (1 - round_number / rounds) ** 2
            # (rank, changed word) of each proposal, and the numbers of its orders
            proposals, proposed_numbers = [], np.repeat(numbers[None], _BATCH, 0)
            for index in range(_BATCH):
                rank = self.rng.randrange(self.ranks)
                word, passes = self._neighbour(words[rank])
                proposals.append((rank, word))
                proposed_numbers[index, rank] = self._row(passes)
            seconds = self.clock.seconds(proposed_numbers)
            # the fastest proposal, ties broken at random
            tie_breaks = [self.rng.random() * 1e-9 * best_seconds for _ in range(_BATCH)]
            fastest_index = int((seconds + np.array(tie_breaks)).argmin())
            if seconds[fastest_index] <= current - heat * math.log(1 - self.rng.random()):
                rank, word = proposals[fastest_index]
                words = [*words[:rank], word, *words[rank + 1 :]]
                numbers, current = proposed_numbers[fastest_index], float(seconds[fastest_index])
                if current < best_seconds:
                    best_seconds, best_words = current, words
        return best_seconds, best_words

    def _neighbour(self, word: Word) -> tuple[Word, list[int] | None]:
        """Return a valid word that differs a little from `word`, and its pass numbers as `_passes` gives them."""
        for _ in range(50):
            neighbour = list(word)
            for _ in range(self.rng.choice((1, 1, 2))):
                self._mutate(neighbour)
            if neighbour != word and (passes := self._passes(neighbour)) is not None:
                return neighbour, passes
        return word, self._passes(word)

    def _mutate(self, word: Word) -> None:
        """Change a word in place: split a backward, join its halves, or move a pass."""
        rng, index = self.rng, int(self.rng.random() * len(word))
        kind, stage = divmod(word[index], self.clock.stages)
        weight_letter = _W * self.clock.stages + stage
        if kind == _B and rng.random() < 0.5:  # split
            word[index] = _I * self.clock.stages + stage
            word.insert(min(len(word), index + 1 + rng.randrange(4)), weight_letter)
        elif kind == _I and rng.random() < 0.3:  # join with the next weight gradient
            if weight_letter in word[index:]:
                del word[word.index(weight_letter, index)]
                word[index] = _B * self.clock.stages + stage
        else:
            letter = word.pop(index)
            distance = len(word) if rng.random() < 0.1 else 6
            word.insert(max(0, min(len(word), index + rng.randint(-distance, distance))), letter)

    def _word(self, order: Sequence[Action]) -> Word:
        """Return the letters of an order."""
        return [KINDS.index(action.kind) * self.clock.stages + action.stage for action in order]

    def _passes(self, word: Word) -> list[int] | None:
        """Return the pass numbers of `BatchClock`: microbatches of each kind and stage in order, W in the order of I.

        Return `None` for an invalid word: a gradient before its forward, W before its I, or too many activations.
        """
        stages, waiting = self.clock.stages, 0
        forwards, gradients = [0] * stages, [0] * stages
        pending: list[collections.deque[int]] = [collections.deque() for _ in range(stages)]
        numbers = []
        for letter in word:
            kind, stage = divmod(letter, stages)
            if kind == _F:
                microbatch = forwards[stage]
                forwards[stage] += 1
                waiting += 1
                if waiting > self.limit:
                    return None
            elif kind == _W:
                if not pending[stage]:
                    return None
                microbatch = pending[stage].popleft()
                waiting -= 1
            else:
                microbatch = gradients[stage]
                gradients[stage] += 1
                if gradients[stage] > forwards[stage]:
                    return None
                if kind == _I:
                    pending[stage].append(microbatch)
                else:
                    waiting -= 1
            numbers.append(letter * self.microbatches + microbatch)
        return numbers

    def _action(self, number: int) -> Action:
        """Return the action of a pass number of `BatchClock`."""
        letter, microbatch = divmod(number, self.microbatches)
        kind, stage = divmod(letter, self.clock.stages)
        return Action(KINDS[kind], stage, microbatch)

    def _row(self, passes: list[int] | None) -> np.ndarray:
        """Return int[length + 1]: the pass numbers of a valid word as a row of `BatchClock`."""
        assert passes is not None
        return np.array(passes + [self.clock.end] * (self.clock.length + 1 - len(passes)))

    def _list_schedule(self) -> list[Word] | None:
        """Return the words of all ranks by a random list of priorities; `None` if ranks get stuck at the limit."""
        rng, stages, m = self.rng, self.clock.stages, self.microbatches
        priorities = [rng.random() + rng.random(), 0.0, rng.random() + rng.random(), rng.random()]
        depth_weight = rng.choice((0.0, 1.0, -1.0))  # whether later stages of a rank go before earlier ones
        length_weight = rng.random() * rng.choice((0, 1))  # how much a pass longer than its tick so far is put off
        gradient_kind = _B if rng.random() < 0.3 else _I
        priorities[gradient_kind] = priorities[_I]
        # for each rank, the most forwards by which a stage may be ahead of its gradients
        warmups = [self.limit if rng.random() < 0.3 else max(1, self.limit - rank) for rank in range(self.ranks)]
        seconds = [[self.costs.seconds(kind, stage) for stage in range(stages)] for kind in KINDS]
        unit_seconds = max(self.costs.forward) or 1.0
        # passes that have run, by kind and stage
        run_counts = [[0] * stages for _ in KINDS]
        waiting = [0] * self.ranks  # activations that wait for B or W, by rank
        words: list[Word] = [[] for _ in range(self.ranks)]
        remaining_passes = stages * m * (2 if gradient_kind == _B else 3)
        while remaining_passes:
            passes: list[tuple[int, int, int]] = []  # (rank, kind, stage) of the passes in this tick
            tick_seconds = 0.0
            for rank, rank_stages in enumerate(self.stages):
                ready = []  # (kind, stage) of the passes whose inputs have arrived
                warmup = warmups[rank] if len(rank_stages) == 1 else self.limit
                for stage in rank_stages:
                    f, g, w = run_counts[_F][stage], run_counts[gradient_kind][stage], run_counts[_W][stage]
                    arrived_inputs = run_counts[_F][stage - 1] if stage else m
                    arrived_gradients = run_counts[gradient_kind][stage + 1] if stage + 1 < stages else m
                    if f < arrived_inputs and waiting[rank] < self.limit and f - g < warmup:
                        ready.append((_F, stage))
                    if g < min(f, arrived_gradients):
                        ready.append((gradient_kind, stage))
                    if gradient_kind == _I and w < g:
                        ready.append((_W, stage))
                if not ready:
                    continue
                scores = [
                    priorities[kind]
                    + (kind == _W and waiting[rank] >= self.limit) * 0.5
                    + depth_weight * stage / stages
                    - length_weight * max(0.0, seconds[kind][stage] - tick_seconds) / unit_seconds
                    for kind, stage in ready
                ]
                kind, stage = ready[scores.index(max(scores))]
                tick_seconds = max(tick_seconds, seconds[kind][stage])
                passes.append((rank, kind, stage))
            if not passes:
                return None
            for rank, kind, stage in passes:
                run_counts[kind][stage] += 1
                waiting[rank] += (1, -1, 0, -1)[kind]
                words[rank].append(kind * stages + stage)
            remaining_passes -= len(passes)
        return words
