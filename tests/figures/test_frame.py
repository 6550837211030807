"""Values lie where the axes say, inside the frame."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from jaxscale.figures.frame import Frame, dot, legend, svg, svg_text

SVG = "{http://www.w3.org/2000/svg}"


def test_the_ends_of_the_axes_are_the_corners_of_the_frame():
    frame = Frame((-2, 8), (1, 3), right=100)
    assert (frame.x_of(-2), frame.x_of(8), frame.x_of(3)) == (86, 860, (86 + 860) / 2)
    assert (frame.y_of(1), frame.y_of(3), frame.y_of(2)) == (340, 16, (340 + 16) / 2)


def test_an_image_of_a_frame():
    frame = Frame((0, 2), (0, 10))
    labels = frame.grid([0, 5], "{} GB".format), frame.labels([1], "at {}".format), frame.title("a < b")
    area = frame.area([0, 2], [0, 0], [10, 5], "red", "<kind>")
    image = ElementTree.fromstring(
        svg(960, 380, "a & b", labels, area, dot(1, 2, 3, "blue"), svg_text(1, 2, "<", "end"))
    )
    assert [node.text for node in image.iter(f"{SVG}text")] == ["0 GB", "5 GB", "at 1", "a < b", "<"]
    path = image.find(f"{SVG}path")
    assert path is not None
    assert path.findtext(f"{SVG}title") == "<kind>"
    points = [tuple(map(float, point)) for point in re.findall(r"([\d.]+),([\d.]+)", path.attrib["d"])]
    expected = [(frame.x_of(x), frame.y_of(y)) for x, y in ((0, 10), (2, 5), (2, 0), (0, 0))]
    assert points == [pytest.approx(point, abs=0.06) for point in expected]
    assert image.attrib["aria-label"] == "a & b"


def test_a_legend_takes_as_many_rows_as_it_needs():
    entries = [({"fill": "red"}, "x" * 20)] * 5
    parts, height = legend(entries, 50, 100, 450)
    image = ElementTree.fromstring(f"<svg>{parts}</svg>")
    places = [(float(node.attrib["x"]), float(node.attrib["y"])) for node in image.iter("rect")]
    assert [y for _, y in places] == [100, 100, 120, 120, 140]
    assert {x for x, _ in places} == {50, 50 + 32 + 6.6 * 20}
    assert height == 60
