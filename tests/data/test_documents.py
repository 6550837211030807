import dataclasses

import pytest

from jaxscale.data.documents import DocumentRecipe, check_and_count, labeled_texts
from jaxscale.errors import UserError

PLAIN = DocumentRecipe(separator=None, beginning="", ending="", prompt_end=None, held_out=0.1, is_cut_at_document=False)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.txt").write_text("one|two||three|")
    (tmp_path / "b.txt").write_text("four|five")
    return [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]


def joined(files, recipe, cut):
    """The two splits as text, a bar before each document."""
    splits = ["", ""]
    for split, begins, _, text in labeled_texts(files, recipe, cut):
        splits[split] += "|" * begins + text
    return tuple(splits)


def test_a_separator_is_dropped_with_what_is_empty(files):
    recipe = dataclasses.replace(PLAIN, separator="|", beginning="<", ending=">")
    counts = check_and_count(files, recipe)
    assert counts["documents"] == counts["marked"] == 5
    assert counts["characters"] == len("<one><two><three><four><five>")
    assert joined(files, recipe, 100) == ("|<one>|<two>|<three>|<four>|<five>", "")


def test_without_a_separator_each_file_is_one_document(files):
    assert check_and_count(files, PLAIN)["documents"] == 2
    splits = [split for split, begins, *_ in labeled_texts(files, PLAIN, 100) if begins]
    assert splits == [0, 0]


@pytest.mark.parametrize("cut", range(30))
def test_a_cut_by_characters_falls_where_nanogpt_cuts(files, cut):
    recipe = dataclasses.replace(PLAIN, separator="|", beginning="<", ending=">")
    is_cut_at_document = "<one><two><three><four><five>"
    train, held_out = (text.replace("|", "") for text in joined(files, recipe, cut))
    assert (train, held_out) == (is_cut_at_document[:cut], is_cut_at_document[cut:])


@pytest.mark.parametrize(
    ("cut", "expected"), [(0, ("", "|one|two|three|four|five")), (3, ("|one|two|three", "|four|five"))]
)
def test_a_cut_by_documents_keeps_them_whole(files, cut, expected):
    assert joined(files, dataclasses.replace(PLAIN, separator="|", is_cut_at_document=True), cut) == expected


def test_what_is_learned_is_what_follows_the_marker(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("Q: 1? A: 2 A: 3|Q: no answer|A: B")
    recipe = DocumentRecipe(
        separator="|", beginning="<", ending=">", prompt_end="A:", held_out=0.0, is_cut_at_document=True
    )
    texts_and_flags = [(text, learned) for _, _, learned, text in labeled_texts([str(path)], recipe, 3)]
    assert texts_and_flags == [
        *(("<", False), ("Q: 1? A:", False), (" 2 A: 3", True), (">", True)),
        *(("<", False), ("Q: no answer", False), (">", False)),
        *(("<", False), ("A:", False), (" B", True), (">", True)),
    ]
    assert check_and_count([str(path)], recipe)["marked"] == 2


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (dataclasses.replace(PLAIN, prompt_end="=>"), "prompt_end '=>' occurs in none of the 2 documents"),
        (dataclasses.replace(PLAIN, separator="|", prompt_end="=>"), "in none of the 5 documents"),
    ],
)
def test_a_marker_that_never_occurs_is_refused(files, recipe, message):
    with pytest.raises(UserError, match=message):
        check_and_count(files, recipe)


def test_nothing_between_separators_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("||")
    with pytest.raises(UserError, match=r"separator '\|' leaves no document"):
        check_and_count([str(tmp_path / "a.txt")], dataclasses.replace(PLAIN, separator="|"))
