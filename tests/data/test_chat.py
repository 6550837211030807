"""Chats: ids and masks are those that transformers records, and each bad row is named."""

import dataclasses
import json

import numpy as np
import pytest

from jaxscale.data import Chats
from jaxscale.data.chat.chat_template import folder_tokenizer
from jaxscale.errors import UserError
from tests.chat_folders import chat_file, recorded, template_folder, turns


def documents(opened):
    """The ids and the learned tokens of each training document, from the rows of an epoch, in order of their ids."""
    (rows,) = opened.parts
    batch, pairs = rows.read(np.arange(len(rows))), []
    for row in range(len(rows)):
        for segment in range(1, batch["segments"][row].max() + 1):
            at = batch["segments"][row] == segment
            ids = [int(batch["tokens"][row][at][0]), *batch["targets"][row][at].tolist()]
            pairs.append((ids, batch["weights"][row][at].astype(int).tolist()))
    return sorted(pairs)


@pytest.mark.parametrize("tokenizer", ["byte_level", "metaspace"])
@pytest.mark.parametrize("template", ["smollm2", "llama3", "mistral", "gemma", "zephyr"])
def test_ids_and_masks_are_those_of_transformers(tmp_path, template, tokenizer):
    cases = [case for case in recorded()["cases"] if (case["template"], case["tokenizer"]) == (template, tokenizer)]
    assert len(cases) >= 2
    rows = [{"messages": recorded()["chats"][case["chat"]]} for case in cases]
    file = chat_file(tmp_path / "chats.jsonl", rows)
    opened = Chats(file, template_folder(tmp_path / "folder", template, tokenizer), 512, held_out=0.0).open(2, 0)
    assert documents(opened) == sorted((case["ids"], case["learned"][1:]) for case in cases)
    assert (opened.facts["chats"], opened.facts["documents"], opened.note) == (len(cases), len(cases), None)
    assert opened.facts["longest"] == max(len(case["ids"]) for case in cases)


def test_prompts_and_completions_are_chats_of_two_messages(tmp_path):
    folder = template_folder(tmp_path / "folder")
    forms = [turns("a", "b"), *({"prompt": "a", name: "b"} for name in ("completion", "answer", "response"))]
    forms_of_documents = [
        documents(Chats(chat_file(tmp_path / f"{index}.jsonl", [row]), folder, held_out=0.0).open(1, 0))
        for index, row in enumerate(forms)
    ]
    assert all(each == forms_of_documents[0] for each in forms_of_documents)
    ids, learned = forms_of_documents[0][0]
    tokenizer = folder_tokenizer(folder)
    assert tokenizer.decode(np.array(ids[1:])[np.array(learned, bool)]) == "b<|im_end|>\n"


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that drops the reasoning of earlier answers, as Qwen3's."""


def test_a_template_that_alters_earlier_answers_gives_a_document_for_each_form(tmp_path):
    folder = template_folder(tmp_path / "folder", THINKING)
    rows = [turns("a", "<think>hm</think>b", "c", "<think>so</think>d"), turns("e", "f", "g", "h")]
    opened = Chats(chat_file(tmp_path / "a.jsonl", rows), folder, held_out=0.0).open(1, 0)
    tokenizer = folder_tokenizer(folder)
    texts = {
        (tokenizer.decode(ids), tokenizer.decode(np.array(ids[1:])[np.array(learned, bool)]))
        for ids, learned in documents(opened)
    }
    ask, end = "<|im_start|>assistant\n", "<|im_end|>\n"
    first, second = f"<|im_start|>user\na{end}{ask}", f"<|im_start|>user\nc{end}{ask}"
    assert texts == {
        (f"{first}<think>hm</think>b{end}", f"<think>hm</think>b{end}"),
        (f"{first}b{end}{second}<think>so</think>d{end}", f"<think>so</think>d{end}"),
        (f"<|im_start|>user\ne{end}{ask}f{end}<|im_start|>user\ng{end}{ask}h{end}", f"f{end}h{end}"),
    }
    assert (opened.facts["chats"], opened.facts["documents"]) == (2, 3)


def test_long_chats_are_cut_and_rows_without_an_answer_counted(tmp_path):
    folder = template_folder(tmp_path / "folder", "mistral")
    rows = [turns("a", "word " * 200), turns("b", "c"), turns("d"), turns("e " * 200, "f")]
    file = chat_file(tmp_path / "chats.jsonl", rows)
    opened = Chats(file, folder, context=64, held_out=0.0).open(1, 0)
    kept_documents = documents(opened)
    assert [len(ids) for ids, _ in kept_documents if len(ids) == 65] == [65]
    assert len(kept_documents) == 2, "the prompt of the last one fills the context"
    whole = documents(Chats(file, folder, context=2048, held_out=0.0).open(1, 0))
    assert [ids in ([each[:65] for each, _ in whole]) for ids, _ in kept_documents] == [True, True]
    lost = sum(sum(learned) for _, learned in whole) - sum(sum(learned) for _, learned in kept_documents)
    assert opened.note == (
        f"2 of 3 chats are longer than data.context (64 tokens) and are cut there, with {lost} tokens of answers; "
        f"1 chats without an answer are left out, first {file}:3"
    )
    batches = opened.train()
    assert batches.note == opened.note
    batches.close()


