"""Who is alive at the peak, by name; pictures that are valid."""

import xml.etree.ElementTree as ElementTree

import pytest

from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.memory.selectors import SELECTORS
from jaxscale.planning.explain import explain
from jaxscale.planning.pictures import Point, live_bytes_svg, plans_svg

V5E = "tpu v5e:2x2"


def drawn(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


@pytest.fixture(scope="module")
def explained(planned):
    """One for all that only look at it."""
    plan = {"precision": "bfloat16", "attention": "plain", "zero": 3, "memory": MemoryPlan("dots")}
    return explain(planned(**plan), V5E)


@pytest.mark.slow
def test_everything_alive_adds_up_to_the_estimate(explained):
    found = explained
    guess = found.fit.estimate
    assert sum(item.bytes for item in found.live_items) == guess.device_bytes - guess.device_bytes_by_kind.get(
        "packing", 0
    )
    assert [item.bytes for item in found.live_items] == sorted((item.bytes for item in found.live_items), reverse=True)


@pytest.mark.slow
def test_the_model_s_own_names(explained):
    found = explained
    names = [item.name for item in found.live_items]
    assert "blocks/layers/mlp/up/weight" in names
    assert any(name.startswith("mlp_up ") for name in names)
    assert any(name.startswith("attention_v ") for name in names)
    assert "by estimate" in str(found)


@pytest.mark.slow
def test_the_curve_has_the_plan_in_question(explained):
    found = explained
    assert [point.name for point in found.points if point.is_current] == ["dots"]
    by_name = {point.name: point for point in found.points}
    assert by_name["none"].cost == 1.0
    assert by_name["full"].cost > 1.2
    assert by_name["full"].bytes < by_name["none"].bytes
    # seconds count the copies to the host: a rule that only swaps is far behind
    assert "Time" in str(found)
    cost = {name.rpartition(":")[0]: point.cost for name, point in by_name.items() if point.cost > 1}
    assert {"greedy", "dtr_static", *(f"offload:{name}" for name in SELECTORS)} <= cost.keys()
    swaps = [cost[f"offload:{name}"] for name in ("vdnn", "tflms", "autoswap", "swapadvisor")]
    assert min(swaps) > max(cost["offload:pofo"], cost["save"])


@pytest.mark.slow
def test_what_is_kept_is_told_of_the_model_and_of_a_block(explained):
    by_name = {point.name: point for point in explained.points}
    layers = 4
    for name, point in by_name.items():
        assert point.kept_bytes is not None
        assert point.block_kept_bytes == pytest.approx(point.kept_bytes / layers, abs=1)
        if MemoryPlan.parse(name).budget is not None:
            assert point.kept_bytes <= MemoryPlan.parse(name).budget
    assert "a block" in str(explained)


@pytest.mark.slow
def test_the_page_stands_alone(explained, tmp_path):
    found = explained
    page = found.html()
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    for svg in page.split("<svg")[1:]:
        drawn("<svg" + svg.split("</svg>")[0] + "</svg>")
    found.write(tmp_path / "memory.html")
    found.write(tmp_path / "memory.svg")
    assert (tmp_path / "memory.html").read_text() == page
    drawn((tmp_path / "memory.svg").read_text())
    with pytest.raises(UserError, match="cannot be written"):
        found.write(tmp_path / "nowhere" / "memory.html")


@pytest.mark.slow
def test_the_compiler_s_own_listing(planned):
    found = explain(planned("data:2"), "cpu x 2", limit=2**30, verify=True)
    assert found.fit.verified
    assert found.fit.report is not None
    assert "the compiler's listing" in str(found)
    assert found.live_items[0].bytes == max(one.bytes for one in found.fit.report.live)


def test_stacked_areas_reach_the_sums():
    moments = [{"a": 100, "b": 0}, {"a": 100, "b": 300}, {"a": 100}]
    root = drawn(live_bytes_svg(moments, limit=350, backward_start=1))
    paths = [node for node in root if node.tag.endswith("path")]
    assert len(paths) == 2
    assert any("limit" in node.get("class", "") for node in root)
    assert any((node.text or "") == "backward" for node in root)


def test_long_timelines_are_thinned_and_keep_their_peak():
    moments = [{"a": 1}] * 5000
    moments[3333] = {"a": 1000}
    root = drawn(live_bytes_svg(moments))
    path = next(node for node in root if node.tag.endswith("path")).get("d")
    assert path.count("L") < 2000
    heights = [float(point.split(",")[1]) for point in path.strip("MZ").replace(" L", " ").split()]
    assert min(heights) < 60


def test_a_curve_escapes_names():
    drawn(plans_svg([Point("<a>&", 10, 1.0), Point("b", 20, 1.5, True)], limit=15))


def test_a_point_far_above_the_others_does_not_press_them_flat():
    root = drawn(plans_svg([Point("a", 10, 1.0), Point("b", 9, 1.1), Point("c", 8, 1.2), Point("far", 7, 50.0)]))
    heights = {(node[0].text or "").split(":")[0]: float(node.get("cy", "")) for node in root if len(node)}
    assert heights["b"] - heights["c"] > 30
    assert heights["far"] < heights["c"]
    assert any("far 50.0x" in (node.text or "") for node in root)
