"""Tables against a machine that follows them with names in place of arrays."""

import pytest

from jaxscale.errors import UserError
from jaxscale.pipeline.action import KINDS, Action, Kind
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.run.phases import phases
from jaxscale.pipeline.run.tables import CODES, IDLE, ORIGINS, tabulate
from jaxscale.pipeline.schedules import METHODS

SYNCHRONOUS = sorted(name for name, method in METHODS.items() if not method.steps)


def schedules(ranks, counts):
    for name in SYNCHRONOUS:
        for microbatches in counts:
            try:
                yield METHODS[name].schedule(ranks, microbatches)
            except UserError:
                continue


def follow(tables, *, forward_only=False):
    """Run tables by the rules of a tick, names in place of arrays; the actions in the order they ran."""
    schedule, columns, ranks = tables.schedule, tables.columns, tables.schedule.ranks
    messages = [{} for _ in range(ranks)]
    kept = [{} for _ in range(ranks)]
    cuts = [{} for _ in range(ranks)]
    sent, ran = [None] * ranks, []
    for tick in range(tables.tick_count):
        cells = {name: column[tick] for name, column in columns.items()}
        travels = {way: tick and flags[tick - 1] for way, flags in tables.travel_flags.items()}
        arrives = {"from_left": sent[-1:] + sent[:-1], "from_right": sent[1:] + sent[:1], "to_self": sent}
        for rank in range(ranks):
            for way in ORIGINS:
                if (slot := cells[way][rank]) < tables.message_slot_count:
                    assert way == "to_self" or travels[way], "no message travelled"
                    messages[rank][slot] = arrives[way][rank]
        sent = [None] * ranks
        for rank in range(ranks):
            code = cells["kind"][rank]
            if code == IDLE:
                continue
            kind, stage, microbatch = KINDS[code - 1], int(cells["stage"][rank]), int(cells["microbatch"][rank])
            assert schedule.place(schedule.route[microbatch], stage) == (rank, cells["chunk"][rank])
            read = messages[rank]
            x, g = ("x", stage, microbatch), ("g", stage, microbatch)
            if stage and (kind is Kind.F or tables.stash == "input"):
                assert read[cells["x"][rank]] == x
            if stage + 1 < schedule.stages and (kind in (Kind.B, Kind.I) or (kind, tables.stash) == (Kind.W, "input")):
                assert read[cells["g"][rank]] == g
            if kind is Kind.F:
                assert cells["residual"][rank] < tables.stash_slot_count
                kept[rank][cells["residual"][rank]] = (stage, microbatch)
                sent[rank] = ("x", stage + 1, microbatch)
            else:
                assert kept[rank][cells["residual"][rank]] == (stage, microbatch)
            if kind is Kind.I:
                assert cells["cut"][rank] < tables.cut_slot_count
                cuts[rank][cells["cut"][rank]] = (stage, microbatch)
            if kind is Kind.W:
                assert cuts[rank][cells["cut"][rank]] == (stage, microbatch)
            if kind in (Kind.B, Kind.I):
                sent[rank] = ("g", stage - 1, microbatch)
            ran.append(Action(kind, stage, microbatch))
    return ran


@pytest.mark.parametrize("stash", ["input", "residuals"])
@pytest.mark.parametrize("ranks", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_action_finds_its_operands(ranks, stash):
    counts = sorted({1, 3, ranks, 2 * ranks, 4 * ranks})
    for schedule in schedules(ranks, counts):
        tables = tabulate(schedule, stash)
        ran = follow(tables)
        assert sorted(ran) == sorted(action for order in schedule.orders for action in order), schedule.name
        forward = tabulate(schedule, stash, forward_only=True)
        assert sorted(follow(forward)) == sorted(action for action in ran if action.kind is Kind.F)
        assert not forward.has_backward


@pytest.mark.parametrize("ranks", [2, 4])
def test_as_many_slots_as_the_schedule_holds_activations(ranks):
    for schedule in schedules(ranks, (ranks, 4 * ranks)):
        assert tabulate(schedule).stash_slot_count == max(schedule.live), schedule.name


def test_memory_of_1f1b_is_flat_and_that_of_gpipe_grows():
    one = [tabulate(METHODS["1f1b"].schedule(4, m)) for m in (4, 32)]
    assert one[0].message_slot_count == one[1].message_slot_count
    assert [tabulate(METHODS["gpipe"].schedule(4, m)).stash_slot_count for m in (4, 32)] == [4, 32]


def test_of_two_ranks_forwards_come_from_the_left_and_gradients_from_the_right():
    """Each rank is the other's left and right neighbour: one box for both would lose a message (hazard 4)."""
    tables = tabulate(METHODS["1f1b"].schedule(2, 4))
    kinds, stages = tables.columns["kind"], tables.columns["stage"]
    for tick, rank in zip(*(tables.columns["from_left"] < tables.message_slot_count).nonzero(), strict=True):
        assert (kinds[tick - 1, 1 - rank], stages[tick - 1, 1 - rank]) == (CODES[Kind.F], rank - 1)
    for tick, rank in zip(*(tables.columns["from_right"] < tables.message_slot_count).nonzero(), strict=True):
        assert (kinds[tick - 1, 1 - rank], stages[tick - 1, 1 - rank]) == (CODES[Kind.B], rank + 1)


@pytest.mark.parametrize(
    ("name", "lockstep"), [("gpipe", True), ("lockstep", True), ("1f1b", False), ("zb-h1", False), ("chimera", False)]
)
def test_which_tables_are_lockstep(name, lockstep):
    assert tabulate(METHODS[name].schedule(4, 8)).is_lockstep is lockstep


@pytest.mark.parametrize("name", ["gpipe", "lockstep"])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 32])
def test_phases_say_the_kind_of_every_tick(name, microbatches):
    tables = tabulate(METHODS[name].schedule(4, microbatches))
    found = phases(tables)
    kinds = [kind for motif, repeats in found for kind in motif * repeats]
    assert kinds == tables.columns["kind"].max(1).tolist()
    assert len(found) <= 5, "as few loops with any number of microbatches"


def test_a_message_stays_where_the_next_stage_is_on_the_same_rank():
    tables = tabulate(METHODS["zb-v"].schedule(4, 8))
    turned = tables.columns["to_self"] < tables.message_slot_count
    assert turned[:, 3].sum() == 2 * 8
    assert not turned[:, :3].any()


def test_an_asynchronous_schedule_is_refused():
    schedule = METHODS["pipedream"].schedule(2, 1, updates=4)
    with pytest.raises(UserError, match="updates weights inside the schedule"):
        tabulate(schedule)


def test_stages_on_ranks_that_are_no_neighbours_are_refused():
    """Stages 0, 1, 2, 3 on ranks 0, 2, 1, 3."""
    places = (0, 2, 1, 3)
    order = {rank: (Action(Kind.F, stage, 0), Action(Kind.B, stage, 0)) for stage, rank in enumerate(places)}
    schedule = Schedule("far", tuple(order[rank] for rank in range(4)), 4, 1, (places,), (0,))
    with pytest.raises(UserError, match=r"from rank 0 to rank 2: expected neighbors on a ring of 4"):
        tabulate(schedule)
