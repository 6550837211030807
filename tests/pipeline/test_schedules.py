"""One battery for every named schedule, then what each of them promises."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from jaxscale.errors import UserError
from jaxscale.pipeline import schedules
from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.simulate import simulate
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.schedules import METHODS
from jaxscale.pipeline.ticks import rows, ticks

SIZES = [
    pytest.param(p, m, marks=pytest.mark.slow) if p * m > 64 else (p, m)
    for p in (2, 4, 8)
    for m in sorted({1, 3, p, 2 * p, 4 * p})
]
ODD_SIZES = [(1, 1), (1, 4), (3, 1), (3, 3), (3, 6), (5, 7), (6, 8)]


PUBLISHED = {
    "gpipe", "1f1b", "lockstep", "interleaved", "chimera", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "pipedream", "2bw",
    "pipemare",
}  # fmt: skip


def refused(name: str, p: int, m: int) -> str | None:
    """Why a schedule is not defined for so many devices and microbatches."""
    if name == "chimera" and p % 2:
        return "even number"
    if name == "chimera" and m % p:
        return f"a multiple of {p}, the number of devices"
    return f"at least {p}, the number of devices" if name == "2bw" and m < p else None


def made(name: str, p: int, m: int, v: int | None = None) -> Schedule:
    """The schedule of m microbatches, or of as many updates where each is one; three groups of 2BW."""
    method = METHODS[name]
    if method.streams:
        return method.schedule(p, 1, updates=m)
    return method.schedule(p, m, v, updates=3 if method.steps else 1)


def variants() -> list[tuple[str, int | None]]:
    return [(name, v) for name, method in METHODS.items() for v in ((None, 2, 3) if method.interleaves else (None,))]


def attempted(name, p, m, v):
    """A schedule, or what its refusal says."""
    try:
        return made(name, p, m, v), ""
    except UserError as error:
        return None, str(error)


@pytest.mark.parametrize(("p", "m"), SIZES + ODD_SIZES)
@pytest.mark.parametrize(("name", "v"), variants())
def test_every_schedule_is_valid_or_refused_by_name(name, v, p, m):
    if name in PUBLISHED and (why := refused(name, p, m)):
        with pytest.raises(UserError, match=rf"^schedule {name}: got .*expected .*{why}"):
            made(name, p, m, v)
        return
    schedule, refusal = attempted(name, p, m, v)
    if schedule is None:  # a new one says for itself where it is defined
        assert name not in PUBLISHED
        assert (p, m) != (4, 8)
        assert re.match(rf"schedule {name}: got .*expected ", refusal)
        return
    assert schedule.ranks == p
    assert schedule.microbatches == m * (3 if name == "2bw" else 1)
    assert schedule.chunks == (v or METHODS[name].chunks)
    if name in PUBLISHED:
        assert schedule.bound is not None
        assert m < p or schedule.live == schedule.bound  # the bound is no larger than it must
    for route in schedule.routes:  # messages go to a neighbour on the ring
        assert all((b - a) % p in (0, 1 % p, p - 1) for a, b in itertools.pairwise(route))
    at = ticks(schedule)
    for order in schedule.orders:
        placed = [at[action] for action in order if action.kind is not Kind.U]
        assert placed == sorted(set(placed))
        assert all(at[one] < at[action] for action in order for one in schedule.inputs(action))


# --------------------------------------------------------------------------- memory, as the papers and the ledger say


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_activations_alive(p, m):
    alive = {name: made(name, p, m).live for name in PUBLISHED if not refused(name, p, m)}
    assert alive["gpipe"] == (m,) * p
    for name in ("1f1b", "pipedream", "pipemare"):
        assert alive[name] == tuple(min(p - s, m) for s in range(p))
    assert alive["lockstep"] == tuple(min(2 * p - 1 - 2 * s, m) for s in range(p))
    assert alive["zb-h1"] == (min(p, m),) * p
    assert alive["zb-h2"] == (min(2 * p - 1, m),) * p
    assert max(alive["zb-v"]) == min(2 * p, 2 * m)
    assert max(alive["dualpipe-v"]) == min(2 * p + 1, 2 * m)
    if "chimera" in alive:
        assert min(alive["chimera"]) == p // 2 + 1
        assert max(alive["chimera"]) == p
    if m >= p:
        group = p if m % p == 0 else m
        for v in (2, 4):
            assert made("interleaved", p, m, v).live[0] == min((v - 1) * group + 2 * p - 1, v * m)


# --------------------------------------------------------------------------- ticks of one kind


@pytest.mark.parametrize(("p", "m"), SIZES + ODD_SIZES)
@pytest.mark.parametrize("v", [1, 2, 4])
def test_lock_step_ticks_are_of_one_kind(p, m, v):
    schedule = METHODS["lockstep"].schedule(p, m, v)
    assert schedule.cycle == (Kind.F, Kind.B)
    table = rows(schedule)
    kinds = [{action.kind for action in row if action} for row in table]
    assert all(len(one) == 1 for one in kinds)
    turns = v * m + p - 1 + (v - 1) * max(0, p - m)
    assert sum(one == {Kind.F} for one in kinds) == sum(one == {Kind.B} for one in kinds) == turns


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_lock_step_tells_a_few_phases(p, m):
    if m < p:
        return
    kinds = "".join(next(action.kind for action in row if action) for row in rows(METHODS["lockstep"].schedule(p, m)))
    assert kinds == "F" * (p - 1) + "FB" * m + "B" * (p - 1)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_is_of_one_kind_as_it_is(p, m):
    schedule = METHODS["gpipe"].schedule(p, m)
    assert ticks(schedule) == ticks(dataclasses.replace(schedule, cycle=None))


def test_textbook_1f1b_mixes_kinds():
    table = rows(METHODS["1f1b"].schedule(4, 8))
    assert any(len({action.kind for action in row if action}) > 1 for row in table)


# --------------------------------------------------------------------------- bubbles that test_simulate.py leaves


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("v", [2, 4])
def test_interleaved_for_every_number_of_microbatches(p, v):
    for m in range(1, 3 * p + 2, 1 if p < 4 else p - 1):
        schedule = METHODS["interleaved"].schedule(p, m, v)
        for backward in (1.0, 2.0, 0.5):
            found = run(schedule, 1.0, backward / 2, backward / 2)
            turns = v * m + p - 1 + (v - 1) * max(0, p - m)
            assert found.seconds == pytest.approx(turns * (1 + backward) / v, rel=1e-9)


def run(schedule: Schedule, *seconds: float):
    return simulate(schedule, Costs.alike(schedule, *seconds), "dataflow")


@pytest.mark.parametrize("p", [2, 4, 8])
def test_zero_bubble_h2_and_dualpipe_v(p):
    for m in (2 * p - 1, 2 * p, 3 * p + 1):
        found = run(METHODS["zb-h2"].schedule(p, m), 1.0, 1.0, 1.0)
        assert found.seconds == pytest.approx(3 * m + p - 1)
        assert found.bubble_own_span == pytest.approx(0, abs=1e-9)
    for m in (2 * p, 2 * p + 1, 4 * p):
        found = run(METHODS["dualpipe-v"].schedule(p, m), 1.0, 1.0, 1.0)
        assert found.seconds == pytest.approx(3 * m + (p - 1) / 2)


def test_chimera_has_the_order_of_the_published_slots():
    p, units = 4, 2
    slots: list[dict[int, Action]] = [{} for _ in range(p)]
    for unit, i, d in itertools.product(range(units), range(p // 2), range(p)):
        down, up, start = p * unit + i, p * unit + p // 2 + i, 2 * p * unit
        slots[d][start + d + 2 * i] = Action(Kind.F, d, down)
        slots[d][start + 2 * p - 1 - d + 2 * i] = Action(Kind.B, d, down)
        slots[d][start + p - 1 - d + 2 * i] = Action(Kind.F, p - 1 - d, up)
        slots[d][start + p + d + 2 * i] = Action(Kind.B, p - 1 - d, up)
    orders = tuple(tuple(row[slot] for slot in sorted(row)) for row in slots)
    assert METHODS["chimera"].schedule(p, units * p).orders == orders


# --------------------------------------------------------------------------- asynchronous


def delays(schedule: Schedule, stage: int) -> list[int]:
    """For each microbatch how many updates its forward has missed, of those that a sequential run would have done."""
    assert schedule.versions is not None
    missed, done = [], 0
    for action in schedule.orders[stage]:
        done += action.kind is Kind.U
        if action.kind is Kind.F:
            missed.append(action.microbatch // schedule.versions.group - done)
    return missed


@pytest.mark.parametrize("p", [2, 4, 8])
def test_pipedream_is_p_1_s_updates_behind(p):
    for name in ("pipedream", "pipemare"):
        schedule = made(name, p, 3 * p)
        for stage in range(p):
            assert delays(schedule, stage) == [min(i, p - 1 - stage) for i in range(3 * p)]
    assert made("pipedream", p, 8).versions != made("pipemare", p, 8).versions


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 8), (8, 9)])
def test_2bw_is_one_group_behind_everywhere_and_two_versions_suffice(p, m):
    schedule = METHODS["2bw"].schedule(p, m, updates=5)
    for stage, order in enumerate(schedule.orders):
        assert set(delays(schedule, stage)) <= {0, 1}
        done = 0
        in_flight: dict[int, int] = {}
        for action in order:
            done += action.kind is Kind.U
            group = action.microbatch // m
            if action.kind is Kind.F:
                in_flight[group] = in_flight.get(group, 0) + 1
            if action.kind is Kind.B:
                in_flight[group] -= 1
            read = {max(0, group - 1) for group, count in in_flight.items() if count}
            assert len(read | {done}) <= 2


def test_updates_are_counted_by_asynchronous_schedules_alone():
    with pytest.raises(UserError, match="schedule 1f1b: got 3 updates, expected 1: it is a synchronous schedule"):
        METHODS["1f1b"].schedule(4, 8, updates=3)
    with pytest.raises(UserError, match="schedule pipedream: got 8 microbatches per update, expected 1"):
        METHODS["pipedream"].schedule(4, 8)


# --------------------------------------------------------------------------- what the user may choose


def test_stages_a_device():
    assert METHODS["interleaved"].schedule(4, 8).chunks == 2
    assert METHODS["lockstep"].schedule(4, 8).chunks == 1
    with pytest.raises(UserError, match="interleaved: got v=1, expected 2 or more; 1f1b"):
        METHODS["interleaved"].schedule(4, 8, 1)
    with pytest.raises(
        UserError, match="1f1b: got v=2, but a device holds one stage; only interleaved and lockstep take v"
    ):
        METHODS["1f1b"].schedule(4, 8, 2)
    with pytest.raises(UserError, match="zb-v: got v=3, but each device holds 2 stages"):
        METHODS["zb-v"].schedule(4, 8, 3)
    assert METHODS["zb-v"].schedule(4, 8, 2) == METHODS["zb-v"].schedule(4, 8)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("numbers", [(0, 4), (4, 0), (4, 4, 0)])
def test_numbers_below_one(name, numbers):
    with pytest.raises(UserError, match=f"^schedule {name}: got 0 "):
        METHODS[name].schedule(*numbers)


NEW = """
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.schedules.gpipe import gpipe

METHOD = Method("mine", "a new one", gpipe)
"""


def test_a_file_of_schedules_is_found_by_itself(tmp_path, monkeypatch):
    folder = Path(schedules.__file__).parent
    assert set(METHODS) >= PUBLISHED
    assert len(METHODS) == len([path for path in folder.glob("*.py") if path.name != "__init__.py"])
    (tmp_path / "mine_alone.py").write_text(NEW)
    monkeypatch.setattr(schedules, "__path__", [*schedules.__path__, str(tmp_path)])
    assert set(schedules._methods()) == {*METHODS, "mine"}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_schedules_of_five_hundred_ticks(name):
    method = METHODS[name]
    schedule = method.schedule(8, 1, updates=248) if method.streams else method.schedule(8, 248)
    assert len(rows(schedule)) >= 400
