import json
import math
import re
import subprocess
import sys
import textwrap
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from jaxscale.figures.axes import thin
from jaxscale.recipe.plan import OffloadPlan, Plan
from jaxscale.records.metrics import FILE, encode
from jaxscale.records.record import RunRecord
from jaxscale.records.samples import append_sample
from jaxscale.report.charts import BUCKETS, Series, line_chart, smooth
from jaxscale.report.page import write_report
from jaxscale.report.pictures import mesh_picture, parameter_table
from jaxscale.report.sentences import plan_in_words
from jaxscale.report.summary import summary
from jaxscale.values import to_json

TEXT = """ what say you to my suit?

JULIET:
I know thee not, old man; fall to thy prayers,
How ill white hairs become a fool & <jester>!
"""


def make_run(folder, steps=2000, *, finished=True, resumed=True, mesh=None, skipped=(), start=None):
    """A run's folder as the trainer writes it, with made-up numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    mesh = {"data": 2, "fsdp": 4} if mesh is None else mesh
    start = time.time() - 3600 if start is None else start
    rows = [
        {
            "step": 0,
            "kind": "event",
            "name": "compile",
            "seconds": 4.2,
            "argument_bytes": 9_400_000,
            "temp_bytes": 3_100_000,
        },
        {
            "step": 0,
            "kind": "event",
            "name": "kernels",
            "platform": "tpu v5e",
            "attention": "tpu",
            "adam8": "reference",
            "why": {"adam8": "it needs <more>"},
        },
        {"step": 0, "kind": "event", "name": "predicted", "parameters": 786_944, "parameters_bytes": 845_000},
    ]
    for step in range(1, steps + 1):
        loss = 1.45 + 2.75 * math.exp(-step / (steps / 8)) + 0.06 * float(random.normal())
        rate = 1e-3 * min(step / (steps * 0.05), 0.55 + 0.45 * math.cos(math.pi * step / steps))
        seconds = 0.03 * (1 + 0.1 * abs(float(random.normal()))) + (0.4 if step == 1 else 0)
        row = {"step": step, "kind": "train", "loss": loss, "learning_rate": rate, "tokens": 768 * step}
        row |= {"grad_norm": 0.4 + 0.2 * abs(float(random.normal())) + 3 / step, "step_seconds": seconds}
        row |= {"tokens_per_second": 768 / seconds, "flop_per_second": 3.9e9 / seconds}
        if step in skipped:
            row |= {"loss": math.nan, "grad_norm": math.inf}
            rows.append({"step": step, "kind": "event", "name": "skipped", "reason": "loss is not finite"})
        rows.append(row)
        if step % max(1, steps // 8) == 0 or step == steps:
            rows.append({"step": step, "kind": "eval", "loss": 1.55 + 2.6 * math.exp(-step / (steps / 8))})
            rows.append(
                {"step": step, "kind": "event", "name": "checkpoint", "seconds": 0.05, "path": f"checkpoints/{step}"}
            )
        if resumed and step == steps * 5 // 8:
            rows.append({"step": step, "kind": "event", "name": "preempted", "reason": "SIGTERM"})
            rows.append({"step": step, "kind": "event", "name": "resume", "checkpoint": f"checkpoints/{step}"})
    if finished:
        rows.append({"step": steps, "kind": "event", "name": "finished"})
    for index, row in enumerate(rows):
        row["time"] = round(start + index * 0.031, 3)
    (folder / FILE).write_bytes(b"".join(map(encode, rows)))
    experiment = {"name": "shakespeare", "steps": steps, "batch": 64, "seed": 0}
    experiment |= {
        "model": {"type": "jaxscale.models.decoder.Decoder", "layers": 4, "heads": 4, "embed": 128, "context": 64}
    }
    plan = {"version": 1, "mesh": "data:2,fsdp:4", "zero": 3, "sequence_parallel": False, "microbatches": 2}
    plan |= {"precision": "bfloat16", "matmul": "default", "reduce": "float32", "memory": "full", "loss_chunk": 16}
    plan |= {"attention": "auto", "unroll": 1, "rules": {"batch": ["data", "fsdp"]}}
    shapes = [("embed.table", [1024, 128], ["fsdp", None])]
    shapes += [(f"blocks.{name}", shape, spec) for name, shape, spec in BLOCK]
    parameters = []
    for name, shape, spec in shapes:
        whole = 4 * math.prod(shape)
        cut = math.prod(mesh.get(axis, 1) for axis in spec if axis)
        parameters.append(
            {
                "name": name,
                "shape": shape,
                "dtype": "float32",
                "spec": spec,
                "bytes": whole,
                "bytes_per_device": whole // cut,
            }
        )
    layout = {"mesh": mesh, "devices": math.prod(mesh.values()), "kind": "cpu", "parameters": parameters}
    layout |= {"memory": {"parameters": 845_000, "optimizer state": 1_690_000, "activations and gradients": 3_100_000}}
    layout["memory"]["batch"] = 12_288
    layout["unsplit"] = ["blocks.norm.gain"]
    source = {"name": "shakespeare", "path": "/elsewhere/experiments/shakespeare.py", "variant": "tiny", "seed": 0}
    source |= {"relative": "experiments/shakespeare.py", "file": "shakespeare.py", "overrides": {"plan.zero": "3"}}
    source |= {"sha256": "9f" * 32, "versions": {"python": "3.11.7", "jax": "0.10.2", "flax": "0.12.8"}}
    for name, value in (("experiment", experiment), ("plan", plan), ("layout", layout)):
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "source").mkdir(exist_ok=True)
    (folder / "source" / "source.json").write_text(json.dumps(source))
    for step in range(steps // 4, steps + 1, max(1, steps // 4)):
        append_sample(folder, step, "ROMEO:", TEXT)
    return folder


BLOCK = [
    ("attention.query", [4, 128, 128], [None, "fsdp", None]),
    ("attention.out", [4, 128, 128], [None, None, "fsdp"]),
    ("mlp.up", [4, 128, 512], [None, None, "fsdp"]),
    ("mlp.down", [4, 512, 128], [None, "fsdp", None]),
    ("norm.gain", [4, 128], [None, None]),
]


class Page(HTMLParser):
    """Checks that tags nest, and gathers text and attributes."""

    VOID = ("meta", "wbr", "br", "input", "link", "img")

    def __init__(self, html):
        super().__init__()
        self.open, self.text, self.attributes, self.scripts = [], [], [], []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *attr) for attr in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, *attr) for attr in attrs]

    def handle_endtag(self, tag):
        assert self.open, f"closed and never opened: {tag}"
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open and self.open[-1] in ("script", "style") else self.text).append(data)

    @property
    def words(self):
        return " ".join("".join(self.text).split())


def page(folder):
    return Page(write_report(folder).read_text("utf-8"))


def test_the_page_shows_the_figures_of_the_run(tmp_path):
    words = page(make_run(tmp_path / "run", skipped=(700, 701))).words
    for expected in (
        "shakespeareFinished",
        "experiments/shakespeare.py · variant tiny · seed 0",
        "Best held-out loss1.551at step 2,000",
        "Steps2,000of 2,000",
        "Target tokens1.54 M",
        "4.20 s compiling",
        "2 not finite",
        "Parameters, gradients and optimizer state are sharded over 4 devices",
        "64 rows, 8 for each of 8 parts, in 2 successive microbatches",
        "Mesh: 8 devices (cpu)",
        "Optimizer state1.61 MiB",
        "dim 1 on fsdp",
        "Whole on every device, since no dim can be split evenly: blocks.norm.gain",
        "Parameters787 k",
        "jaxscale train experiments/shakespeare.py tiny --plan.zero 3",
        "0.10.2",
        "How ill white hairs become a fool & <jester>!",
        "loss is not finite",
        "Kernels used on tpu v5eattention tpu, adam8 reference (it needs <more>)",
    ):
        assert expected in words, expected
    for title in ("Loss", "Learning rate", "Throughput", "Gradient norm", "Arithmetic"):
        assert title in words


def test_the_page_needs_nothing_else(tmp_path):
    html = write_report(make_run(tmp_path / "run", steps=50)).read_text("utf-8")
    read = Page(html)
    assert not [a for a in read.attributes if a[1] in ("src", "href", "srcset", "data", "action", "poster")]
    assert not re.search(r"url\(|@import|https?://|fetch\(|XMLHttpRequest|import\(", html)
    assert "prefers-color-scheme: dark" in html


def test_each_chart_tells_the_script_what_it_shows(tmp_path):
    read = page(make_run(tmp_path / "run", steps=300, skipped=(7,)))
    told = [json.loads(script) for script in read.scripts if script.startswith("{")]
    assert [curve["label"] for curve in told[0]["curves"]] == ["each step", "smoothed", "held out"]
    assert told[0]["curves"][0]["steps"] == list(range(1, 301))
    assert told[0]["curves"][0]["texts"][6] == "nan"
    assert [7, "skipped"] in told[0]["marks"]
    assert len(told) == 5


def test_text_of_the_run_is_never_markup(tmp_path):
    run = make_run(tmp_path / "run", steps=10)
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\"'"
    experiment = json.loads((run / "experiment.json").read_text()) | {"name": evil, evil: evil}
    (run / "experiment.json").write_text(json.dumps(experiment))
    plan = json.loads((run / "plan.json").read_text()) | {"attention": evil, "new": evil, "memory": evil}
    (run / "plan.json").write_text(json.dumps(plan))
    layout = json.loads((run / "layout.json").read_text())
    layout["kind"] = evil
    layout["memory"][evil] = 5
    layout["parameters"][0] |= {"name": evil, "dtype": evil, "spec": [evil, None]}
    layout["mesh"][evil] = 2
    (run / "layout.json").write_text(json.dumps(layout))
    (run / "source" / "source.json").write_text(
        json.dumps({"path": evil, "variant": evil, "versions": {evil: evil}, "overrides": [evil]})
    )
    with (run / FILE).open("ab") as file:
        file.write(encode({"step": 10, "kind": "event", "name": evil, evil: evil}))
        file.write(encode({"step": 10, "kind": "event", "name": "preempted", "reason": evil}))
    append_sample(run, 10, evil, evil + "\0\x1b")
    read = page(run)
    assert not [a for a in read.attributes if a[1].startswith("on") or a[0] == "img"]
    assert sum("alert(1)" in script for script in read.scripts) == 0
    assert evil in "".join(read.text)
    assert "\N{SYMBOL FOR ESCAPE}" in "".join(read.text)


FILES = ["experiment.json", "plan.json", "layout.json", "source/source.json", "samples.txt", FILE]


@pytest.mark.parametrize("missing", FILES)
def test_any_file_may_be_missing(tmp_path, missing):
    run = make_run(tmp_path / "run", steps=40)
    (run / missing).unlink()
    words = page(run).words
    assert "run" in words
    assert summary(run)


@pytest.mark.parametrize("broken", [name for name in FILES if name.endswith(".json")])
@pytest.mark.parametrize("content", ["{", "[1, 2]", ""])
def test_a_broken_file_is_named_and_the_rest_is_shown(tmp_path, broken, content):
    run = make_run(tmp_path / "run", steps=40)
    (run / broken).write_text(content)
    name = Path(broken).name
    assert f"Could not be read: {name}" in page(run).words
    assert name in summary(run, width=100)


def test_fields_of_layout_that_no_run_writes_are_named_and_left_out(tmp_path):
    run = make_run(tmp_path / "run", steps=40, mesh={"data": 2})
    layout = json.loads((run / "layout.json").read_text())
    (run / "layout.json").write_text(json.dumps({**layout, "devices": "two", "parameters": [{"shape": ["a"]}]}))
    words = page(run).words
    assert "Could not be read: layout.json: devices, parameters: got other values than a run writes" in words
    assert "2 devices along data" in words


def test_an_empty_folder_and_a_single_step(tmp_path):
    assert "Nothing measured yet" in page(tmp_path).words
    assert "nothing measured yet" in summary(tmp_path)
    words = page(make_run(tmp_path / "one", steps=1, mesh={}, resumed=False)).words
    assert "Steps1of 1" in words
    assert "A single device." in words


def test_a_run_of_nothing_but_nan(tmp_path):
    rows = [
        {"step": s, "kind": "train", "loss": math.nan, "grad_norm": math.inf, "tokens": 8 * s} for s in range(1, 60)
    ]
    rows.append({"step": 59, "kind": "event", "name": "diverged", "reason": "20 steps in a row were skipped"})
    (tmp_path / FILE).write_bytes(b"".join(map(encode, rows)))
    assert "Diverged" in page(tmp_path).words
    assert "diverged" in summary(tmp_path)


def test_a_long_run_gives_a_small_page_that_keeps_its_spikes(tmp_path):
    run = make_run(tmp_path / "run", steps=20_000, resumed=False)
    for step in range(30_001, 30_200):
        append_sample(run, step, "x", "y" * 20_000)
    html = write_report(run).read_text("utf-8")
    assert len(html) < 500_000
    assert "16,000 more characters in samples.txt" in html
    values = np.ones(30_000)
    values[12_345] = 7.0
    steps, thinned = thin(np.arange(30_000), values, BUCKETS)
    assert len(steps) < 1100
    assert thinned[steps == 12_345] == [7.0]


def row(kind, step, **fields):
    return {"step": step, "kind": kind, "time": fields.pop("time", 0.0), **fields}


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ([("event", {"name": "finished"})], "finished"),
        ([("event", {"name": "preempted"})], "preempted"),
        ([("event", {"name": "diverged"})], "diverged"),
        ([("event", {"name": "preempted"}), ("event", {"name": "resume"})], "stopped"),
        ([("event", {"name": "preempted"}), ("event", {"name": "resume"}), ("train", {"time": None})], "running"),
        ([("event", {"name": "preempted"}), ("event", {"name": "compile"}), ("train", {"time": None})], "running"),
        ([("event", {"name": "checkpoint"})], "stopped"),
    ],
)
def test_status_is_told_by_the_last_event_that_says_so(tmp_path, last, expected):
    rows = [row("train", 1, loss=1.0)]
    for kind, fields in last:
        fields = {name: time.time() if name == "time" else value for name, value in fields.items()}
        rows.append(row(kind, 2, **fields))
    (tmp_path / FILE).write_bytes(b"".join(map(encode, rows)))
    (tmp_path / "experiment.json").write_text(json.dumps({"name": "x", "steps": 10}))
    assert RunRecord.read(tmp_path).status == expected


def test_figures_of_the_record_equal_their_definitions(tmp_path):
    rows = [
        row("train", s, loss=9.0 - s, tokens=100 * s, tokens_per_second=10.0 * s, time=float(s)) for s in range(1, 6)
    ]
    rows += [row("eval", 3, loss=2.0, time=5.0), row("eval", 5, loss=2.5, time=6.0)]
    rows += [row("event", 5, name="preempted", time=7.0), row("event", 5, name="resume", time=1007.0)]
    rows += [row("train", 6, loss=1.0, tokens=600, tokens_per_second=60.0, time=1009.0)]
    (tmp_path / FILE).write_bytes(b"".join(map(encode, rows)))
    run = RunRecord.read(tmp_path)
    assert run.best == (3, 2.0)
    assert run.final == (5, 2.5)
    assert run.tokens == 600
    assert run.tokens_per_second == 35.0
    assert run.seconds == 8.0, "the thousand seconds before it resumed do not count"
    assert run.step == 6
    assert run.name == tmp_path.name


def test_smoothing_equals_a_plain_loop_over_the_middle():
    random = np.random.default_rng(1)
    values = random.normal(size=400)
    values[[3, 100, 101]] = np.nan
    smoothed = smooth(values, 21)
    for place in range(10, 390):
        np.testing.assert_allclose(smoothed[place], np.nanmean(values[place - 10 : place + 11]), rtol=1e-9, atol=1e-12)
    assert np.isfinite(smoothed).all()


def test_a_curve_is_where_its_values_are():
    steps = np.arange(5.0)
    html = line_chart("x", [Series("a", steps, np.array([0.0, 1.0, np.nan, 3.0, 4.0]))])
    (path,) = re.findall(r'<path class="c1 line" d="([^"]*)"', html)
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path)]
    assert [x for x, _ in points] == [0.0, 250.0, 750.0, 1000.0]
    heights = [y for _, y in points]
    np.testing.assert_allclose(np.diff(heights)[[0, 2]], (heights[-1] - heights[0]) / 4, rtol=1e-3)
    assert path.count("M") == 2, "the gap is not drawn over"


def test_wide_ranges_are_logarithmic_and_a_rare_spike_is_counted():
    steps = np.arange(200.0)
    assert "logarithmic" in line_chart("x", [Series("a", steps, 10.0 ** np.linspace(-3, 3, 200))])
    values = 1 + 0.1 * np.sin(steps)
    values[50] = 1e4
    assert "1 point outside the frame" in line_chart("x", [Series("a", steps, values)])
    assert line_chart("x", [Series("a", steps, np.full(200, np.nan))]) == ""
    assert "<svg" in line_chart("x", [Series("a", steps[:1], np.array([0.0]))])


@pytest.mark.parametrize("values", [[1.0, 1 + 4e-16], [1e15, 1e15 + 1], [-1e-5, 3e-5], [7.0, 7.0], [1e300, -1e300]])
def test_every_range_has_an_axis(values):
    assert "<svg" in line_chart("x", [Series("a", np.arange(2.0), np.array(values))])


@pytest.mark.parametrize("sizes", [{}, {"data": 2}, {"data": 2, "fsdp": 4}, {"replica": 2, "fsdp": 2, "tensor": 2}])
def test_every_device_of_a_small_mesh_is_drawn_once(sizes):
    devices = math.prod(sizes.values())
    drawn = Page(mesh_picture(sizes, devices)).text
    numbers = [int(text) for text in drawn if text.isdigit()][:devices]
    assert numbers == list(range(devices))


def test_a_big_mesh_is_drawn_with_gaps():
    assert len(mesh_picture({"replica": 64, "fsdp": 128, "tensor": 16}, 2**17)) < 40_000


def test_odd_layouts_do_not_break_the_table():
    odd = [
        {"name": "a", "shape": [8], "spec": "PartitionSpec('fsdp',)", "bytes": None},
        {"name": "b", "shape": [], "spec": []},
        {"name": "c", "shape": [8, 8], "spec": [["data", "fsdp"]], "bytes": 256, "bytes_per_device": 32},
        {"name": "d"},
        "e",
        {"name": "f", "shape": [0, 4]},
    ]
    words = Page(parameter_table(odd, {"data": 2, "fsdp": 4})).words
    assert "dim 0 on datadim 0 on fsdp" in words
    assert "scalar" in words


def test_the_plan_in_words_names_what_it_does_not_know():
    words = dict(plan_in_words({"zero": 0, "mesh": None, "hologram": 3, "memory": "dots"}, {}, {}))
    assert words["Also"] == "hologram = 3"
    assert words["Memory: dots"].startswith("The results of matrix products are kept; the backward pass recomputes")
    assert words["Mesh"] == "A single device. The plan specified no mesh: these are the devices of the machine."
    assert plan_in_words({}, {}, {}) == []


def test_the_words_of_a_pipeline():
    words = dict(plan_in_words({"pipeline": "1f1b:2x4,stages=3+1,stash=input"}, {}, {}))
    assert words["Pipeline: 1f1b:2x4,stages=3+1,stash=input"] == (
        "Stages of 3, 1 blocks run by this schedule. "
        "A stage keeps only its input, and is recomputed before its backward pass."
    )
    assert "with equal numbers of blocks" in dict(plan_in_words({"pipeline": "2bw:2x4"}, {}, {}))["Pipeline: 2bw:2x4"]


def test_the_words_name_the_functions_that_return_learning_rates():
    rate = {"callable": "own:<lambda>"}
    optimizer = {"schedule": rate, "groups": {"mlp": {"schedule": "cosine"}, "head": {"schedule": rate}}}
    words = dict(plan_in_words({}, {}, {"optimizer": optimizer}))
    assert words == {
        "Learning rate": "The learning rate is what the function own:<lambda> returns for the number of updates made. "
        "The learning rate of the group head is what the function own:<lambda> returns for the number of updates made."
    }
    for odd in ({"schedule": {"callable": 3}}, {"schedule": "cosine", "groups": [1]}, [], None):
        assert plan_in_words({}, {}, {"optimizer": odd}) == []


def test_the_words_say_what_lies_on_the_host():
    words = dict(plan_in_words(to_json(Plan(offload=OffloadPlan(optimizer_state="streamed"))), {}, {}))
    assert words["In host memory"].endswith("slice by slice.")
    assert "In host memory" not in dict(plan_in_words(to_json(Plan()), {}, {}))


def test_the_words_know_every_field_of_a_plan():
    written = to_json(Plan())
    assert "Also" not in dict(plan_in_words(written, {}, {"batch": 8}))


def test_the_summary_tells_the_run(tmp_path):
    run = make_run(tmp_path / "run", steps=400, skipped=(3,))
    write_report(run)
    text = summary(run, width=90)
    assert max(map(len, text.split("\n")[:-1])) <= 90
    for expected in (
        "shakespeare",
        "finished",
        "400 of 400",
        "1 step",
        "5.39 MiB per device",
        "attention tpu, adam8 reference (it needs <more>), on tpu v5e",
        str(run / "report.html"),
    ):
        assert expected in text, expected
    assert "\x1b" not in text
    assert "\x1b[" in summary(run, color=True)


def test_what_lies_on_the_host_is_told(tmp_path):
    run = make_run(tmp_path)
    assert "host" not in summary(run)
    layout = json.loads((run / "layout.json").read_text()) | {"host_memory": {"parameters": 3 * 2**20}}
    (run / "layout.json").write_text(json.dumps(layout))
    assert "3.00 MiB for each device: parameters 3.00 MiB" in summary(run, width=100)
    write_report(run)
    assert "On the host, for each device" in (run / "report.html").read_text()


def test_a_report_is_written_without_jax(tmp_path):
    make_run(tmp_path / "run", steps=30)
    code = f"""
        import sys
        from jaxscale.report.page import write_report
        from jaxscale.report.summary import summary
        write_report({str(tmp_path / "run")!r})
        summary({str(tmp_path / "run")!r})
        assert not {{"jax", "flax", "tensorboardX"}} & set(sys.modules), sorted(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
