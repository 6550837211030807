"""Templates of folders: where they are found, what they may do, and that none of them holds up the process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxscale.data.chat import template_child
from jaxscale.data.chat.chat_template import (
    ChatTemplate,
    Failure,
    Job,
    Renderer,
    answer_stops,
    find_template,
    folder_tokenizer,
    read_template,
    stop_ids,
)
from jaxscale.errors import UserError
from tests.chat_folders import recorded, template_folder

HELLO = [{"role": "user", "content": "hello"}]


def outcomes(source, *jobs, date=None):
    """What a template makes of jobs, by default of one."""
    with Renderer(ChatTemplate(source, (("bos_token", "<s>"),), "folder/chat_template.jinja"), date) as renderer:
        return list(renderer.render(jobs or [Job(HELLO, None, ((1, True),))]))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}{{ tools }}", "<s>helloTrueNone"),
        ("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{% endfor %}a", "a"),
        ("{{ {'a': '<é>'} | tojson }}{{ messages | tojson(indent=1) | length }}", '{"a": "<é>"}48'),
        ("{% set ns = namespace(x=0) %}{% for i in range(3) %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}", "3"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{% generation %}b{% endgeneration %}{{ dict(a=1).a }}{{ undefined_name }}", "b1"),
        ("{% if true %}\n  {% set x = 1 %}\nc\n{% endif %}\n", "c\n"),
    ],
)
def test_helpers_of_transformers(source, text):
    assert outcomes(source, date="2024-07-26") == [[text]]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('only two turns') }}", "the template refuses it: only two turns"),
        ("{{ messages[0].content + 1 }}", "the template is broken: TypeError"),
        ("{{ messages[0].__class__.__mro__ }}", "the template is broken: SecurityError"),
        ("{{ messages.append(1) }}", "the template is broken: SecurityError"),
        ("{% for i in range(9 ** 9) %}{% endfor %}", "the template is broken: OverflowError: Range too big"),
        ("{% for i in range(9999) %}{{ 'x' * 1000 }}{% endfor %}", "renders more than 8,388,608 characters"),
        ("{% set x = 'x' * 9999999999 %}", "it needs too much memory"),
        ("{{ lookup.x }}", "the template is broken: UndefinedError: 'lookup' is undefined"),
    ],
)
def test_what_fails_is_one_sentence_and_the_next_job_is_rendered(source, reason):
    job = Job(HELLO, None, ((1, True),))
    failures = outcomes(source, job, job)
    assert len(failures) == 2
    assert all(isinstance(failure, Failure) and reason in failure.text for failure in failures)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set x = messages | length + 8 %}{{ x ** (x ** x) }}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{% for i in range(99999) %}{% if f %}{% endif %}{% endfor %}"
        "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
    ],
)
def test_an_endless_template_is_ended(source, monkeypatch, tmp_path):
    script = tmp_path / "child.py"  # the same program with less patience
    text = Path(template_child.__file__).read_text()
    assert "CPU_SECONDS = 5.0" in text
    script.write_text(text.replace("CPU_SECONDS = 5.0", "CPU_SECONDS = 0.3"))
    monkeypatch.setattr(template_child, "__file__", str(script))
    (failure,) = outcomes(source, Job(HELLO, None, ((1, True),)), Job(HELLO, None, ((1, True),)))
    assert "takes more than 5 s" in failure.text
    with pytest.raises(UserError, match=r"chat_template.jinja cannot be used as a template: .* more than 5 s"):
        outcomes("{{ 9 ** (9 ** 9) }}")  # folded while it is compiled


def test_the_process_writes_no_file(tmp_path):
    """Should a template leave the sandbox, the system's limits are left."""
    code = (
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('child', {template_child.__file__!r})\n"
        "child = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(child)\nchild.limit_process()\n"
        "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"file = open({str(tmp_path / 'a')!r}, 'w')\nfile.write('x')\nfile.flush()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "File too large" in ended.stderr
    assert (tmp_path / "a").read_text() == ""


@pytest.mark.parametrize("source", ["{% for m in messages %}", "{{ messages[0] }", "{% frobnicate %}"])
def test_a_template_that_cannot_be_compiled_is_named(source):
    with pytest.raises(UserError, match=r"folder/chat_template.jinja cannot be used as a template: .* in line 1: "):
        outcomes(source)


def test_without_jinja2(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UserError, match=r"chat templates need the package jinja2: pip install 'jaxscale\[chat\]'"):
        outcomes("a")


def test_where_a_folder_has_its_template(tmp_path):
    folder = template_folder(tmp_path / "a", "llama3")
    recorded_template = recorded()["templates"]["llama3"]
    template = read_template(folder)
    assert template.source == recorded_template["chat_template"]
    assert template.variables == {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    assert ChatTemplate.from_json(template.to_json(), "a.json") == template
    config = {**recorded_template, "eos_token": {"content": "</s>", "lstrip": False}}
    config["chat_template"] = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = read_template(folder)
    assert (template.source, template.variables["eos_token"]) == ("d", "</s>")
    (folder / "chat_template.jinja").write_text("j")
    assert read_template(folder).source == "j"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert find_template(folder) is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "l"}))
    assert read_template(folder).source == "l"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer_config.json", "[", "is not JSON"),
        ("tokenizer_config.json", '{"chat_template": "\\ud83d"}', "has half a surrogate pair"),
        ("tokenizer_config.json", '{"chat_template": [{"name": {}, "template": "r"}]}', "has {}, expected one"),
        ("tokenizer_config.json", "[]", "got a list, expected a JSON object"),
        ("tokenizer_config.json", '{"chat_template": 1}', "chat_template: got a int, expected a text"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "rag", "template": "r"}]}',
            "has rag, expected one named",
        ),
        ("tokenizer_config.json", "{}", "has no chat template .*: add one, such as that of the instruct version"),
        ("chat_template.jinja", b"\xff", "is not UTF-8"),
    ],
)
def test_bad_files_of_templates(tmp_path, name, content, reason):
    folder = template_folder(tmp_path / "a")
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=reason):
        read_template(folder)


def test_bad_folders_and_stored_templates(tmp_path):
    with pytest.raises(UserError, match="no such folder; expected that of a model"):
        read_template(tmp_path / "missing")
    with pytest.raises(UserError, match=r"has no tokenizer.json: copy it"):
        folder_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_text("")
    with pytest.raises(UserError, match=r"has no tokenizer.json: load it with transformers' AutoTokenizer"):
        folder_tokenizer(tmp_path)
    for text in ("{}", "[]", '{"source": 1, "tokens": [], "origin": "a"}', '{"source": "", "tokens": 3, "origin": ""}'):
        with pytest.raises(UserError, match="expected a chat template saved by a run"):
            ChatTemplate.from_json(text, "chat_template.json")


def test_what_ends_an_answer(tmp_path):
    for name, end in (("smollm2", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("gemma", "<end_of_turn>")):
        folder = template_folder(tmp_path / name, name)
        tokenizer = folder_tokenizer(folder)
        ids, texts = answer_stops(read_template(folder), tokenizer)
        assert (tokenizer.decode(ids), texts) == (end, ())
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n###\n{% endfor %}"
    folder = template_folder(tmp_path / "plain", plain)
    assert answer_stops(read_template(folder), tokenizer) == ((), ("###",))
    assert stop_ids(folder, tokenizer) == ()
    (folder / "config.json").write_text('{"eos_token_id": 2}')
    assert stop_ids(folder, tokenizer) == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 3, 999999, null]}')
    assert stop_ids(folder, tokenizer) == (4, 3)
