"""PyTorch's CSV: what torch 2.13 wrote loads and checks, what is wrong is named by cell, what we write comes back."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.errors import UserError
from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.check import Fault
from jaxscale.pipeline.csv import parse_csv, read_csv, to_csv
from jaxscale.pipeline.schedules import METHODS
from jaxscale.pipeline.ticks import ticks

GOLDEN = Path(__file__).parents[1] / "golden" / "pipeline"
LOOP, VEE = (0, 1, 2, 3, 0, 1, 2, 3), (0, 1, 2, 3, 3, 2, 1, 0)
WRITTEN = {  # by torch: route, microbatches, the method of ours that has the same order
    "gpipe": ((0, 1, 2, 3), 8, ("gpipe", None)),
    "interleaved_1f1b": (LOOP, 8, ("interleaved", 2)),
    "interleaved_1f1b_10": (LOOP, 10, ("interleaved", 2)),
    "zero_bubble_1": ((0, 1, 2, 3), 8, ("zb-h1", None)),
    "zero_bubble_2": (LOOP, 8, None),
    "zbv": (VEE, 8, ("zb-v", None)),
    "dualpipe_v": (VEE, 10, ("dualpipe-v", None)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_torch_wrote(name):
    route, microbatches, method = WRITTEN[name]
    schedule = read_csv(GOLDEN / f"{name}.csv")
    assert schedule.routes == (route,)
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == (4, len(route), microbatches)
    assert schedule.split == (name not in ("gpipe", "interleaved_1f1b", "interleaved_1f1b_10"))
    if method:
        assert schedule.orders == METHODS[method[0]].schedule(4, microbatches, method[1]).orders
    lowered = GOLDEN / f"{name}.lowered.csv"
    if name != "gpipe":
        assert "SEND_F" in lowered.read_text()
        assert "REDUCE_GRAD" in lowered.read_text()
        assert read_csv(lowered).orders == schedule.orders


def test_forms_that_only_torch_s_files_have():
    text = (GOLDEN / "dualpipe_v.csv").read_text()
    assert "OVERLAP_F_B" in text
    assert {"7B3", "7I0", "7W0"} <= set(text.replace("(", ",").replace(")", ",").replace(";", ",").split(","))
    assert "0REDUCE_GRAD" in (GOLDEN / "gpipe.csv").read_text()


def test_torch_s_own_1f1b_is_refused():
    with pytest.raises(Fault, match="rank 3, cell 14: 3F8 is of an unknown microbatch, expected 0 to 7"):
        read_csv(GOLDEN / "1f1b.csv")
    text = (GOLDEN / "1f1b.csv").read_text().replace("3F8,", "")
    with pytest.raises(Fault, match="rank 3: lacks 3F0, the forward of microbatch 0 on stage 3"):
        parse_csv(text)
    last = text.splitlines()[-1]
    assert parse_csv(text.replace(last, f"3F0,{last}")).orders[:3] == METHODS["1f1b"].schedule(4, 8).orders[:3]


# --------------------------------------------------------------------------- out and in again


def synchronous() -> list[tuple[str, int, int, int | None]]:
    names = [
        (name, v) for name, method in METHODS.items() if not method.steps for v in (None, 3)[: method.interleaves + 1]
    ]
    sizes = [(2, 1), (2, 6), (3, 4), (4, 3), (4, 8)]
    return [
        (n, p, m, v) for (n, v), (p, m) in itertools.product(names, sizes) if n != "chimera" or not (p % 2 or m % p)
    ]


@pytest.mark.parametrize(("name", "p", "m", "v"), synchronous())
def test_round_trip(name, p, m, v):
    schedule = METHODS[name].schedule(p, m, v)
    for lower in (False, True):
        again = parse_csv(to_csv(schedule, lower=lower), name)
        assert (again.orders, again.stages, again.microbatches) == (
            schedule.orders,
            schedule.stages,
            schedule.microbatches,
        )
        assert [again.routes[again.route[i]] for i in range(m)] == [
            schedule.routes[schedule.route[i]] for i in range(m)
        ]
        if not lower:
            assert ticks(again) == ticks(schedule)
            assert again.cycle == schedule.cycle or len({a.kind for o in again.orders for a in o}) == 2


def test_lock_step_stays_lock_step():
    schedule = METHODS["lockstep"].schedule(4, 8)
    assert parse_csv(to_csv(schedule)).cycle == (Kind.F, Kind.B)
    packed = "\n".join(",".join(map(str, order)) for order in schedule.orders)
    assert parse_csv(packed).cycle is None
    assert parse_csv(packed).orders == schedule.orders


def test_chimera_keeps_its_two_directions():
    again = parse_csv(to_csv(METHODS["chimera"].schedule(4, 8)))
    assert again.routes == ((0, 1, 2, 3), (3, 2, 1, 0))
    assert again.route == (0, 0, 1, 1, 0, 0, 1, 1)


def test_written_for_torch(tmp_path):
    """What `tests/golden/pipeline/make.py --check` takes to PyTorch's reader."""
    for name, p, m, v in synchronous():
        if name != "chimera" and (p, m) in ((2, 6), (4, 3)):
            schedule = METHODS[name].schedule(p, m, v)
            for lower in (False, True):
                path = tmp_path / f"{name}_{p}_{m}_{schedule.chunks}{'.lowered' * lower}.csv"
                path.write_text(to_csv(schedule, lower=lower))
                assert read_csv(path).name == path.name


