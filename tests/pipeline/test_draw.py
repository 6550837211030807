"""Charts read back: what they show is what the simulation says."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from jaxscale.errors import UserError
from jaxscale.pipeline.charts.draw import Chart
from jaxscale.pipeline.charts.svg import svg_chart
from jaxscale.pipeline.charts.text import FILL, columns_per_second, text_chart
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.simulate import MachineModel, Simulation, simulate
from jaxscale.pipeline.csv import parse_csv
from jaxscale.pipeline.schedules import METHODS

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
SVG = "{http://www.w3.org/2000/svg}"


def simulated(name: str, machine: MachineModel = "neighbour", ranks: int = 4, **costs: float) -> Simulation:
    method = METHODS[name]
    updates = 8 if method.steps else 1
    schedule = method.schedule(ranks, 1 if method.streams else 2 * ranks, updates=updates)
    return simulate(schedule, Costs.alike(schedule, **costs), machine)


def bodies(chart: str) -> list[str]:
    """What stands between the bars of each rank."""
    return [line.split("│")[1] for line in chart.splitlines() if "│" in line]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_column_shows_who_works_in_it(name):
    found = simulated(name)
    scale = 4.0  # columns of a unit, so that half units have two
    lines = bodies(text_chart(found, time_scale=scale))
    for rank, (order, spans) in enumerate(zip(found.schedule.orders, found.spans, strict=True)):
        expected = [" "] * round(found.seconds * scale)
        first = found.schedule.stages_of(rank)[0]
        for action, (start, end) in zip(order, spans, strict=True):
            left, right = round(start * scale), round(end * scale)
            letter = action.kind.value if action.stage == first else action.kind.value.lower()
            expected[left:right] = letter * (right - left)
        for shown, kind in zip(lines[rank], expected, strict=True):
            same = shown in (kind, FILL.get(kind.upper())) or (shown.isdecimal() and kind != " ")
            assert same, (name, rank, lines[rank])


@pytest.mark.parametrize(("name", "width"), [*((name, 80) for name in sorted(METHODS)), ("zb-v", 44), ("2bw", 200)])
def test_a_chart_keeps_within_the_terminal(name, width):
    for found in (simulated(name), simulated(name, forward=0.7, input=1.3)):
        chart = text_chart(found, width)
        assert max(map(len, chart.splitlines())) <= width
        assert len(bodies(chart)) == 4
        for rank, line in enumerate(chart.splitlines()[:4]):
            assert line.endswith(f"{found.live_shares[rank]:g} live")


def test_a_terminal_that_is_too_narrow_gets_the_least():
    assert len(bodies(text_chart(simulated("1f1b"), 10))[0]) <= 24


def test_microbatches_are_numbered_where_there_is_room():
    found = simulated("gpipe")
    assert bodies(text_chart(found, 100))[0].startswith("F0F1F2F3F4F5F6F7")
    assert bodies(text_chart(found, 60))[0].startswith("FFFFFFFF")


def test_what_is_shorter_than_a_column_gives_way_to_what_is_longer():
    [line] = bodies(text_chart(simulated("1f1b", ranks=1, input=200.0), 60))
    assert set(line) == {"B", "═"}
    [line] = bodies(text_chart(simulated("1f1b", ranks=1, input=0.0, weight=0.0, forward=200.0), 60))
    assert "B" not in line


def test_colors_leave_the_letters_as_they_are():
    found = simulated("zb-v")
    plain, colored = (text_chart(found, 160, color=color) for color in (False, True))
    assert colored.count("\x1b[0m") >= 4
    blank = str.maketrans(dict.fromkeys(FILL.values(), " "))
    assert ESCAPES.sub("", colored).translate(blank) == plain.translate(blank)
    assert "\x1b" not in plain


def test_several_share_one_scale():
    drawn = tuple((name, simulated(name)) for name in ("1f1b", "zb-h1"))
    lines = bodies(Chart(drawn).text(120))
    scale = columns_per_second([one for _, one in drawn], 120)
    assert [len(lines[0]), len(lines[4])] == [round(one.seconds * scale) for _, one in drawn]


def test_a_terminal_without_unicode():
    text = Chart((("zb-h1", simulated("zb-h1", update=1)), ("2bw", simulated("2bw", update=1)))).text(90, unicode=False)
    assert text.isascii()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_action_is_a_box_of_the_image_with_words(name):
    found = simulated(name, update=0.5)
    image = ET.fromstring(svg_chart([(name, found)]))
    boxes = [group for group in image.iter(f"{SVG}g") if "data-m" in group.attrib]
    actions = [
        (action, span)
        for order, spans in zip(found.schedule.orders, found.spans, strict=True)
        for action, span in zip(order, spans, strict=True)
    ]
    assert len(boxes) == len(actions)
    scale = (1000 - 64 - 12) / found.seconds
    for box, (action, (start, end)) in zip(boxes, actions, strict=True):
        told, rect = box.findtext(f"{SVG}title"), box.find(f"{SVG}rect")
        assert told is not None
        assert rect is not None
        assert told.startswith(f"{action}: ")
        assert f"rank {found.schedule.rank(action)}," in told
        assert float(rect.attrib["x"]) == pytest.approx(64 + start * scale, abs=0.01)
        assert float(rect.attrib["width"]) == pytest.approx((end - start) * scale, abs=0.81)
        assert rect.attrib["class"].startswith(action.kind.value)


def test_the_page_stands_alone(tmp_path: Path):
    chart = Chart(tuple((f"<{name}>", simulated(name)) for name in ("1f1b", "chimera")))
    chart.write(tmp_path / "chart.html")
    page = (tmp_path / "chart.html").read_text()
    assert "<title>&lt;1f1b&gt;, &lt;chimera&gt;</title>" in page
    assert page.count("<svg") == 1
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert f'<td class="n">{chart.simulations[0][1].bubble:.1%}</td>' in page
    chart.write(tmp_path / "chart.svg")
    assert ET.parse(tmp_path / "chart.svg").getroot().tag == f"{SVG}svg"


def test_the_numbers():
    drawn = tuple((name, simulated(name)) for name in ("1f1b", "chimera", "interleaved", "zb-v", "pipedream", "2bw"))
    rows = [line.split() for line in Chart(drawn).table().splitlines()]
    assert rows[0] == ["time", "each", "bubble", "own", "span", "live", "weights", "apart"]
    for row, (name, found) in zip(rows[1:], drawn, strict=True):
        apart = simulate(found.schedule, found.costs, "dataflow").seconds
        each = f"{found.seconds_per_microbatch:.5g}"
        assert row[:4] == [name, f"{found.seconds:.5g}", each, f"{found.bubble:.1%}"]
        assert float(row[5]) == max(found.live_shares)
        assert float(row[7]) == pytest.approx(apart, rel=1e-4)
    assert [row[6] for row in rows[1:]] == ["1", "2", "1", "1", "4", "2"]
    assert "in the steady state" in Chart(drawn).text()


def test_seconds_and_bytes_where_they_are_known():
    schedule = METHODS["1f1b"].schedule(2, 4)
    costs = Costs.alike(schedule, 0.001, 0.001, 0.001, stash=3 * 2**20)
    text = Chart((("1f1b:2x4", simulate(schedule, costs)),), timed=True).text()
    assert "live bytes" in text
    assert "6.00 MiB" in text
    assert "15.0 ms" in text
    assert "8.00 ms" in text.splitlines()[2]


def test_a_notebook_shows_the_chart():
    shown = Chart((("1f1b", simulated("1f1b")),))._repr_html_()
    assert shown.startswith("<svg")
    assert "<table" in shown


def test_a_csv_that_reads_back(tmp_path: Path):
    found = simulated("zb-v")
    Chart((("zb-v", found),)).write(tmp_path / "zb.csv")
    assert parse_csv((tmp_path / "zb.csv").read_text()).orders == found.schedule.orders


def test_refusals(tmp_path: Path):
    chart = Chart((("gpipe", simulated("gpipe")), ("1f1b", simulated("1f1b"))))
    with pytest.raises(UserError, match=r"chart\.pdf: expected a name that ends in \.svg, \.html or \.csv"):
        chart.write(tmp_path / "chart.pdf")
    with pytest.raises(UserError, match="a CSV holds one schedule, not 2"):
        chart.write(tmp_path / "chart.csv")
    with pytest.raises(
        UserError, match=r"cannot be written: there is no folder .*none; make the folder, or give another name"
    ):
        chart.write(tmp_path / "none" / "chart.svg")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(UserError, match=r"folder\.svg cannot be written: Is a directory; give another path"):
        chart.write(tmp_path / "folder.svg")
