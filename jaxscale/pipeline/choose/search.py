"""The search for an order of passes that is faster than any named schedule, for given costs and memory.

The search starts from the named schedules that fit the memory and from 48 list schedules. In a list schedule, each rank
runs the ready pass with the highest priority; the priorities are random. All starts are timed on the `neighbour`
machine. Then the search changes orders at random, in batches: it moves a pass, splits a backward, or joins the halves
of a backward. It accepts the best order of a batch if this order is faster or, with a probability that falls over time,
if it is a little slower (simulated annealing). The search is seeded, so equal arguments give equal results. The result
is never slower than the best named schedule. For very small pipelines (`exhaustive.has_few_schedules`) all orders are
timed.

All microbatches take equally long. So every rank runs the passes of one kind and stage in the order of microbatches: no
other order is faster. A lower bound on the seconds follows from three facts. A rank cannot start before its first input
arrives. Before its first gradient it can only run as many forwards as its memory holds, and then it idles. After its
last pass, the earlier ranks still have gradients to compute. `lower_bound` has the formulas.

Left out: asynchronous schedules, deliberate idle time, and changes of the orders of Chimera, which has two routes.

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
from jaxscale.pipeline.choose.exhaustive import fastest_orders, has_few_schedules
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.many_orders import BatchClock
from jaxscale.pipeline.clock.simulate import simulate
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.schedules.searched import NAME

_BATCH_SIZE = 48  # number of changed orders that are timed at once
_LIST_SCHEDULES = 48  # number of list schedules from which the search starts
_TOLERANCE = 1e-9  # relative difference up to which seconds count as equal to the lower bound
_START_TEMPERATURE = 0.01  # mean slowdown that the search accepts at first, as a share of the seconds

_F, _B, _I, _W = range(4)  # as in KINDS
Word = list[int]
"""The passes of a rank in order. Each pass is a letter: the integer kind * stages + stage. The microbatch of a pass is
the number of equal letters before it."""


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Args:
        schedule: the fastest schedule.
        seconds: seconds of the fastest schedule on the `neighbour` machine.
        bound: a lower bound on the seconds of every schedule of these stages that fits the memory.
        named: name of the fastest named schedule that fits the memory.
        named_seconds: seconds of that named schedule.
    """

    schedule: Schedule
    seconds: float
    bound: float
    named: str
    named_seconds: float

    @property
    def gain(self) -> float:
        """Share of the named schedule's seconds that the search saves."""
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
) -> SearchResult:
    """Search for the fastest schedule that fits a memory.

    Args:
        costs: costs of the stages, with one stage per rank. To try several numbers of stages per rank, a dict of costs
            by this number, such as `{1: ..., 2: ...}`.
        ranks: p, number of ranks.
        microbatches: m, number of microbatches.
        activations: the most activations that a rank may hold; an activation belongs to one microbatch and one rank's
            share of the model. `None`: p.
        copies: the most copies of each stage's weights. Chimera, which needs two, is tried only if this is 2 or more.
        changes: number of changed orders to try for each assignment of stages to ranks.
        seed: seed of the random changes.

    Raises:
        UserError: the costs have a wrong number of stages, or no named schedule fits the memory.

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
                f"got costs of {stage_costs.stages} stages, expected {chunks * ranks}: {chunks} on each rank"
            )
    max_activations = float(ranks) if activations is None else float(activations)
    bound_seconds = min(
        lower_bound(stage_costs, ranks, microbatches, max_activations, one_route=chunks == 1 and copies == 1)
        for chunks, stage_costs in costs_by_chunks.items()
    )
    seconds_and_schedules = []  # pairs (seconds, named schedule)
    for seconds, schedule in _timed_named_schedules(costs_by_chunks, ranks, microbatches, max_activations, copies):
        seconds_and_schedules.append((seconds, schedule))
        if seconds <= bound_seconds * (1 + _TOLERANCE):  # no schedule is faster
            break
    if not seconds_and_schedules:
        raise UserError(f"search: no named schedule holds at most {max_activations:g} activations; 1f1b holds {ranks}")
    seconds_and_schedules.sort(key=lambda seconds_and_schedule: seconds_and_schedule[0])
    named_seconds, named_schedule = seconds_and_schedules[0]
    best_seconds, best_schedule = named_seconds, named_schedule
    for routes in dict.fromkeys(schedule.routes for _, schedule in seconds_and_schedules):
        if len(routes) > 1 or best_seconds <= bound_seconds * (1 + _TOLERANCE):
            continue
        stage_costs = costs_by_chunks[len(routes[0]) // ranks]
        start_orders = [schedule.orders for _, schedule in seconds_and_schedules if schedule.routes == routes][:3]
        route_search = _RouteSearch(stage_costs, routes[0], ranks, microbatches, max_activations, seed)
        seconds, orders = route_search.run(start_orders, changes, bound_seconds)
        if seconds < best_seconds * (1 - 1e-12):
            best_schedule = Schedule(NAME, orders, len(routes[0]), microbatches, routes, (0,) * microbatches)
            best_seconds = simulate(best_schedule, stage_costs).seconds
    return SearchResult(
        schedule=best_schedule,
        seconds=best_seconds,
        bound=min(bound_seconds, best_seconds),
        named=named_schedule.name,
        named_seconds=named_seconds,
    )


def _timed_named_schedules(
    costs_by_chunks: Mapping[int, Costs], ranks: int, microbatches: int, max_activations: float, copies: int
) -> Iterator[tuple[float, Schedule]]:
    """Yield (seconds, schedule) for every named synchronous schedule that fits the memory.

    The parameters are those of `search`.
    """
    from jaxscale.pipeline.schedules import METHODS  # imported here, because one of the methods imports this module

    # zb-h1 comes first, because it is the most likely to reach the lower bound
    for method in sorted(METHODS.values(), key=lambda method: method.name != "zb-h1"):
        if method.steps or method.name == NAME:
            continue
        for chunks in {*costs_by_chunks} if method.interleaves else (method.chunks,):
            try:
                schedule = method.schedule(ranks, microbatches, chunks)
            except UserError:  # not defined for these numbers
                continue
            stage_costs = costs_by_chunks.get(schedule.stages // ranks)
            if stage_costs is None or len(schedule.routes) > copies:
                continue
            if max(schedule.live) * ranks / schedule.stages <= max_activations + 1e-9:
                yield simulate(schedule, stage_costs).seconds, schedule


def lower_bound(
    costs: Costs, ranks: int, microbatches: int, max_activations: float, *, one_route: bool = True
) -> float:
    """Return a lower bound on the seconds of every order of the passes, on either machine of `simulate`.

    F, I and W are the seconds of a stage's forward, input gradient and weight gradient, and m is the number of
    microbatches. The result is the maximum of the last two lines over all stages s:

        start      = F of all stages before s
        round trip = F of s and of all stages after s + I of all stages after s
        idle       = max(0, round trip - (activations that the rank may hold) * F of s)
        start + idle + m (F + I + W) of s
        start + idle + m (F + I) of s + I of all stages before s + W of stage 0

    If `one_route` is false, a rank may have several stages, or a stage several ranks, and these formulas do not apply.
    The result is then the larger of two times: the seconds of all passes divided by the number of ranks, and the
    seconds of one microbatch forward and backward through all stages.

    Args:
        costs: costs of the stages.
        ranks: p, number of ranks.
        microbatches: m, number of microbatches.
        max_activations: the most activations that a rank may hold, in units of one microbatch for 1/p of the model.
        one_route: whether stage s is on rank s alone.

    Example:
        >>> lower_bound(Costs((1.0,) * 4, (1.0,) * 4, (1.0,) * 4), 4, 8, 4)
        27.0
    """
    f, m = costs.forward, microbatches
    # by stage, seconds of a whole backward and of an input gradient
    b = [min(costs.input[s] + costs.weight[s], costs.seconds(Kind.B, s)) for s in range(costs.stages)]
    i = [min(costs.input[s], b[s]) for s in range(costs.stages)]
    bound_seconds = sum(f) + sum(i) + b[0] - i[0]
    if not one_route:
        return max(bound_seconds, m * (sum(f) + sum(b)) / ranks)
    for s in range(costs.stages):
        round_trip = sum(f[s:]) + sum(i[s + 1 :])
        start_and_idle = sum(f[:s]) + max(0.0, round_trip - min(m, math.floor(max_activations + 1e-9)) * f[s])
        bound_seconds = max(bound_seconds, start_and_idle + m * (f[s] + b[s]))
        bound_seconds = max(bound_seconds, start_and_idle + m * (f[s] + i[s]) + sum(i[:s]) + b[0] - i[0])
    return bound_seconds


class _RouteSearch:
    """A search among the schedules with one assignment of stages to ranks.

    Args:
        costs: costs of the stages.
        route: the rank of each stage.
        ranks: p, number of ranks.
        microbatches: m, number of microbatches.
        max_activations: the most activations that a rank may hold, in units of one microbatch for 1/p of the model.
        seed: seed of the random changes.
    """

    def __init__(
        self, costs: Costs, route: tuple[int, ...], ranks: int, microbatches: int, max_activations: float, seed: int
    ) -> None:
        self._costs, self._route, self._ranks, self._microbatches = costs, route, ranks, microbatches
        # the most activations of a rank, each of one stage
        self._max_stage_activations = math.floor(max_activations * len(route) / ranks + 1e-9)
        self._clock = BatchClock(costs, route, ranks, microbatches)
        self._rng = random.Random(seed)
        self._stages_of_ranks = [[s for s, stage_rank in enumerate(route) if stage_rank == r] for r in range(ranks)]

    def run(
        self, start_orders: Sequence[Sequence[Sequence[Action]]], changes: int, bound_seconds: float
    ) -> tuple[float, tuple[tuple[Action, ...], ...]]:
        """Search for the fastest schedule, and return its seconds and the actions of each rank.

        Args:
            start_orders: for each named schedule from which the search starts, the actions of each rank.
            changes: number of changed orders to try.
            bound_seconds: a lower bound on the seconds; the search stops when it reaches the bound.
        """
        has_one_stage_each = self._route == tuple(range(self._ranks))
        if has_one_stage_each and has_few_schedules(self._ranks, self._microbatches, self._max_stage_activations):
            return fastest_orders(self._costs, self._microbatches, self._max_stage_activations)
        # for each start, the word of each rank
        start_words = [[self._word(order) for order in orders] for orders in start_orders]
        listed_words = (self._list_schedule_words() for _ in range(_LIST_SCHEDULES))
        start_words += [words for words in listed_words if words is not None]
        # int[start, rank, max_passes + 1]
        start_rows = np.stack(
            [np.stack([self._row(self._pass_numbers(word)) for word in words]) for words in start_words]
        )
        start_seconds = self._clock.seconds(start_rows)
        ranked_starts = np.argsort(start_seconds, kind="stable")
        best_seconds, best_words = float(start_seconds[ranked_starts[0]]), start_words[ranked_starts[0]]
        # half of the changes from the best start, a quarter from each of the next two
        for start, quarters in zip(ranked_starts[:3], (2, 1, 1), strict=False):
            if best_seconds <= bound_seconds * (1 + _TOLERANCE):
                break
            annealed_seconds, annealed_words = self._anneal(
                float(start_seconds[start]), start_words[start], start_rows[start], changes * quarters // 4
            )
            if annealed_seconds < best_seconds:
                best_seconds, best_words = annealed_seconds, annealed_words
        return best_seconds, tuple(tuple(map(self._action, self._pass_numbers(word) or ())) for word in best_words)

    def _anneal(
        self, start_seconds: float, start_words: list[Word], start_rows: np.ndarray, changes: int
    ) -> tuple[float, list[Word]]:
        """Change orders at random, and return the seconds and the words of the fastest orders.

        Args:
            start_seconds: seconds of the orders to start from.
            start_words: words of the orders to start from, by rank.
            start_rows: rows of these orders for `BatchClock`, int[rank, max_passes + 1].
            changes: number of changed orders to try.
        """
        current_seconds, words, rows = start_seconds, start_words, start_rows
        best_seconds, best_words = start_seconds, start_words
        round_count = max(1, changes // _BATCH_SIZE)
        for round_index in range(round_count):
            temperature = _START_TEMPERATURE * best_seconds * (1 - round_index / round_count) ** 2
            # (rank, changed word) of each proposal, and the rows of its orders
            ranks_and_words, proposed_rows = [], np.repeat(rows[None], _BATCH_SIZE, 0)
            for index in range(_BATCH_SIZE):
                rank = self._rng.randrange(self._ranks)
                word, pass_numbers = self._neighbour_word(words[rank])
                ranks_and_words.append((rank, word))
                proposed_rows[index, rank] = self._row(pass_numbers)
            proposal_seconds = self._clock.seconds(proposed_rows)
            # the fastest proposal, ties broken at random
            tie_breaks = [self._rng.random() * 1e-9 * best_seconds for _ in range(_BATCH_SIZE)]
            fastest_index = int((proposal_seconds + np.array(tie_breaks)).argmin())
            if proposal_seconds[fastest_index] <= current_seconds - temperature * math.log(1 - self._rng.random()):
                rank, word = ranks_and_words[fastest_index]
                words = [*words[:rank], word, *words[rank + 1 :]]
                rows, current_seconds = proposed_rows[fastest_index], float(proposal_seconds[fastest_index])
                if current_seconds < best_seconds:
                    best_seconds, best_words = current_seconds, words
        return best_seconds, best_words

    def _neighbour_word(self, word: Word) -> tuple[Word, list[int] | None]:
        """Return a valid word that differs a little from `word`, and the new word's pass numbers."""
        for _ in range(50):
            changed_word = list(word)
            for _ in range(self._rng.choice((1, 1, 2))):
                self._mutate(changed_word)
            if changed_word != word and (pass_numbers := self._pass_numbers(changed_word)) is not None:
                return changed_word, pass_numbers
        return word, self._pass_numbers(word)

    def _mutate(self, word: Word) -> None:
        """Change a word in place: split a backward, join the halves of a backward, or move a pass."""
        rng, index = self._rng, int(self._rng.random() * len(word))
        kind, stage = divmod(word[index], self._clock.stages)
        weight_letter = _W * self._clock.stages + stage
        if kind == _B and rng.random() < 0.5:  # split
            word[index] = _I * self._clock.stages + stage
            word.insert(min(len(word), index + 1 + rng.randrange(4)), weight_letter)
        elif kind == _I and rng.random() < 0.3:  # join with the next weight gradient
            if weight_letter in word[index:]:
                del word[word.index(weight_letter, index)]
                word[index] = _B * self._clock.stages + stage
        else:
            letter = word.pop(index)
            max_shift = len(word) if rng.random() < 0.1 else 6
            word.insert(max(0, min(len(word), index + rng.randint(-max_shift, max_shift))), letter)

    def _word(self, order: Sequence[Action]) -> Word:
        """Return the word of an order."""
        return [KINDS.index(action.kind) * self._clock.stages + action.stage for action in order]

    def _pass_numbers(self, word: Word) -> list[int] | None:
        """Return the pass numbers (`BatchClock`) of a word, or `None` if the word is invalid.

        A word is invalid if a gradient comes before its forward, if a W comes before its I, or if the rank would hold
        too many activations.
        """
        stage_count, activation_count = self._clock.stages, 0
        # by stage: the numbers of forwards and of input gradients so far, and the microbatches that have an I but no W
        forward_counts, gradient_counts = [0] * stage_count, [0] * stage_count
        pending_microbatches: list[collections.deque[int]] = [collections.deque() for _ in range(stage_count)]
        pass_numbers = []
        for letter in word:
            kind, stage = divmod(letter, stage_count)
            if kind == _F:
                microbatch = forward_counts[stage]
                forward_counts[stage] += 1
                activation_count += 1
                if activation_count > self._max_stage_activations:
                    return None
            elif kind == _W:
                if not pending_microbatches[stage]:
                    return None
                microbatch = pending_microbatches[stage].popleft()
                activation_count -= 1
            else:
                microbatch = gradient_counts[stage]
                gradient_counts[stage] += 1
                if gradient_counts[stage] > forward_counts[stage]:
                    return None
                if kind == _I:
                    pending_microbatches[stage].append(microbatch)
                else:
                    activation_count -= 1
            pass_numbers.append(letter * self._microbatches + microbatch)
        return pass_numbers

    def _action(self, pass_number: int) -> Action:
        """Return the action that a pass number (`BatchClock`) stands for."""
        letter, microbatch = divmod(pass_number, self._microbatches)
        kind, stage = divmod(letter, self._clock.stages)
        return Action(KINDS[kind], stage, microbatch)

    def _row(self, pass_numbers: list[int] | None) -> np.ndarray:
        """Return int[max_passes + 1]: the pass numbers of a valid word, padded to a row for `BatchClock`."""
        assert pass_numbers is not None
        return np.array(pass_numbers + [self._clock.end] * (self._clock.max_passes + 1 - len(pass_numbers)))

    def _list_schedule_words(self) -> list[Word] | None:
        """Return the word of each rank in a list schedule with random priorities; `None` if the ranks deadlock."""
        rng, stage_count, m = self._rng, self._clock.stages, self._microbatches
        priorities = [rng.random() + rng.random(), 0.0, rng.random() + rng.random(), rng.random()]  # by kind
        depth_weight = rng.choice((0.0, 1.0, -1.0))  # above 0: favors a rank's later stages; below 0: its earlier ones
        length_weight = rng.random() * rng.choice((0, 1))  # penalty for a pass that makes its tick longer
        gradient_kind = _B if rng.random() < 0.3 else _I
        priorities[gradient_kind] = priorities[_I]
        # for each rank, by how many microbatches a stage's forwards may be ahead of its gradients
        max_activations = self._max_stage_activations
        max_leads = [
            max_activations if rng.random() < 0.3 else max(1, max_activations - rank) for rank in range(self._ranks)
        ]
        pass_seconds = [[self._costs.seconds(kind, stage) for stage in range(stage_count)] for kind in KINDS]
        unit_seconds = max(self._costs.forward) or 1.0
        # by kind and stage, the number of passes that have run
        run_counts = [[0] * stage_count for _ in KINDS]
        activation_counts = [0] * self._ranks  # by rank, the number of activations that wait for B or W
        words: list[Word] = [[] for _ in range(self._ranks)]
        remaining_count = stage_count * m * (2 if gradient_kind == _B else 3)
        while remaining_count:
            tick_passes: list[tuple[int, int, int]] = []  # (rank, kind, stage) of the passes in this tick
            tick_seconds = 0.0
            for rank, rank_stages in enumerate(self._stages_of_ranks):
                ready_passes = []  # (kind, stage) of the passes that can run
                max_lead = max_leads[rank] if len(rank_stages) == 1 else max_activations
                for stage in rank_stages:
                    f, g, w = run_counts[_F][stage], run_counts[gradient_kind][stage], run_counts[_W][stage]
                    input_count = run_counts[_F][stage - 1] if stage else m
                    next_gradient_count = run_counts[gradient_kind][stage + 1] if stage + 1 < stage_count else m
                    if f < input_count and activation_counts[rank] < max_activations and f - g < max_lead:
                        ready_passes.append((_F, stage))
                    if g < min(f, next_gradient_count):
                        ready_passes.append((gradient_kind, stage))
                    if gradient_kind == _I and w < g:
                        ready_passes.append((_W, stage))
                if not ready_passes:
                    continue
                scores = [
                    priorities[kind]
                    + (kind == _W and activation_counts[rank] >= max_activations) * 0.5
                    + depth_weight * stage / stage_count
                    - length_weight * max(0.0, pass_seconds[kind][stage] - tick_seconds) / unit_seconds
                    for kind, stage in ready_passes
                ]
                kind, stage = ready_passes[scores.index(max(scores))]
                tick_seconds = max(tick_seconds, pass_seconds[kind][stage])
                tick_passes.append((rank, kind, stage))
            if not tick_passes:
                return None
            for rank, kind, stage in tick_passes:
                run_counts[kind][stage] += 1
                activation_counts[rank] += (1, -1, 0, -1)[kind]
                words[rank].append(kind * stage_count + stage)
            remaining_count -= len(tick_passes)
        return words
