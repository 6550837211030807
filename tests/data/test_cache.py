import itertools
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from jaxscale.data import cache as module
from jaxscale.data.cache import open_corpus
from jaxscale.data.documents import DocumentRecipe
from jaxscale.data.tokenizer import Bytes, Characters, load
from jaxscale.errors import UserError

RECIPE = DocumentRecipe(
    separator="<>", beginning="", ending=".", prompt_end=None, held_out=0.25, is_cut_at_document=True
)


@pytest.fixture
def counted(monkeypatch):
    """How often anything was encoded."""
    calls = []
    encode = module._encode
    monkeypatch.setattr(module, "_encode", lambda *args: calls.append(1) or encode(*args))
    return calls


def entries(cache):
    return sorted(path.name for path in (cache / "tokens").iterdir() if path.is_dir())


@pytest.mark.parametrize("kind", ["byte", "char", "subword"])
def test_the_tokens_are_those_of_the_documents(corpus, documents, subwords, kind):
    vocabulary = {"byte": Bytes(), "char": Characters.of([*documents, "<>"]), "subword": load(str(subwords))}[kind]
    opened = open_corpus([str(corpus)], vocabulary, RECIPE)
    for split, expected in ((opened.train, documents[:45]), (opened.held_out, documents[45:])):
        starts = split.document_starts
        found = [split.ids[a:b].tolist() for a, b in itertools.pairwise(starts)]
        assert found == [[*vocabulary.encode(text).tolist(), *vocabulary.encode(".").tolist()] for text in expected]
    assert opened.facts["train"]["documents"] == 45
    assert opened.train.ids.dtype == (np.uint16 if kind == "subword" else np.uint8)


def test_it_is_encoded_once_and_again_when_anything_changes(corpus, cache, counted):
    import dataclasses

    first = open_corpus([str(corpus)], Bytes(), RECIPE)
    again = open_corpus([str(corpus)], Bytes(), RECIPE)
    assert len(counted) == 1
    assert first.facts == again.facts
    moved = corpus.with_name("moved.txt")
    moved.write_bytes(corpus.read_bytes())
    open_corpus([str(moved)], Bytes(), RECIPE)
    assert len(counted) == 1, "the content counts, not its name"
    open_corpus([str(corpus)], Characters.of([corpus.read_text()]), RECIPE)
    open_corpus([str(corpus)], Bytes(), dataclasses.replace(RECIPE, held_out=0.5))
    corpus.write_bytes(corpus.read_bytes() + b"x")
    open_corpus([str(corpus)], Bytes(), RECIPE)
    assert len(counted) == 4
    assert len(entries(cache)) == 4


@pytest.mark.parametrize(
    "damage", ["truncated", "missing", "garbage", "other types", "too deep", "a bit", "a digit", "a pipe", "a link"]
)
def test_a_damaged_entry_is_made_again(corpus, cache, counted, damage):
    whole = open_corpus([str(corpus)], Bytes(), RECIPE)
    ids = whole.train.ids.copy()
    (entry,) = entries(cache)
    folder = cache / "tokens" / entry
    if damage == "truncated":
        os.truncate(folder / "train.ids", 10)
    elif damage == "missing":
        (folder / "held_out.starts").unlink()
    elif damage == "garbage":
        (folder / "facts.json").write_text('{"dtype"')
    elif damage == "other types":
        facts = json.loads((folder / "facts.json").read_text())
        (folder / "facts.json").write_text(json.dumps({**facts, "characters": "many", "dtype": "object"}))
    elif damage == "a bit":
        content = bytearray((folder / "train.ids").read_bytes())
        content[7] ^= 4
        (folder / "train.ids").write_bytes(content)
    elif damage == "a digit":
        facts = (folder / "facts.json").read_text()
        (folder / "facts.json").write_text(facts.replace('"characters": ', '"characters": 1'))
    elif damage == "a pipe":
        for path in (folder / "train.ids", folder.with_name(f"{entry}.lock")):
            path.unlink()
            os.mkfifo(path)
    elif damage == "a link":
        folder.rename(folder.with_name("moved"))
        folder.symlink_to("moved")
        (folder / "facts.json").unlink()
    else:
        (folder / "facts.json").write_text("[" * 100_000)
    again = open_corpus([str(corpus)], Bytes(), RECIPE)
    assert len(counted) == 2
    assert again.facts == whole.facts
    np.testing.assert_array_equal(again.train.ids, ids)


def test_a_failure_leaves_nothing_behind(corpus, cache, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Writer, "add", fail)
    with pytest.raises(KeyboardInterrupt):
        open_corpus([str(corpus)], Bytes(), RECIPE)
    assert entries(cache) == []


def test_processes_that_race_get_one_whole_entry(corpus, cache):
    program = (
        "import json, sys\n"
        "from jaxscale.data.cache import open_corpus\n"
        "from jaxscale.data.documents import DocumentRecipe\n"
        "from jaxscale.data.tokenizer import Bytes\n"
        "sys.stdin.readline()\n"
        f"found = open_corpus([{str(corpus)!r}], Bytes(), {RECIPE!r})\n"
        "print(json.dumps([found.facts, int(found.train.ids.sum())]))\n"
    )
    racing = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in racing:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [json.loads(process.communicate()[0]) for process in racing]
    assert answers[0] == answers[1] == answers[2]
    assert all(process.returncode == 0 for process in racing)
    assert len(entries(cache)) == 1


def test_where_locks_fail_the_first_to_finish_is_kept(corpus, cache, monkeypatch, counted):
    """A second process finishes while this one still encodes; no lock holds either of them."""
    monkeypatch.setattr(module.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError("no locks here")))
    encode = module._encode
    inner = []

    def slow(draft, *args):
        facts = encode(draft, *args)
        if not inner:
            inner.append(1)
            open_corpus([str(corpus)], Bytes(), RECIPE)
        return facts

    monkeypatch.setattr(module, "_encode", slow)
    found = open_corpus([str(corpus)], Bytes(), RECIPE)
    assert len(counted) == 2
    assert entries(cache) == [found.facts["hash"]]
    assert found.train.ids.tobytes().count(b".") > 0


def test_a_folder_that_cannot_be_written_gives_way_to_the_temporary_one(corpus, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("in the folder's place")
    monkeypatch.setenv("JAXSCALE_CACHE", str(blocked))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    found = open_corpus([str(corpus)], Bytes(), RECIPE)
    assert found.facts["cache"].startswith(str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", str(blocked))
    with pytest.raises(UserError, match=r"be written to any folder .*file.*set JAXSCALE_CACHE"):
        open_corpus([str(corpus)], Characters.of([corpus.read_text()]), RECIPE)


def test_a_full_disk_gives_way_to_the_temporary_folder(corpus, tmp_path, cache, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    encode = module._encode

    def full(draft, *args):
        if str(draft).startswith(str(cache)):
            raise OSError(28, "No space left on device")
        return encode(draft, *args)

    monkeypatch.setattr(module, "_encode", full)
    assert open_corpus([str(corpus)], Bytes(), RECIPE).facts["cache"].startswith(str(tmp_path / "temporary"))
    assert entries(cache) == []
