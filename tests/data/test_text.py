import itertools
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jaxscale.data import Chats, Mixture, Text, tokenizer
from jaxscale.errors import UserError

SHAKESPEARE = pathlib.Path(__file__).parents[2] / "experiments" / "data" / "shakespeare.txt"


def test_values_are_hashable_json_able_and_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = Text(pathlib.Path("a.txt"), tokenizer=pathlib.Path("t.json"))
    assert text == Text(str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "t.json"))
    assert hash(text) == hash(Text(text.path, tokenizer=text.tokenizer))
    assert json.loads(json.dumps([text.path, text.tokenizer])) == [str(tmp_path / "a.txt"), str(tmp_path / "t.json")]
    assert Text(("a.txt", "gs://b/*.txt")).paths == (str(tmp_path / "a.txt"), "gs://b/*.txt")


def test_the_values_import_neither_jax_nor_grain():
    program = (
        "import sys, jaxscale.data as d\n"
        "d.Mixture((d.Text('a'), d.Text('b')), (1., 2.)); d.Images('c')\n"
        "assert not {'jax', 'grain', 'tokenizers', 'rich'} & set(sys.modules), sorted(sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_the_default_experiments_split_and_targets_are_the_peers():
    """The lines of nanogpt_cpu.py that make its data, beside ours."""
    text = SHAKESPEARE.read_text(encoding="utf-8")
    chars = sorted(set(text))
    ix = {c: i for i, c in enumerate(chars)}
    data = np.array([ix[c] for c in text])
    n = int(0.9 * len(data))
    va = data[n:]
    w = va[: (len(va) - 1) // 64 * 64 + 1]

    opened = Text(SHAKESPEARE, tokenizer="char", context=64).open(12, 0)
    assert opened.tokenizer.size == len(chars)
    batches = list(opened.evaluation())
    tokens, targets, weights = (np.concatenate([b[name] for b in batches]) for name in ("tokens", "targets", "weights"))
    full = (weights == 1).all(1)
    found, theirs = (
        np.stack([x, y], -1).reshape(-1, 128)
        for x, y in ((tokens[full], targets[full]), (w[:-1].reshape(-1, 64), w[1:].reshape(-1, 64)))
    )
    np.testing.assert_array_equal(found[np.lexsort(found.T)], theirs[np.lexsort(theirs.T)])
    # and once more what is left of the text behind their last row
    np.testing.assert_array_equal(targets[~full][weights[~full] > 0], va[len(w) :])
    assert weights.sum() == opened.facts["held_out_targets"] == len(va) - 1
    np.testing.assert_array_equal(opened.parts[0].tokens.ids, data[:n])
    with opened.train() as train:
        batch = next(train)
    assert opened.tokenizer.decode(batch["tokens"][0]) in text[:n]
    again = tokenizer.from_json(opened.tokenizer.to_json())
    assert again.decode(batch["targets"][0]) in text[:n]


def test_packed_documents_end_with_a_target_and_begin_without_one(tmp_path, subwords):
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(["the cat", "the hat sat", "on the mat"] * 5))
    text = Text(path, str(subwords), context=32, layout="packed", separator="\n\n", ending="<|eos|>", held_out=0.2)
    opened = text.open(1, 0)
    (end,) = opened.tokenizer.encode("<|eos|>")
    seen = 0
    with opened.train() as batches:
        for batch in itertools.islice(batches, opened.facts["rows"]):
            for segment in range(1, batch["segments"].max() + 1):
                inside = batch["segments"] == segment
                assert batch["targets"][inside][-1] == end
                assert end not in batch["tokens"][inside]
                document = opened.tokenizer.decode([batch["tokens"][inside][0], *batch["targets"][inside][:-1]])
                assert document in path.read_text().split("\n\n")
                seen += 1
    assert seen == 12


def test_a_prompt_alone_has_the_ids_it_was_trained_with(tmp_path, subwords):
    path = tmp_path / "a.txt"
    path.write_text("the ha" + "t sat on the mat")  # "hat" is one token where the marker does not cut it
    opened = Text(path, str(subwords), context=4, held_out=0.0, prompt_end="ha").open(1, 0)
    prompt = opened.tokenizer.encode("the ha")
    np.testing.assert_array_equal(opened.parts[0].tokens.ids[: len(prompt)], prompt)
    assert opened.parts[0].tokens.is_learned.tolist() == [False] * len(prompt) + [True] * (
        len(opened.parts[0].tokens.ids) - len(prompt)
    )


def test_a_mixture_of_characters_knows_those_of_all_parts(tmp_path):
    for name in ("abc", "cde"):
        (tmp_path / f"{name}.txt").write_text(name * 20)
    mixture = Mixture(tuple(Text(tmp_path / f"{n}.txt", "char", context=4) for n in ("abc", "cde")), (1.0, 1.0))
    opened = mixture.open(2, 0)
    assert opened.tokenizer.alphabet == "abcde"
    rows = [row for batch in opened.evaluation() for row in zip(batch["targets"], batch["weights"], strict=True)]
    assert sorted(opened.tokenizer.decode(ids[weights > 0]) for ids, weights in rows) == ["bcab", "c", "decd", "e"]


def test_facts_are_json_able_and_count(corpus):
    facts = Text(corpus, context=16, layout="packed", separator="<>").open(4, 0).facts
    assert json.loads(json.dumps(facts)) == facts
    assert facts["documents"] == 60
    assert facts["targets"] == facts["tokens"] - 54
    assert facts["held_out_targets"] == facts["held_out_tokens"] - 6
    assert 0.9 < facts["filled"] <= 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"path": ()}, "path: got no path"),
        ({"tokenizer": "chr"}, "unknown tokenizer 'chr': expected byte, char .*did you mean 'char'"),
        ({"context": 0}, "context: got 0, expected a whole number"),
        ({"context": True}, "context: got True"),
        ({"layout": "package"}, "layout: got 'package', expected windows or packed; did you mean 'packed'"),
        ({"held_out": 1.5}, "held_out: got 1.5"),
        ({"held_out": -0.1}, "held_out: got -0.1"),
        ({"held_out": float("nan")}, "held_out: got nan"),
        ({"held_out": "0.1"}, "held_out: got '0.1', expected a number"),
        ({"path": 3}, "path: got 3, expected"),
        ({"separator": ""}, "separator: got an empty text"),
        ({"prompt_end": ""}, "prompt_end: got an empty text"),
    ],
)
def test_a_wrong_value_cannot_be_made(wrong, message):
    made = object.__new__(Text)  # past the tests' own check of annotations, which users do not have
    for name, value in {"path": "a.txt", **_defaults(), **wrong}.items():
        object.__setattr__(made, name, value)
    with pytest.raises(UserError, match=message):
        made.__post_init__()


