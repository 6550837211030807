"""Each public value with a picture draws it in a notebook: its words are there, and names of the user's are escaped."""

import html
import json
import subprocess
import sys
import time

import pytest

import jaxscale
from jaxscale.errors import UserError
from jaxscale.models import Decoder
from jaxscale.pipeline import Costs, schedule, simulate
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.report import notebook
from jaxscale.values.drawn import drawn
from tests.report.test_page import Page, make_run

DECODER = Decoder(vocab=64, context=16, layers=2, heads=2, embed=16)
EVIL = "<script>alert(1)</script>"
EXPERIMENT = jaxscale.Experiment(
    "a<b> & c",
    DECODER,
    {"x": [[1.0], [2.0]], "y": [1.0, 2.0]},
    jaxscale.Optimizer(warmup=10, groups={"head|<i>": jaxscale.Optimizer("lion", 1e-4)}),
    steps=500,
    batch=8,
    held_out={"shifted": {"x": [[1.0]], "y": [1.0]}},
    plan=jaxscale.Plan(mesh="data:2", memory="full"),
)


def page_of(value):
    """The page in the frame that a notebook shows."""
    frame = value._repr_html_()
    assert frame.startswith('<iframe srcdoc="')
    assert frame.count("<") == 2  # the page is escaped as a whole
    return html.unescape(frame.removeprefix('<iframe srcdoc="').partition('" style=')[0])


def step():
    plan = jaxscale.Plan(mesh="fsdp:2", zero=3)
    return jaxscale.build(jaxscale.Experiment("a<b>", DECODER, None, steps=4, batch=8), plan)


VALUES = {
    "mesh": (lambda: jaxscale.MeshSpec(data=2, fsdp=4), ["8 devices", "data 2 down", "fsdp 4 across"]),
    "one device": (lambda: jaxscale.MeshSpec(), ["1 device"]),
    "large mesh": (lambda: jaxscale.MeshSpec(replica=4, data=64, fsdp=256), ["65,536 devices", "replica 3", "…"]),
    "plan": (
        lambda: jaxscale.Plan(mesh="data:2,fsdp:4", zero=3, memory="full", pipeline="1f1b:2x4"),
        ["ZeRO 3", "Only each block's input is kept", "8 devices", "1f1b", "rank 1"],
    ),
    "plan of defaults": (lambda: jaxscale.Plan(), ["Mesh", "Precision"]),
    "experiment": (
        lambda: EXPERIMENT,
        ["a<b> & c", "Decoder(64", "500 of 8 rows", "shifted", "Learning rate of 500 updates", "head|<i>", "2 devices"],
    ),
    "optimizer": (lambda: jaxscale.Optimizer("muon"), ["Optimizer(name='muon')", "Learning rate of 1,000 updates"]),
    "own schedule": (lambda: jaxscale.Optimizer(schedule=lambda update: 1 / 0), ["<lambda>, a function of yours"]),
    "schedule": (lambda: schedule("zb-h1", 4, 8), ["zb-h1", "bubble", "rank 3", "microbatch 7"]),
    "simulation": (
        lambda: simulate(schedule("gpipe", 2, 3), Costs.alike(schedule("gpipe", 2, 3))),
        ["gpipe", "rank 1", "bubble"],
    ),
    "pipeline plan": (lambda: PipelinePlan.parse("pipedream:3"), ["pipedream", "rank 2", "in the steady state"]),
    "step": (step, ["Train step of a<b>", "mesh fsdp:2", "2 devices", "mlp/up/weight", "Per device", "dim 1 on fsdp"]),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_draws_itself(name):
    make, words = VALUES[name]
    value = make()
    page = page_of(value)
    read = Page(page)
    assert [word for word in words if word not in read.words] == []
    assert "prefers-color-scheme: dark" in page
    assert "width=device-width" in page
    tags = {tag for tag, *_ in read.attributes}
    assert "link" not in tags
    assert len(repr(value)) < 400
    start = time.process_time()
    drawn(value)
    assert time.process_time() - start < 0.1


def test_text_of_the_user_is_never_markup():
    experiment = jaxscale.Experiment(EVIL.replace("/", ""), DECODER, None, optimizer=jaxscale.Optimizer(train=EVIL))
    page = page_of(experiment)
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert(1)") >= 2
    assert "head|&lt;i&gt;" in page_of(EXPERIMENT)


def test_what_is_too_long_or_chosen_later_is_shown_as_text():
    long_schedule = schedule("1f1b", 16, 80)
    assert long_schedule._repr_html_() is None
    assert repr(long_schedule) == "<Schedule 1f1b: 16 ranks, 16 stages, 80 microbatches>"
    assert simulate(long_schedule, Costs.alike(long_schedule))._repr_html_() is None
    assert PipelinePlan.parse("auto:4")._repr_html_() is None
    assert "Pipeline: auto:4" in Page(page_of(jaxscale.Plan(pipeline="auto:4"))).words


def test_an_error_in_a_picture_does_not_stop_a_cell(monkeypatch):
    def fail(value):
        raise ZeroDivisionError

    monkeypatch.setattr(notebook, "PICTURES", {"MeshSpec": fail})
    assert jaxscale.MeshSpec()._repr_html_() is None
    with pytest.raises(ZeroDivisionError):
        notebook.html_of(jaxscale.MeshSpec())


def test_a_picture_of_a_plan_needs_no_jax():
    program = (
        "import sys, jaxscale as jx; plan = jx.Plan(mesh='data:2', pipeline='1f1b:2x4');"
        "assert 'rank 1' in plan._repr_html_();"
        "assert jx.MeshSpec(data=2)._repr_html_() and jx.Optimizer()._repr_html_(); assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_values_that_hold_much_print_short():
    train_step = step()
    assert repr(train_step).startswith("<TrainStep of 'a<b>', 10,320 parameters, Plan(")
    assert repr(train_step.init()).startswith("<TrainState: 10,320 parameters in ")
    assert repr(jaxscale.Platform.parse("tpu v5e:4x4")) == "<Platform tpu v5e:4x4>"
    opened = EXPERIMENT.held_out["shifted"].open(1, 0)
    assert repr(opened) == "<Opened: 0 rows to train on, 1 held out, 1 a batch>"


def test_runs_are_compared_on_one_page(tmp_path):
    first, second = make_run(tmp_path / "a", steps=40), make_run(tmp_path / "b", steps=30, resumed=False)
    (second / "experiment.json").write_text(
        json.dumps({**json.loads((second / "experiment.json").read_text()), "name": EVIL})
    )
    comparison = jaxscale.compare(first, str(second))
    page = page_of(comparison)
    assert [word for word in ("2 runs", "What differs", "Held-out loss", EVIL) if word not in Page(page).words] == []
    assert "<script>alert" not in page
    comparison.write(tmp_path / "page.html")
    assert "2 runs" in (tmp_path / "page.html").read_text("utf-8")
    for runs, message in (
        ((first,), "got 1 run, expected from 2 to 7"),
        ((first, first), "is given twice"),
        ((first, tmp_path / "none"), "none: there is no such run"),
    ):
        with pytest.raises(UserError, match=message):
            jaxscale.compare(*runs)
