"""How long a user waits before anything trains: importing the package, and being told of a mistake.

    python experiments/benchmarks/startup.py                  # 7 rounds
    python experiments/benchmarks/startup.py --tiny           # 2 rounds
    python experiments/benchmarks/startup.py --install uv     # or pip: from a new clone to the first training step

Each figure is a median over rounds of whole processes, started in turn so that a busy machine spoils all alike. A
mistake in a subcommand, file, variant or own flag is timed from the start of the process; one in a field or value
beyond a process that imports the same experiment file alone. That the first kind imports no JAX is asserted.
`--install` clones the repository into an empty folder, runs `make train` there, and waits for the first step in its
log; the installer's cache of downloaded packages is warm from its second run on.

Measured on 2 cores, Python 3.11, JAX 0.10.2: importing jaxscale 0.02 s beyond importing jax; a mistake of the first
kind 0.04 s, of the second 0.13 s beyond importing the experiment; a new clone's first step after 20 s with uv, 28 s
with pip, both with a warm cache of packages.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import Figure, show

from jaxscale.heartbeat import Writer

EXPERIMENT = Path(__file__).resolve().parents[1] / "shakespeare.py"
CLUSTER = EXPERIMENT.parents[1] / "tpu_configs" / "h200_slurm.py"

EARLY = {
    "typo in subcommand": (["tarin", str(EXPERIMENT)], "did you mean 'train'?"),
    "typo in file": (["train", str(EXPERIMENT.with_name("shakespear.py"))], "did you mean"),
    "typo in variant": (["train", "VARIANTS", "tyni"], "did you mean 'tiny'?"),
    "typo in own flag": (["train", str(EXPERIMENT), "--lgo-every", "3"], "did you mean '--log-every'?"),
    "typo in literal": (["train", str(EXPERIMENT), "--resume", "nevr"], "did you mean 'never'?"),
}
FIT = ["-m", "jaxscale", "fit", str(EXPERIMENT.with_name("llama_70b.py")), "--platform", "tpu v5p:4x8x8"]
"""What a platform of 256 chips takes, by estimate."""

LATE = {
    "typo in field": (["train", str(EXPERIMENT), "--plan.zeor", "3"], "did you mean 'plan.zero'?"),
    "typo in value": (["train", str(EXPERIMENT), "--plan.precision", "bfloat"], "did you mean 'bfloat16'?"),
}
WITHOUT_JAX = """
import sys
from jaxscale.cli import main
code = main(sys.argv[1:])
heavy = sorted({"jax", "flax", "optax", "numpy"} & set(sys.modules))
assert not heavy, f"imported {heavy} to answer a mistake"
sys.exit(code)
"""


def seconds(*words: str, code: int = 0, expected_text: str = "") -> float:
    """Wall seconds of one Python process; its exit code and words are checked."""
    start = time.perf_counter()
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    taken = time.perf_counter() - start
    assert ended.returncode == code, f"{words}: exit code {ended.returncode}\n{ended.stderr}"
    assert expected_text in ended.stderr, f"{words}: expected {expected_text!r} in\n{ended.stderr}"
    assert "Traceback" not in ended.stderr, ended.stderr
    return taken


def to_first_step(installer: str) -> float:
    """Seconds from `make train` in a new clone to the first training step in the run's log."""
    with tempfile.TemporaryDirectory() as folder:
        clone, run = Path(folder) / "clone", Path(folder) / "run"
        subprocess.run(["git", "clone", "-q", str(EXPERIMENT.parents[1]), str(clone)], check=True)
        command = ["make", "train", f"ARGS=--out {run} --steps 2"] + (["UV="] if installer == "pip" else [])
        environment = {**os.environ, "JAXSCALE_CACHE": str(Path(folder) / "cache")}
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=clone, env=environment, start_new_session=True)
        try:
            log = run / "metrics.jsonl"
            while not (log.exists() and '"train"' in log.read_text()):
                assert process.poll() in (None, 0), f"make train: exit code {process.returncode}"
                time.sleep(0.1)
            return time.perf_counter() - start
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> None:
    """Measure and show; exit with 1 if a bar does not hold at full size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="2 rounds instead of 7")
    parser.add_argument("--install", choices=("uv", "pip"), help="measure a new clone's first step instead")
    args = parser.parse_args()
    if args.install:
        bar = {"uv": 60.0, "pip": 150.0}[args.install]
        waited = to_first_step(args.install)
        holds = show([Figure(f"make train to the first step, {args.install}", waited, "s", bar)], "A new clone")
        raise SystemExit(0 if holds else 1)
    rounds = 2 if args.tiny else 7
    with tempfile.TemporaryDirectory() as folder:
        variants = Path(folder) / "variants.py"
        variants.write_text("def experiment(): ...\ndef tiny(): ...\nVARIANTS = {'tiny': tiny}\n")
        early = {
            name: ([str(variants) if word == "VARIANTS" else word for word in words], expected_text)
            for name, (words, expected_text) in EARLY.items()
        }
        for words, expected_text in early.values():
            seconds("-c", WITHOUT_JAX, *words, code=2, expected_text=expected_text)
        runs: dict[str, tuple[list[str], int, str]] = {
            "import jax": (["-c", "import jax"], 0, ""),
            "import jaxscale and jax": (["-c", "import jaxscale, jax; jaxscale.Experiment, jaxscale.Plan"], 0, ""),
            "import the experiment": (
                ["-c", f"from jaxscale.records.source import load_file; load_file({str(EXPERIMENT)!r})"],
                0,
                "",
            ),
        }
        runs["import jax, flax, optax, scipy"] = (["-c", "import jax, flax.nnx, optax, scipy.optimize"], 0, "")
        runs["fit of 70B on 256 chips"] = (FIT, 0, "")
        run_dir = Path(folder) / "run"
        writer = Writer(run_dir / "processes", 0)
        writer.set("finished")
        writer.start()
        writer.close()
        launch = ["launch", str(EXPERIMENT), "--cluster", str(CLUSTER), "--dry-run"]
        runs["launch --dry-run"] = (["-m", "jaxscale", *launch], 0, "")
        small = {
            "status": ["status", str(run_dir)],
            "stop": ["stop", str(run_dir)],
            "watch": ["watch", "--out", str(Path(folder) / "watched"), "--", "true"],
        }
        for name, words in small.items():
            code, expected_text = (2, "there is nothing to stop") if name == "stop" else (0, "")
            seconds("-c", WITHOUT_JAX.replace(', "numpy"', ""), *words, code=code, expected_text=expected_text)
            runs[name] = (["-m", "jaxscale", *words], code, expected_text)
        for name, (words, expected_text) in {**early, **LATE}.items():
            runs[name] = (["-m", "jaxscale", *words], 2, expected_text)
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds + 1):
            for name, (words, code, expected_text) in runs.items():
                one = seconds(*words, code=code, expected_text=expected_text)
                if number:  # the first round fills the caches of files and bytecode
                    taken[name].append(one)
    median = {name: statistics.median(column) for name, column in taken.items()}
    import_cost = median["import jaxscale and jax"] - median["import jax"]
    found = [
        Figure("import jax", median["import jax"], "s"),
        Figure("import jaxscale beyond import jax", import_cost, "s", 1.0),
        *(Figure(name, median[name], "s", 0.5) for name in early),
        Figure("import the experiment", median["import the experiment"], "s"),
        Figure(
            "fit of 70B on 256 chips beyond importing jax, flax, optax, scipy",
            median["fit of 70B on 256 chips"] - median["import jax, flax, optax, scipy"],
            "s",
            2.0,
        ),
        *(
            Figure(f"{name} beyond it", median[name] - median["import the experiment"], "s", 0.5)
            for name in (*LATE, "launch --dry-run")
        ),
        *(Figure(name, median[name], "s", 0.3) for name in ("status", "stop", "watch")),
    ]
    if not show(found, f"Startup, median of {rounds} rounds") and not args.tiny:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