def _defaults():
    import dataclasses

    return {field.name: field.default for field in dataclasses.fields(Text) if field.name != "path"}


@pytest.mark.parametrize(
    ("parts", "weights", "message"),
    [
        ((), (), "0 parts has 0 weights"),
        ((Text("a"),), (1.0, 2.0), "1 parts has 2 weights"),
        ((Text("a"), Text("b")), (1.0, 0.0), "weights: got 0.0, expected a positive"),
        ((Text("a"), Text("b")), (1.0, float("inf")), "weights: got inf"),
        ((Text("a"), Text("b", context=8)), (1.0, 1.0), "have context 64 and 8: expected the same"),
        ((Text("a"), Text("b", layout="packed")), (1.0, 1.0), "have layout packed and windows"),
        ((Text("a"), Text("b", "char")), (1.0, 1.0), "have tokenizer byte and char"),
    ],
)
def test_a_wrong_mixture_cannot_be_made(parts, weights, message):
    with pytest.raises(UserError, match=message):
        Mixture(parts, weights)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Chats("a.jsonl", "folder"), r"parts: got a Chats, expected a Text.*as in Chats\(path="),
        ("b.txt", r"parts: got a str, expected a Text.*write Text\('b.txt'\)"),
        ({"x": [1]}, "parts: got a dict, expected a Text"),
    ],
)
def test_a_part_that_is_no_text_is_refused_with_a_way_round(part, message):
    with pytest.raises(UserError, match=message):
        Mixture((Text("a"), part), (1.0, 1.0))


def test_lists_of_parts_and_weights_are_taken():
    assert Mixture([Text("a"), Text("b")], [1.0, 3.0]) == Mixture((Text("a"), Text("b")), (1.0, 3.0))


