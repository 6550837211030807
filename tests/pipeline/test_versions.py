"""Versions of weights and the endless table, without JAX: what is in a slot is what the action expects there."""

import dataclasses
import itertools

import pytest

from jaxscale.errors import UserError
from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.run.stream import COLUMNS, stream
from jaxscale.pipeline.run.tables import CODES
from jaxscale.pipeline.schedules import METHODS
from jaxscale.pipeline.versions import ring_slot_count, uses, version_lifetimes

RANKS = 1, 2, 3, 4, 6
CASES = [(name, p, m) for name in ("pipedream", "pipemare") for p in RANKS for m in (1,)]
CASES += [("2bw", p, m) for p in RANKS for m in (p, p + 1, 2 * p)]


def used_by_rule(name, ranks, group, stage, microbatch):
    """The version that a forward reads and that its backward linearises at, from the papers."""
    if name == "2bw":
        version = max(0, microbatch // group - 1)
        return version, version
    forward = max(0, microbatch - (ranks - 1 - stage))
    return forward, microbatch if name == "pipemare" else forward


@pytest.mark.parametrize(("name", "ranks", "group"), CASES)
def test_versions_are_those_of_the_papers(name, ranks, group):
    updates = 3 * ranks
    found = uses(METHODS[name].schedule(ranks, group, updates=updates))
    for stage, i in itertools.product(range(ranks), range(updates * group)):
        forward, backward = (found[Action(kind, stage, i)] for kind in (Kind.F, Kind.B))
        assert (forward.reads, backward.reads) == used_by_rule(name, ranks, group, stage, i)
        assert backward.makes == ((i + 1) // group if (i + 1) % group == 0 else None)


@pytest.mark.parametrize("ranks", RANKS)
def test_lifetimes_find_the_number_of_versions(ranks):
    found = {
        name: stream(METHODS[name], ranks, ranks if name == "2bw" else 1) for name in ("pipedream", "2bw", "pipemare")
    }
    assert found["pipedream"].version_count == ranks
    assert found["2bw"].version_count == 2
    assert found["pipemare"].version_count == 1
    assert found["pipedream"].delays == found["pipemare"].delays == tuple(range(ranks - 1, -1, -1))
    assert found["2bw"].delays == (1,) * ranks
    assert all(one.carried_count == ranks - 1 for one in found.values())


def test_a_stage_further_down_keeps_fewer_versions():
    schedule = METHODS["pipedream"].schedule(4, 1, updates=12)
    at = {
        action: 2 * action.microbatch + (action.stage if action.kind is Kind.F else 7 - action.stage)
        for order in schedule.orders
        for action in order
    }
    assert [ring_slot_count(found) for found in version_lifetimes(schedule, at).values()] == [4, 3, 2, 1]


@pytest.mark.parametrize("stash", ["input", "residuals"])
@pytest.mark.parametrize(("name", "ranks", "group"), CASES)
def test_slots_hold_what_is_read(name, ranks, group, stash):
    """The table followed for three periods by a machine whose values are labels."""
    table = stream(METHODS[name], ranks, group, stash)
    period = len(table.rows) - table.ramp_ticks
    messages = [[None] * (table.message_slot_count + 1) for _ in range(ranks)]
    kept = [[None] * table.stash_slot_count for _ in range(ranks)]
    versions = [[0] * table.version_count for _ in range(ranks)]
    boxes = [{} for _ in range(ranks)]
    made, done, entered = [0] * ranks, {kind: [0] * ranks for kind in "FB"}, 0
    for tick in range(table.ramp_ticks + 3 * period):
        later = max(0, tick - table.ramp_ticks)
        row = table.rows[tick if tick < table.ramp_ticks else table.ramp_ticks + later % period]
        entered += tick % table.pace == 0
        sent = []
        for rank in range(ranks):
            cell = dict(zip(COLUMNS, row[:, rank].tolist(), strict=True))
            i = cell["microbatch"] + table.period_microbatches * (later // period)
            for way in ("from_left", "from_right"):
                messages[rank][cell[way]] = boxes[rank].get(way)
            if cell["kind"] == 0:
                sent.append(None)
                continue
            forward, backward = used_by_rule(name, ranks, group, rank, i)
            if cell["kind"] == CODES[Kind.F]:
                assert i == done["F"][rank] < entered
                assert rank == 0 or messages[rank][cell["x"]] == ("F", rank - 1, i)
                assert versions[rank][cell["read_slot"]] == forward
                kept[rank][cell["stash"]] = i
                done["F"][rank] += 1
                sent.append(("F", rank, i))
            else:
                assert i == done["B"][rank]
                assert stash == "residuals" or rank == 0 or messages[rank][cell["x"]] == ("F", rank - 1, i)
                assert rank == ranks - 1 or messages[rank][cell["g"]] == ("B", rank + 1, i)
                assert kept[rank][cell["stash"]] == i
                assert versions[rank][cell["read_slot"]] == backward
                assert cell["has_update"] == ((i + 1) % group == 0)
                if cell["has_update"]:
                    made[rank] += 1
                    versions[rank][cell["write_slot"]] = made[rank]
                done["B"][rank] += 1
                sent.append(("B", rank, i))
        boxes = [{"from_left": sent[rank - 1], "from_right": sent[(rank + 1) % ranks]} for rank in range(ranks)]
    # no bubble once it runs: a forward and a backward per microbatch
    assert min(done["B"]) >= entered - ranks


def test_what_cannot_stream_is_refused():
    with pytest.raises(UserError, match="1f1b is synchronous"):
        stream(METHODS["1f1b"], 4, 8)
    with pytest.raises(UserError, match="got a synchronous schedule without versions, expected an asynchronous one"):
        uses(METHODS["1f1b"].schedule(2, 2))
    mine = METHODS["pipedream"].schedule(2, 1, updates=4)
    late = [list(order) for order in mine.orders]
    place = late[0].index(Action(Kind.U, 0, 0))
    late[0][place], late[0][place + 1] = late[0][place + 1], late[0][place]
    with pytest.raises(UserError, match="rank 0: 0U0 follows 0F2, expected the backward of microbatch 0"):
        uses(dataclasses.replace(mine, orders=tuple(map(tuple, late)), bound=None))