def test_updates_have_no_word():
    with pytest.raises(UserError, match="schedule pipedream: got updates of weights inside the schedule"):
        to_csv(METHODS["pipedream"].schedule(2, 1, updates=4))
    with pytest.raises(Fault, match=r"rank 0, cell 2: got '0U0', expected a pass such as 0F3"):
        parse_csv("0F0,0B0,0U0")


# --------------------------------------------------------------------------- cells


def test_cells_are_an_order_and_not_a_clock():
    straight = parse_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    assert parse_csv("0F0 , ,,0F1,0B0,,0B1,,\n,,,1F0,1B0,1F1,1B1").orders == straight.orders
    assert parse_csv("0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n\r\n").orders == straight.orders
    assert (
        parse_csv("0UNSHARD,0F0,0F1,0B0,0B1,0REDUCE_GRAD,0RESHARD\n1F0,1B0,(1F1;1B1)OVERLAP_F_B").orders
        == straight.orders
    )


def test_stages_are_where_they_are_run():
    schedule = parse_csv("1F0,1B0\n2F0,2B0\n0F0,0B0")
    assert schedule.routes == ((2, 0, 1),)
    assert parse_csv("0F0,3F0,3I0,0B0,3W0\n1F0,2F0,2B0,1I0,1W0").routes == ((0, 1, 1, 0),)