@pytest.mark.parametrize(
    ("share", "message"),
    [
        ({"batch": 0}, "a batch of 0 rows"),
        (
            {"batch": 3, "processes": 2},
            "a batch of 3 rows cannot be split evenly over 2 processes: give a multiple of 2",
        ),
        ({"batch": 2, "processes": 4}, "a batch of 2 rows cannot be split evenly over 4"),
        ({"batch": 4, "process": 2, "processes": 2}, "process 2 of 2: expected an index from 0 to 1"),
    ],
)
def test_a_share_that_does_not_divide_is_refused_before_files_are_read(share, message):
    with pytest.raises(UserError, match=message):
        Text("nowhere.txt").open(seed=0, **share)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"short", {"context": 64}, "training part .* has 4 tokens in 1 documents, too few .* context of at most 3"),
        (b"x" * 300, {"context": 64}, "held-out part .* has 30 tokens .* needs 65"),
        (b"one document", {"layout": "packed"}, "training part .* 0 documents.* separator between them"),
        (b"a|b|c|d", {"layout": "packed", "separator": "|"}, "no target to learn: expected documents of two tokens"),
        (b"", {}, "is empty"),
        (b"\0", {}, "is binary: NUL byte at offset 0"),
        (b"caf\xe9", {"tokenizer": "char"}, "not UTF-8: byte 0xe9 at offset 3"),
    ],
)
def test_a_text_that_cannot_be_trained_on_is_refused(tmp_path, content, options, message):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        Text(path, **options).open(2, 0)


def test_a_missing_file_and_tokenizer_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    with pytest.raises(UserError, match=r"no such file: .*b.txt; did you mean 'a.txt'"):
        Text(tmp_path / "b.txt").open(2, 0)
    with pytest.raises(UserError, match=r"no such file: .*tokeniser.json"):
        Text(tmp_path / "a.txt", tokenizer=tmp_path / "tokeniser.json").open(2, 0)


@pytest.fixture
def questions(tmp_path):
    """A JSONL file of sums, and the pairs of prompt and answer in it."""
    pairs = [(f"{first} + {second}\u2028= ", str(first + second)) for first in range(9) for second in range(9)]
    objects = [{"id": index, "prompt": prompt, "answer": answer} for index, (prompt, answer) in enumerate(pairs)]
    lines = [json.dumps(content, ensure_ascii=False) for content in objects]
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(lines) + "\n\n")
    return path, pairs


@pytest.mark.parametrize("layout", ["packed", "windows"])
def test_a_line_of_jsonl_is_a_document_and_only_its_answer_is_learned(questions, layout):
    path, pairs = questions
    text = Text(
        path, tokenizer="char", context=32, layout=layout, fields=("prompt", "answer"), ending="\n", held_out=0.2
    )
    opened = text.open(4, 0)
    assert opened.facts["documents"] == len(pairs)
    assert '"' not in opened.tokenizer.decode(range(opened.tokenizer.size))
    assert set(text.shapes(4)) == set(next(opened.train()))
    learned, seen = "", ""
    for batch in opened.evaluation():
        for tokens, targets, weights in zip(batch["tokens"], batch["targets"], batch["weights"], strict=True):
            learned += opened.tokenizer.decode(targets[weights > 0].tolist())
            seen += opened.tokenizer.decode(tokens.tolist())
    answers = set(learned.split())
    assert answers <= {answer for _, answer in pairs}
    assert len(answers) > 5
    assert " + " in seen
    assert "+" not in learned


def test_a_line_of_jsonl_with_one_text_is_learned_whole(questions):
    path, pairs = questions
    opened = Text(path, tokenizer="char", context=8, fields=("prompt",), held_out=0.0).open(4, 0)
    assert opened.facts["characters"] == sum(len(prompt) for prompt, _ in pairs)
    assert "weights" not in next(opened.train())


@pytest.mark.parametrize(
    ("line", "fields", "message"),
    [
        ('{"text": "a"', ("text",), r"bad\.jsonl:2: not JSON .*; expected an object with text"),
        ('{"txt": "a"}', ("text",), r"bad\.jsonl:2: text is None, expected text; the line has the names 'txt'"),
        ("[1]", ("text",), r"bad\.jsonl:2: text is None, expected text; the line has a list, expected an object"),
        ('{"text": "a\\u0000b"}', ("text",), r"bad\.jsonl:2: text contains a NUL character, .*: remove it"),
        ('{"text": "a\\ud83d"}', ("text",), r"bad\.jsonl:2: text contains half a surrogate pair"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path, line, fields, message):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n' + line)
    with pytest.raises(UserError, match=message):
        Text(tmp_path / "bad.jsonl", fields=fields, context=2).open(1, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": ("a", "b", "c")}, "fields: got a, b, c, expected the text, or a prompt and its answer"),
        ({"fields": ("a",), "separator": "\n"}, "separator: a line of a JSONL file is a document"),
        ({"fields": ("a",), "prompt_end": ">"}, "prompt_end: a line of a JSONL file is a document"),
    ],
)
def test_fields_of_jsonl_are_checked(options, message):
    with pytest.raises(UserError, match=message):
        Text("a.jsonl", **options)
