import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "notebooks"
NOTEBOOK = FOLDER / "shakespeare.ipynb"


def cells(notebook):
    return {cell["id"]: cell for cell in notebook["cells"]}


@pytest.mark.parametrize("name", ["colab", "memory", "shakespeare", "which_machine"])
def test_notebooks_are_stored_without_outputs_and_addresses(name):
    text = (FOLDER / f"{name}.ipynb").read_text("utf-8")
    notebook = json.loads(text)
    assert notebook["nbformat"] == 4
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            lines = "".join(cell["source"]).split("\n")
            ast.parse("\n".join(re.sub(r"^(\s*)[!%].*", r"\1pass", line) for line in lines))
    assert "://" not in text


@pytest.mark.slow
def test_the_notebook_on_memory_runs(capsys, monkeypatch):
    monkeypatch.chdir(FOLDER)
    notebook = cells(json.loads((FOLDER / "memory.ipynb").read_text("utf-8")))
    found: dict = {}
    for name, cell in notebook.items():
        if cell["cell_type"] == "code" and name != "install":
            exec(compile("".join(cell["source"]), name, "exec"), found)
            if name == "settings":
                found["EXPERIMENT"] = "llama_1b"
    said = capsys.readouterr().out
    assert "llama_1b on tpu v5e:4x4" in said
    assert "saved: " in said
    assert found["explained"]._repr_html_().startswith("<iframe")


@pytest.mark.slow
def test_the_notebook_on_machines_and_plans_runs(capsys, monkeypatch):
    monkeypatch.chdir(FOLDER)
    names: dict = {}
    for name, cell in cells(json.loads((FOLDER / "which_machine.ipynb").read_text("utf-8"))).items():
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), name, "exec"), names)
            if name == "settings":
                names |= {"LAYERS": 2, "EMBED": 256, "CONTEXT": 128, "BATCHES": [16, 32]}
    shown = capsys.readouterr().out
    assert shown.count("fits: True") == 3
    assert shown.count(" rows: ") == 2
    assert names["choice"]._repr_html_().startswith("<iframe")


def executed(notebook: dict, folder: Path) -> dict[str, list]:
    """Execute a notebook in a folder as a user does, without the suite's devices; return each cell's outputs."""
    (folder / "in.ipynb").write_text(json.dumps(notebook))
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    jupyter = Path(sys.executable).with_name("jupyter")
    command = [jupyter, "execute", "in.ipynb", "--output=out.ipynb", "--kernel_name=python3"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        name: cell["outputs"]
        for name, cell in cells(json.loads((folder / "out.ipynb").read_text())).items()
        if cell["cell_type"] == "code"
    }


DRAWN = {
    "drawn": "Learning rate of 20 updates",
    "compare": "2 runs",
    "mesh": "8 devices",
    "plan": "ZeRO 3",
    "schedule": "zb-h1",
}
"""For each cell of the notebook for Colab whose value draws itself, words of its picture."""


@pytest.mark.slow
def test_the_notebook_for_colab_trains_on_the_machine_that_it_finds(tmp_path):
    notebook = json.loads((FOLDER / "colab.ipynb").read_text("utf-8"))
    cells(notebook)["settings"]["source"] = ["STEPS = 20\n", 'OUT = "run"\n']
    outputs = executed(notebook, tmp_path)
    text = {name: "".join("".join(o.get("text", "")) for o in out) for name, out in outputs.items()}
    assert text["doctor"].startswith("cpu")
    assert any("image/png" in output.get("data", {}) for output in outputs["plot"])
    assert text["sample"].startswith("def ")
    assert (tmp_path / "run" / "report.html").exists()
    pages = {name: "".join(outputs[name][-1]["data"].get("text/html", "")) for name in DRAWN}
    assert {name for name, page in pages.items() if not page.startswith("<iframe")} == set()
    assert {name for name, word in DRAWN.items() if word not in pages[name]} == set()


@pytest.mark.slow
def test_the_notebook_trains_plots_samples_and_shows_its_report(tmp_path):
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    settings = cells(notebook)["settings"]
    assert settings["metadata"]["tags"] == ["parameters"]
    settings["source"] = ["STEPS = 30\n", 'OUT = "run"\n', 'PACKAGE = ""\n']
    outputs = executed(notebook, tmp_path)
    assert any("image/png" in output.get("data", {}) for output in outputs["plot"])
    said = {name: "".join("".join(o.get("text", "")) for o in out) for name, out in outputs.items()}
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+) nats", said["metrics"]).groups())
    assert last < first
    assert said["sample"].startswith("ROMEO:")
    assert len(said["sample"]) > 300
    assert "after 10 steps" in said["change"]
    assert "iframe" in "".join(outputs["report"][0]["data"]["text/html"])
    assert (tmp_path / "run" / "report.html").exists()