GOOD = [["0F0", "0F1", "0F2", "", "", "0B0", "0B1", "0B2"], ["", "1F0", "1F1", "1F2", "1B0", "1B1", "1B2"]]
LOWERED = [
    ["0UNSHARD", "0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
    ["1RECV_F0", "1F0", "1RECV_F1", "1B0", "1SEND_B0", "1F1", "1B1", "1SEND_B1"],
]


def changed(rows: list[list[str]], *changes: tuple[int, int, str | None]) -> str:
    """The text with cells replaced, or taken out, by (rank, column)."""
    copy = [list(row) for row in rows]
    for rank, column, cell in changes:
        copy[rank][column] = cell or ""
    return "\n".join(",".join(row) for row in copy)


WRONG = {
    "rank 1: lacks 1F1, the forward": changed(GOOD, (1, 2, "")),
    "rank 0: lacks the backward of 0F2: 0B2, or 0I2 and 0W2": changed(GOOD, (0, 7, "")),
    "rank 1, cell 5: 1B0 occurs twice, first in cell 4": changed(GOOD, (1, 5, "1B0")),
    "rank 1, cell 0: 0F0 occurs twice|rank 1, cell 0: 0F0 belongs on rank 0": changed(GOOD, (1, 0, "0F0")),
    "rank 0, cell 4: 1F2 belongs on rank 1": changed(GOOD, (1, 3, ""), (0, 4, "1F2")),
    "rank 1, cell 1: 1B0 comes before 1F0 .cell 4., which it needs": changed(GOOD, (1, 1, "1B0"), (1, 4, "1F0")),
    "rank 0, cell 1: 0B0 waits forever: rank 0 waits in cell 1 .0B0. for 1B0, rank 1 waits in cell 2 .1F1. for 0F1": (
        changed(GOOD, (0, 1, "0B0"), (0, 5, "0F1"))
    ),
    "rank 0, cell 3: 0F3 is of an unknown microbatch, expected 0 to 2": changed(GOOD, (0, 3, "0F3")),
    "rank 0, cell 3: 7F0 is of stage 7, but stage 2 has no rank": changed(GOOD, (0, 3, "7F0")),
    "rank 0, cell 3: got '0X0', expected a pass": changed(GOOD, (0, 3, "0X0")),
    "rank 0, cell 3: got '.0F0;0SEND_F0.OVERLAP_F_B', expected": changed(GOOD, (0, 3, "(0F0;0SEND_F0)OVERLAP_F_B")),
    "rank 0, cell 3: got '{0F0}', expected": changed(GOOD, (0, 3, "{0F0}")),
    "rank 0, cell 0: 0F99999999 is of microbatch 99999999, but most earlier microbatches": "0F99999999,0B99999999",
    "rank 0: lacks 0F0": "0W0,0I0",
    "rank 0, cell 0: got '٣F0'": "٣F0,0B0",
    "rank 1: has no pass, expected one or more": "0F0,0B0\n,,\n1F0,1B0",
    "rank 1, cell 0: lacks|rank 1: lacks 1RECV_F0, the message of 1F0, which this rank": changed(LOWERED, (1, 0, "")),
    "rank 0: lacks 0SEND_F1, the message of 0F1, which another rank waits for": changed(LOWERED, (0, 4, "")),
    "rank 1, cell 0: 1RECV_F1 stands|rank 1, cell 2: 1RECV_F1 occurs twice": changed(LOWERED, (1, 0, "1RECV_F1")),
    "rank 0, cell 0: 0SEND_F0 comes before 0F0 .cell 1.": changed(LOWERED, (0, 0, "0SEND_F0"), (0, 2, "")),
    "rank 1, cell 7: 1RECV_F1 comes after 1F1 .cell 5.": changed(LOWERED, (1, 2, ""), (1, 7, "1RECV_F1")),
    "rank 0, cell 0: 1RECV_F0 belongs on rank 1": changed(LOWERED, (0, 0, "1RECV_F0")),
    "rank 0, cell 0: 0SEND_B0 carries no result to another rank": changed(LOWERED, (0, 0, "0SEND_B0")),
    "rank 0, cell 0: 0SEND_F7 carries no result to another rank": changed(LOWERED, (0, 0, "0SEND_F7")),
}


@pytest.mark.parametrize(("message", "text"), WRONG.items(), ids=[message[:40] for message in WRONG])
def test_what_is_wrong_is_named(message, text):
    assert parse_csv(changed(GOOD)).microbatches == 3
    assert parse_csv(changed(LOWERED)).microbatches == 2
    with pytest.raises(Fault, match=rf"^schedule mine\.csv, ({message})"):
        parse_csv(text, "mine.csv")


@pytest.mark.parametrize("name", [name for name in METHODS if not METHODS[name].steps])
def test_every_cell_that_is_taken_out_is_missed(name):
    schedule = METHODS[name].schedule(4, 4)
    for rank, order in enumerate(schedule.orders):
        for cell, action in enumerate(order):
            rows = [list(map(str, one)) for one in schedule.orders]
            rows[rank][cell] = ""
            with pytest.raises(Fault) as raised:
                parse_csv("\n".join(map(",".join, rows)))
            assert raised.value.rank == rank
            assert str(action) in str(raised.value)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera"])
def test_every_cell_on_another_rank_is_named(name):
    schedule = METHODS[name].schedule(4, 8)
    for rank, order in enumerate(schedule.orders):
        for cell in range(0, len(order), 3):
            rows = [list(map(str, one)) for one in schedule.orders]
            moved, other = rows[rank].pop(cell), (rank + 1) % 4
            rows[other].append(moved)
            with pytest.raises(Fault, match=f"{moved} belongs on rank {rank}$") as raised:
                parse_csv("\n".join(map(",".join, rows)))
            assert (raised.value.rank, raised.value.cell) == (other, len(rows[other]) - 1)


CELLS = ["", "0F0", "0B0", "0I0", "0W0", "1F0", "1B0", "1I0", "1W0", "0F1", "0B1", "1F1", "1B1", "0SEND_F0", "1RECV_F0"]
CELLS += [
    "1SEND_B0",
    "0RECV_B0",
    "0UNSHARD",
    "(0F1;0B0)OVERLAP_F_B",
    "()OVERLAP_F_B",
    "9999999999F1",
    "0F-1",
    '"',
    "{0}",
]


@given(st.lists(st.lists(st.sampled_from(CELLS), max_size=6), max_size=3))
def test_any_text_is_taken_or_refused(table):
    text = "\n".join(map(",".join, table))
    try:
        schedule = parse_csv(text)
    except UserError:
        return
    for lower in (False, True):
        assert parse_csv(to_csv(schedule, lower=lower)).orders == schedule.orders


def test_files(tmp_path):
    with pytest.raises(UserError, match=r"none\.csv.*there is no file.*a line for each rank"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "empty.csv").write_text("\n\n")
    with pytest.raises(UserError, match="got an empty file"):
        read_csv(tmp_path / "empty.csv")
    (tmp_path / "marked.csv").write_text("\ufeff0F0,0B0\n", encoding="utf-8")
    assert read_csv(tmp_path / "marked.csv").orders == ((Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)),)
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(UserError, match=r"picture\.csv"):
        read_csv(tmp_path / "picture.csv")
