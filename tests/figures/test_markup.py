"""Text never becomes markup, and files are written or refused."""

from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.errors import UserError
from jaxscale.figures.markup import Markup, element, joined, page, table, write_figure


class Reader(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text.append(data)


TEXTS = st.text(st.characters(exclude_characters="\r", exclude_categories=["C"]))


@given(TEXTS, TEXTS)
def test_text_and_attributes_read_back_and_open_no_tag(text, value):
    read = Reader(element("p", text, ["<i>", element("b", text)], title=value))
    assert read.tags == ["p", "b"]
    assert read.attributes == [("title", value)]
    assert "".join(read.text) == f"{text}<i>{text}"


def test_children_and_attributes():
    assert joined([None, "&", Markup("&amp;"), 3, (element("wbr"),)]) == "&amp;&amp;3<wbr/>"
    assert element("i", class_="a", data_m=0, x=0.126, y=None, z=2) == '<i class="a" data-m="0" x="0.13" z="2"></i>'
    assert element("path", element("title", "a"), d="M0 0") == '<path d="M0 0"><title>a</title></path>'


def test_a_table_has_heads_names_numbers_and_a_rest():
    read = table(
        [("1", "a")], ("how many", "what"), numeric=(0,), name_column=1, extra_rows=[("2", "others")], class_="facts"
    )
    assert read == (
        '<table class="facts"><thead><tr><th class="n">how many</th><th>what</th></tr></thead>'
        '<tbody><tr><td class="n">1</td><th scope="row">a</th></tr>'
        '<tr class="rest"><td class="n">2</td><th scope="row">others</th></tr></tbody></table>'
    )


def test_a_page_stands_alone():
    html = page("<title>", element("h1", "a"), style="p{}", script="1<2")
    assert Reader(html).tags == ["html", "head", "meta", "meta", "meta", "title", "style", "body", "h1", "script"]
    assert "<title>&lt;title&gt;</title>" in html
    assert "<script>1<2</script>" in html


def test_a_file_is_a_picture_or_a_page(tmp_path: Path):
    for name, content in (("a.svg", "svg"), ("a.html", "html"), ("a", "html")):
        write_figure(tmp_path / name, lambda: "svg", lambda: "html")
        assert (tmp_path / name).read_text() == content
    with pytest.raises(UserError, match=r"b\.svg cannot be written: No such file or directory; give another path"):
        write_figure(tmp_path / "none" / "b.svg", lambda: "", lambda: "")