def test_what_is_held_out(tmp_path):
    folder = template_folder(tmp_path / "folder", "mistral")
    file = chat_file(tmp_path / "chats.jsonl", [turns(f"q{i}", f"a{i}") for i in range(10)])
    other = chat_file(tmp_path / "other.jsonl", [turns("question", "answer")])
    chats = Chats(file, folder, context=64, held_out=0.2)
    opened = chats.open(2, 0)
    assert opened.facts["held_out_tokens"] / opened.facts["tokens"] == pytest.approx(0.25, abs=0.05)
    batch = next(iter(opened.evaluation()))
    assert chats.shapes(2) == {name: (array.shape, array.dtype.name) for name, array in batch.items()}
    separate = dataclasses.replace(chats, held_out_path=other).open(2, 0)
    assert separate.facts["tokens"] == opened.facts["tokens"] + opened.facts["held_out_tokens"]
    (held_out,) = documents(dataclasses.replace(separate, parts=separate.held_out))
    assert held_out == documents(Chats(other, folder, held_out=0.0).open(1, 0))[0]
    chat_file(other, [turns("question " * 30, "answer")])
    with pytest.raises(UserError, match=r"other.jsonl: none of its 1 chats has an answer in its first 64 tokens"):
        Chats(file, folder, context=64, held_out_path=other).open(2, 0)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("hello", r":2: not JSON .* expected \{\"messages\""),
        ("[1]", ":2: got a list, expected"),
        ('{"text": "a"}', ":2: the line has the names 'text'; expected"),
        ('{"conversations": []}', "the line has the names 'conversations'"),
        (
            '{"prompt": "a", "completion": 3}',
            "the line has the names 'prompt', 'completion'; .*, both texts, but completion is 3",
        ),
        (json.dumps({"messages": [{"role": "gpt", "content": "a"}]}), "role 'gpt', .*; did you mean 'assistant'"),
        (
            json.dumps({"messages": [{"from": "human", "value": "a"}]}),
            "from and value: rename them to role and content",
        ),
        ('{"messages": []}', r":2: messages: got \[\], expected a list of messages"),
        ('{"messages": ["a"]}', ":2: message 1: got a str, expected an object with role and content"),
        (json.dumps({"messages": [{"role": "asistant", "content": "a"}]}), "unknown role 'asistant', .* 'assistant'"),
        (json.dumps({"messages": [{"content": "a"}]}), ":2: message 1: unknown role None, expected one of system,"),
        (json.dumps({"messages": [{"role": "user", "content": [{"type": "image"}]}]}), "content: got a list, expected"),
        (json.dumps({"messages": [{"role": "user"}]}), "content: got a NoneType, expected a text"),
        (json.dumps({"messages": [{"role": "user", "content": "\ud83d"}]}), ":2: has half a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": {}}', ":2: tools: got a dict, expected a list"),
        (json.dumps(turns("raise", "b")), ":2: the template refuses it: no such thing"),
        (json.dumps(turns("break", "b")), ":2: the template is broken: TypeError"),
        (json.dumps(turns("think", "b")), ":2: answer 1: the template asks for it with .*think.*not defined"),
        (json.dumps(turns("mute", "b")), ":2: answer 1: the template renders nothing for it"),
    ],
)
def test_a_bad_row_is_named(tmp_path, line, reason):
    template = (
        "{% for m in messages %}{% if m.content == 'raise' %}{{ raise_exception('no such thing') }}{% endif %}"
        "{% if m.content == 'break' %}{{ 1 + 'a' }}{% endif %}"
        "{% if messages[0].content != 'mute' %}<s>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{% if messages[0].content == 'think' %}<s><think>{% endif %}{% endif %}"
    )
    file = chat_file(tmp_path / "chats.jsonl", [turns("a", "b")])
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(UserError, match=reason):
        Chats(file, template_folder(tmp_path / "folder", template), held_out=0.0).open(1, 0)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"context": 0}, "context: got 0, expected a whole number of tokens >= 1"),
        ({"held_out": 1.5}, "held_out: got 1.5, expected a share of the chats"),
        ({"date": "today"}, "date: got 'today', expected a day as YYYY-MM-DD"),
        ({"path": ()}, "path: got no path"),
        ({"held_out_path": ()}, "held_out_path: got no path"),
    ],
)
def test_bad_values(fields, reason):
    with pytest.raises(UserError, match=reason):
        Chats(**{"path": "a.jsonl", "folder": "a"} | fields)


def test_files_without_what_is_needed(tmp_path):
    folder = template_folder(tmp_path / "folder")
    file = chat_file(tmp_path / "chats.jsonl", [turns("a")])
    with pytest.raises(UserError, match="none of the 1 chats has a message of the role assistant"):
        Chats(file, folder).open(1, 0)
    file = chat_file(tmp_path / "chats.jsonl", [turns("a", "b")])
    with pytest.raises(UserError, match="to train on; give more chats"):
        Chats(file, folder, held_out=0.5).open(1, 0)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="has no chat template"):
        Chats(file, folder).open(1, 0)
    with pytest.raises(UserError, match="no such file"):
        Chats(tmp_path / "no.jsonl", template_folder(tmp_path / "folder")).open(1, 0)


def test_tools_and_reasoning_reach_the_template(tmp_path):
    template = "{{ tools | tojson }}{% for m in messages %}<s>{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    row = turns("a", "b") | {"tools": [{"name": "f"}]}
    row["messages"][1]["reasoning"] = "why"
    row["messages"][0]["name"] = None
    folder = template_folder(tmp_path / "folder", template)
    ((ids, _),) = documents(Chats(chat_file(tmp_path / "a.jsonl", [row]), folder, held_out=0.0).open(1, 0))
    assert folder_tokenizer(folder).decode(ids) == '[{"name": "f"}]<s>a<s>whyb'
