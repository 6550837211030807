"""The command line as a user meets it: exit code, one message, no traceback."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxscale.cli import main
from jaxscale.errors import Diverged, MostlySkipped, Preempted
from jaxscale.recipe.plan import Plan
from jaxscale.values import user_frames


def refused(capsys: pytest.CaptureFixture[str], words: str | list[str], *messages: str) -> None:
    """The words are a mistake, told on stderr alone."""
    assert main(words.split() if isinstance(words, str) else words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("jaxscale: ")
    assert "Traceback" not in shown.err
    for message in messages:
        assert message in shown.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tarin experiments/toy.py", "did you mean 'train'?"),
        ("train experiments/tyo.py", "there is no file experiments/tyo.py"),
        ("train experiments/tyo.py", "did you mean 'experiments/toy.py'?"),
        ("train experiments/toy", "did you mean 'experiments/toy.py'?"),
        ("train toy.py", "did you mean 'experiments/toy.py'?"),
        ("train experiments", "experiments is a folder: expected an experiment file, such as one of toy.py"),
        ("train nowhere/near.py", "there are experiments/toy.py"),
        (
            "train experiments/toy.py wdie",
            "experiments/toy.py has no variant 'wdie': there are wide; did you mean 'wide'?",
        ),
        ("fit experiments/tyo.py", "did you mean 'experiments/toy.py'?"),
        ("fit experiments/toy.py --platfrom local", "unknown flag '--platfrom' of fit; did you mean '--platform'?"),
        ("fit experiments/toy.py --platform tpuv5e:4x4", "unknown platform 'tpuv5e:4x4'"),
        (["fit", "experiments/toy.py", "--platform", "tpu v5e:3x5"], "tpu v5e has no slice 3x5"),
        ("fit experiments/toy.py --limit 14Gib", "--limit '14Gib': unknown unit 'Gib'; did you mean 'GiB'?"),
        ("fit experiments/toy.py --limit 0B", "--limit: got 0B, expected at least 1B"),
        (["fit", "experiments/toy.py", "--platform", "gpu l4", "--verify"], "compiler/gpu_target.py lacks its data"),
        (["fit", "experiments/toy.py", "--platform", "gpu h100 x 12", "--verify"], "12 GPUs do not fill hosts of 8"),
        ("fit experiments/toy.py --batch 0", "batch: got 0, expected a whole number >= 1"),
        ("fit experiments/toy.py --host-limit much", "--host-limit 'much': expected a number of bytes with its unit"),
        ("fit experiments/toy.py --plan.memory chian:1GiB", "did you mean 'chain'?"),
        ("plan experiments/tyo.py", "did you mean 'experiments/toy.py'?"),
        ("plan experiments/toy.py --forbid pipelines", "unknown setting 'pipelines'"),
        ("plan experiments/toy.py --forbid zero --plan.zero 3", "zero: it is both fixed and forbidden"),
        ("plan experiments/toy.py --objective tiem", "did you mean 'time'?"),
        ("plan experiments/toy.py --objective cost", "give --platforms 'A, B' and --prices FILE"),
        ("plan experiments/toy.py --prices prices.json", "--prices: prices are compared between platforms"),
        (["plan", "experiments/toy.py", "--platforms", ","], "--platforms: got ',', expected platforms such as"),
        (
            ["plan", "experiments/toy.py", "--platforms", "gpu h100", "--platform", "gpu h100"],
            "got --platform and --platforms, expected one of them",
        ),
        (["plan", "experiments/toy.py", "--platforms", "gpu h100, tpu v5e:3x5"], "tpu v5e has no slice 3x5"),
        ("plan experiments/toy.py --verify -1", "--verify: got -1, expected a number of plans to compile"),
        ("plan experiments/toy.py --out plan.pdf", "expected a name that ends in .html or .svg"),
        ("plan experiments/toy.py --plan-file nowhere.json", "nowhere.json"),
        ("train experiments/toy.py --plan zero3", "--plan: got 'zero3', expected auto; fields of the plan are set by"),
        ("explain experiments/toy.py --out memory.pdf", "expected a name that ends in .html or .svg"),
        (
            "explain experiments/toy.py -o nowhere/memory.html",
            "--out nowhere/memory.html cannot be written: No such file",
        ),
        ("train experiments/toy.py --stpes 3", "unknown flag '--stpes' of train; did you mean '--steps'?"),
        ("train experiments/toy.py --resume nver", "did you mean 'never'?"),
        ("train experiments/toy.py --log-every 0", "--log-every: got 0, expected a whole number >= 1"),
        ("train experiments/toy.py --plan-file paln.json", "there is no file paln.json"),
        ("train experiments/toy.py --profile 10-13", "profile '10-13': expected FIRST:STOP, such as 10:13"),
        ("train experiments/toy.py --profile 13:10", "profile 13:10: expected FIRST:STOP with 1 <= FIRST < STOP"),
        ("train experiments/toy.py --model.embd 16", "unknown field 'model.embd'; did you mean 'model.embed'?"),
        ("train experiments/toy.py --modle.embed 16", "did you mean 'model.embed'?"),
        ("train experiments/toy.py --model.embed wide", "model.embed: got 'wide', expected a whole number"),
        ("train experiments/toy.py --model.embed 9", "model.embed: got 9, expected a multiple of 8"),
        ("train experiments/toy.py --model.kind fanci", "did you mean 'fancy'?"),
        ("train experiments/toy.py --plan.zero 7", "plan.zero: got '7', expected 0 or 1 or 2 or 3"),
        ("train experiments/toy.py --plan.mesh fsdb:2", "did you mean 'fsdp'?"),
        ("train experiments/toy.py --plan.memory ful", "did you mean 'full'?"),
        ("train experiments/toy.py --plan.zero 3 --plan.mesh data:2", "has none; add fsdp:N"),
        ("train experiments/toy.py --steps 0", "steps: got 0, expected a whole number >= 1"),
        ("train experiments/toy.py --batch -1", "batch: got -1, expected a whole number >= 1"),
        ("train experiments/toy.py --seed -1", "seed: got -1, expected a whole number >= 0"),
        ("train experiments/toy.py --evaluation.every -1", "evaluation.every: got -1"),
        ("train experiments/toy.py --checkpoint.keep 0", "checkpoint.keep: got 0, expected a whole number >= 1"),
        ("train experiments/toy.py --samples.temperature -1", "samples.temperature: got -1.0, expected a number >= 0"),
        ("train experiments/toy.py --samples.prompts ,a", "samples.prompts: got ''"),
        ("train experiments/toy.py --guard.patience 0", "guard.patience: got 0"),
        ("train experiments/toy.py --optimizer.eps -1", "jaxscale: optimizer.eps: got -1.0, expected 0 or more"),
        ("train experiments/toy.py --optimizer muno", "optimizer.name: got 'muno'"),
        (
            "train experiments/toy.py --optimizer lars --optimizer.b1 0.9",
            "optimizer.b1: got 0.9, but lars has no such option",
        ),
        ("train experiments/toy.py --model other", "fields of the experiment are set by path, such as --model.embed"),
        ("train experiments/toy.py --plan.rules none", "plan.rules consists of fields: set one of plan.rules.batch"),
        ("train experiments/toy.py --optimizer.learning-rate fast", "optimizer.learning_rate: got 'fast'"),
        ("generate runs/none", "run directory runs/none does not exist; start a run with: jaxscale train FILE"),
        ("generate experiments", "run directory experiments holds no run"),
        ("evaluate runs/none", "does not exist"),
        ("export runs/none out", "does not exist"),
        ("report runs/none", "does not exist"),
        ("status . --log " + "9" * 300, "only launched runs have logs"),
        ("watch --ranks 99999999 -- true", "--ranks: got 99999999, expected 1 to 1024"),
    ],
)
def test_mistakes(toy: Path, capsys, words, message):
    refused(capsys, words, message)


def test_a_run_that_is_near_is_named(toy: Path, capsys):
    Path("runs/shakespeare").mkdir(parents=True)
    Path("runs/shakespeare/experiment.json").write_text("{}")
    refused(capsys, "report runs/shakspeare", "did you mean 'runs/shakespeare'?")
    refused(capsys, "generate runs/shakespeare --tokens 0", "--tokens: got 0")
    refused(capsys, "generate runs/shakespeare --temperature -1", "--temperature: got -1.0, expected a number >= 0")
    refused(capsys, "generate runs/shakespeare --seed 1e12", "--seed: got 1000000000000")
    refused(capsys, "export runs/shakespeare runs/shakespeare", "is the directory of a run")
    Path("taken").touch()
    refused(capsys, "export runs/shakespeare taken", "taken is a file")


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("", ["has no experiment()"]),
        ("def experimnt(): ...", ["has no experiment()", "did you mean 'experimnt'?"]),
        ("def experiment(:", ["experiments/toy.py, line 1 is not Python"]),
        (
            "import nothing_like_it\ndef experiment(): ...",
            ["toy.py, line 1: importing the file raised ModuleNotFoundError"],
        ),
        ("def experiment():\n    return 1 / 0\n", ["line 2: experiment() raised ZeroDivisionError", "return 1 / 0"]),
        ("experiment = 3\n", ["got 3 for experiment(), expected an Experiment, or a function without parameters"]),
        ("def experiment():\n    return 3\n", ["experiment() returned a int, expected an Experiment"]),
        ("def experiment(size):\n    return 3\n", ["experiment() raised TypeError"]),
        (
            "from jaxscale import Experiment\n\ndef experiment():\n    return Experiment('a', model=3, data=None)\n",
            ["toy.py, line 4: model: got 3, expected a Model"],
        ),
        (
            "from jaxscale import Plan\n\ndef experiment():\n    return Plan(zero=9)\n",
            ["toy.py, line 4: zero: got 9, expected 0 or 1 or 2 or 3"],
        ),
    ],
)
def test_files_that_are_no_experiment(toy: Path, capsys, text, messages):
    toy.write_text(text)
    refused(capsys, ["train", str(toy)], *messages)


def test_a_file_of_bytes(toy: Path, capsys):
    toy.write_bytes(b"\xff\xfe\x00")
    refused(capsys, ["train", str(toy)], "bytes that are not UTF-8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"version": 1, "zeor": 3}', "plan.json: unknown field 'zeor'"),
        ('{"version": 99}', "plan.json: got plan version 99, expected a version from 1 to 2"),
        ('{"version": 1, "ze', "plan.json is not JSON"),
        ("[]", "plan.json: got a list, expected a JSON object with the fields of a plan"),
        ('{"version": 1, "microbatches": 0}', "microbatches: got 0"),
    ],
)
def test_plan_files_that_are_none(toy: Path, capsys, content, message):
    Path("plan.json").write_text(content)
    refused(capsys, f"train {toy} --plan-file plan.json", message)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list:
    """Calls of `train`, which does nothing; what it should raise may be put in front."""
    import jaxscale.training.backend
    import jaxscale.training.loop

    calls: list = []

    def train(experiment, **options):
        if calls and isinstance(calls[0], BaseException):
            raise calls[0]
        calls.append((experiment, options))

    monkeypatch.setattr(jaxscale.training.loop, "train", train)
    monkeypatch.setattr(jaxscale.training.backend, "start_backend", lambda: None)
    return calls


def test_train_gets_what_was_asked(toy: Path, trained: list):
    Path("plan.json").write_text(json.dumps({"version": 1, "zero": 1, "microbatches": 2}))
    words = "wide --plan-file plan.json --plan.zero 3 --model.kind fancy --steps 7 --seed 5 --log-every 2 --profile 1:2"
    assert main(["train", str(toy), *words.split()]) == 0
    ((experiment, options),) = trained
    assert (experiment.model.embed, experiment.model.kind) == (16, "fancy")
    assert (experiment.steps, experiment.seed, experiment.batch) == (7, 5, 8)
    assert experiment.plan == Plan(zero=3, microbatches=2)
    source = options.pop("source")
    expected = {
        "out": "runs/toy-wide",
        "limit": None,
        "resume": "auto",
        "from_step": None,
        "init_from": None,
        "log_every": 2,
        "profile": "1:2",
    }
    assert options == expected
    assert source.overrides == {"steps": "7", "seed": "5", "model.kind": "fancy", "plan.zero": "3"}
    assert (source.variant, source.seed, source.plan["zero"]) == ("wide", 5, 1)


def test_out_and_defaults(toy: Path, trained: list):
    assert main(["train", str(toy), "--out", "gs://bucket/x", "--name", "other"]) == 0
    assert main(["train", str(toy), "--name", "other"]) == 0
    assert [options["out"] for _, options in trained] == ["gs://bucket/x", "runs/other"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Diverged("the loss is gone"), 4),
        (MostlySkipped("300 of 2,000 steps were skipped"), 6),
        (Preempted("saved at step 3"), 75),
        (KeyboardInterrupt(), 130),
        (KeyboardInterrupt("stopped by SIGTERM before the first step"), 130),
    ],
)
def test_exit_codes(toy: Path, trained: list, capsys, error, code):
    trained.append(error)
    assert main(["train", str(toy)]) == code
    assert capsys.readouterr().err == f"jaxscale: {str(error) or 'interrupted'}\n"


def test_a_crash_of_our_own_keeps_its_traceback(toy: Path, monkeypatch):
    def read(words):
        raise RuntimeError("ours")

    monkeypatch.setattr(user_frames, "PACKAGE_FOLDERS", (*user_frames.PACKAGE_FOLDERS, str(Path(__file__).parent)))
    monkeypatch.setattr("jaxscale.cli.arguments.read", read)
    with pytest.raises(RuntimeError, match="ours"):
        main(["train", str(toy)])


def test_as_a_process_without_jax(toy: Path):
    code = """
