"""Every technique of the README's table, alone and in mixtures, through a whole run of the command line.

`fit`, train with checkpoints, stopped in the middle (some killed), resumed, some on another layout too; evaluate,
generate, export, report. The losses after the restart are those of the undisturbed run, bit for bit. A pipeline by
default (`test_earlier_runs.py` continues a run with a codec, `tests/launch` one with ZeRO 3, which is not evaluated or
exported there); one technique of each family as variants; all of them, on one device and on four, and 40 mixtures by
`-m slow`.
"""

import contextlib
import itertools
import re
import shutil
from pathlib import Path
from typing import get_args

import pytest

from jaxscale.memory.plan import MemoryRule
from jaxscale.memory.selectors import SELECTORS
from jaxscale.optim.optimizer import Name
from jaxscale.pipeline.schedules import METHODS
from jaxscale.recipe.plan import StatePlan
from jaxscale.replicas.codecs import CODECS
from tests.system.data import write_data
from tests.system.mixtures import mixture
from tests.system.techniques import HELD, TECHNIQUES, Technique
from tests.system.whole import Ended, command, compiled_once, from_memory, whole_run

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with the experiment file and what it reads."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture
def place(data, tmp_path, monkeypatch):
    """A folder of one test, with the experiment file."""
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "whole"
    shutil.copytree(data, folder, copy_function=lambda a, b: Path(b).symlink_to(a))
    (folder / "tiny.py").write_text(Path(__file__).with_name("tiny.py").read_text())
    monkeypatch.chdir(tmp_path)
    return folder


def on_one() -> list:
    found = [technique for technique in TECHNIQUES if technique.one]
    return [pytest.param(technique, id=technique.name or "plain", marks=pytest.mark.slow) for technique in found]


def on_four() -> list:
    cases = []
    for technique in TECHNIQUES:
        if technique.four:
            further = pytest.mark.variant if technique.each_change else pytest.mark.slow
            cases.append(pytest.param(technique, id=technique.name, marks=() if technique.default else further))
    return cases


@pytest.mark.parametrize("technique", on_one())
def test_alone_on_one_device(technique: Technique, place):
    flags = technique.flags
    if "DECISION" in flags:
        before = str(place / "before")
        command("train", str(place / "tiny.py"), "--plan.memory", f"save:{HELD}", "--plan.mesh", "1", "--out", before)
        flags = flags.replace("DECISION", f"{before}/memory.json")
    whole_run(place, technique.variant, flags, "--plan.mesh 1")


@pytest.mark.parametrize("technique", on_four())
def test_alone_on_four_devices(technique: Technique, place):
    with compiled_once() if technique.default or technique.each_change else contextlib.nullcontext():
        whole_run(place, technique.variant, technique.flags, technique.four, onto=technique.onto)


@pytest.mark.slow
@pytest.mark.parametrize(
    "technique", [technique for technique in TECHNIQUES if technique.four], ids=lambda one: one.name
)
def test_goes_on_from_memory(technique: Technique, place, monkeypatch):
    monkeypatch.setenv("JAXSCALE_MEMORY", str(place / "memory"))
    with compiled_once():
        from_memory(place, technique.variant, technique.flags, technique.four)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_in_a_mixture(number: int, place, capsys):
    """What is refused once it is traced goes on with one technique fewer; once it has trained, nothing is refused."""
    for turn, (flags, layout) in enumerate(itertools.islice(mixture(number, place / "tiny.py"), 3)):
        with capsys.disabled():
            print(f"\nmixture {number}: {flags} {layout}")
        folder = place.with_name(f"turn{turn}")
        shutil.copytree(place, folder, symlinks=True)
        try:
            whole_run(folder, "", flags, layout)
            return
        except Ended as ended:
            if ended.code != 2 or (folder / "undisturbed" / "metrics.jsonl").exists():
                raise
            with capsys.disabled():
                print(f"refused: {ended.said.strip()}")
    pytest.fail("refused with two techniques fewer, too")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        ("--plan.offload.optimizer-state host --plan.state.moments int8", "--plan.mesh fsdp:2"),
        ("--plan.reduce int8 --plan.memory full", "--plan.mesh replica:2,fsdp:2 --plan.zero 3"),
        ("--plan.pipeline pipedream:2", "--plan.mesh data:2"),
    ],
)
def test_killed(flags: str, layout: str, place):
    whole_run(place, "", flags, layout, kill=True, steps=60)


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("--plan.reduce", CODECS),
        ("--optimizer", get_args(Name)),
        ("--plan.pipeline", METHODS),
        ("--plan.memory offload", SELECTORS),
        ("--plan.memory", {*get_args(MemoryRule)} - {"none", "fit"}),
        ("--plan.state.moments", {*get_args(StatePlan.__annotations__["moments"])} - {"float32"}),
    ],
)
def test_no_name_is_left_out(field, names):
    asked = [technique.flags + " " for technique in TECHNIQUES]
    lacking = [name for name in names if not any(re.search(rf"{field}[ :]{name}[: ]", flags) for flags in asked)]
    assert lacking == []


def test_no_row_of_the_readme_is_left_out():
    text = README.read_text().split("## Techniques")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?!technique|---)([^|]+?) \|", text, re.MULTILINE)
    assert len(rows) > 30
    named = {technique.row for technique in TECHNIQUES if technique.row}
    assert {row for row in rows if not any(row.startswith(name) for name in named)} == set()
    assert {name for name in named if not any(row.startswith(name) for row in rows)} == set()