import sys
from jaxscale.cli import main
code = main(sys.argv[1:])
sys.exit(9 if {"jax", "flax", "optax", "numpy"} & set(sys.modules) else code)
"""
    for words in (
        ["tarin"],
        ["train", "tyo.py"],
        ["train", str(toy), "wdie"],
        ["train", str(toy), "--lgo-every", "3"],
        ["train", str(toy), "--resume", "nver"],
    ):
        ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
        assert (ended.returncode, "did you mean" in ended.stderr, ended.stdout) == (2, True, ""), ended.stderr
    words = ["train", str(toy), "--profile", "x"]
    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    ended = subprocess.run([sys.executable, "-m", "jaxscale", "tarin"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("note", 0), ("missing", 1)])
def test_the_doctor_exits_with_what_it_found(trained: list, monkeypatch, capsys, state, code):
    import jaxscale.training.doctor
    from jaxscale.training.doctor import Diagnosis, Finding, Section

    diagnosis = Diagnosis((Section("devices", (Finding("gpu support", "a GPU is here", state, "pip install it"),)),))
    monkeypatch.setattr(jaxscale.training.doctor, "doctor", lambda: diagnosis)
    assert main(["doctor"]) == code
    assert "a GPU is here" in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["doctor"]) == code
    assert "\x1b[" in capsys.readouterr().out


REAL = """
from pathlib import Path

from jaxscale import Experiment
from jaxscale.data import Text
from jaxscale.models import Decoder
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.recipe.plan import Plan

TEXT = Path(__file__).parent / "text.txt"


def experiment():
    return Experiment(
        name="real",
        model=Decoder(vocab=256, context=8, layers=1, embed=8, heads=2, mlp=8),
        data=Text(TEXT, context=8),
        steps=2,
        batch=2,
        plan=Plan(mesh=MeshSpec()),
    )
"""


def test_a_finished_run_started_again_shows_its_result_and_exits_with_0(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))
    Path("text.txt").write_text("the cat sat on the mat. " * 40)
    Path("real.py").write_text(REAL)
    assert main(["train", "real.py", "--samples.prompts", "()"]) == 0
    first = capsys.readouterr().out
    assert main(["train", "real.py", "--samples.prompts", "()", "--profile", "2"]) == 0
    again = capsys.readouterr().out
    assert main(["report", "runs/real"]) == 0
    reported = capsys.readouterr().out
    for shown in (first, again, reported):
        assert re.search(r"^real +finished$", shown, re.MULTILINE)
        assert re.search(r"^steps +2 of 2, 32 target tokens$", shown, re.MULTILINE)
        assert re.search(r"^report +runs/real/report\.html$", shown, re.MULTILINE)
    assert "\nthe run is complete: set steps above 2 to continue it" in again
    assert "compiled" in first
    assert "compiled" not in again
    assert main(["train", "real.py", "--profile", "3:4"]) == 2
    assert "profile 3:4: the run has 2 steps" in capsys.readouterr().err
