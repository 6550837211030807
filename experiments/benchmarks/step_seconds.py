"""Modeled seconds of train steps beside published ones.

    python experiments/benchmarks/step_seconds.py                        # all runs of published_steps.json
    python experiments/benchmarks/step_seconds.py --tiny                 # the first run
    python experiments/benchmarks/step_seconds.py --compile [--run v5e]  # compile runs on one TPU slice; extra aot-tpu

Each run was published: MaxText on TPUs and GPUs, torchtitan on GPUs. `published_steps.json` names the commit whose
table and scripts state it. A run with a doubt contradicts another one or a later script, and counts apart. Two errors
are shown: that of the model as it ships, whose efficiencies of v4, v5e and v5p were fitted to 11 tables of MaxText,
some of them among these; and leave one out, where the seconds of a run are multiplied by the one number (the median
ratio) that the other runs of its chip and software give. Whether the messages of a tensor axis or of a network overlap
was decided with all of these runs in view; no number was fitted for it.

The MFU that a second slice costs is shown apart: the run on one slice calibrates that on two.

With --compile, runs on one slice without a doubt are compiled: whether they fit, and their seconds by libtpu's schedule
beside the published ones (the cycles that it estimates, kernels by their declared FLOP, collectives by their bytes).
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from figures import Figure, show

import jaxscale as jx
from jaxscale.compiler.compile import compile_report
from jaxscale.compiler.usable import usable_bytes
from jaxscale.planning.program import step_recipe
from jaxscale.planning.search.compiler_seconds import compiler_seconds
from jaxscale.planning.search.step_seconds import modeled_seconds

PUBLISHED = json.loads(Path(__file__).with_name("published_steps.json").read_text())
POINTS = 5.0
"""Most points of MFU by which a second slice may cost more or less than modeled."""
Row = dict[str, Any]


def experiment_of(row: Row) -> tuple[jx.Experiment, jx.Plan]:
    """Return the experiment and the plan of a published run."""
    model = jx.models.Decoder(context=row["context"], **PUBLISHED["models"][row["model"]])
    data = jx.data.Text("text.txt", context=row["context"])
    experiment = jx.Experiment(row["name"], model, data, batch=row["batch"])
    mesh = jx.MeshSpec.parse(row["mesh"])
    plan = jx.Plan(
        mesh=mesh,
        zero=3,
        precision="bfloat16",
        memory=row["memory"],
        sequence_parallel=mesh.tensor > 1,
        kernels=source_of(row).get("kernels", "auto"),
    )
    return experiment, plan


def source_of(row: Row) -> Row:
    """Return where a run was published."""
    return PUBLISHED["sources"][row["source"]]


def modeled(row: Row) -> float:
    """Return the modeled seconds of a step of a published run."""
    experiment, plan = experiment_of(row)
    return modeled_seconds(experiment, jx.Platform.parse(row["platform"]), plan).total


def published_seconds(row: Row) -> float:
    """Return the seconds of a step from the published MFU, FLOP/s or tokens per second."""
    platform, model = jx.Platform.parse(row["platform"]), PUBLISHED["models"][row["model"]]
    tokens, chips = row["batch"] * row["context"], platform.chips * platform.slices
    if "tokens_per_second_per_chip" in row:
        return tokens / (row["tokens_per_second_per_chip"] * chips)
    embed, head_dim, layers = model["embed"], model["head_dim"], model["layers"]
    attention_weights = 2 * embed * head_dim * (model["heads"] + model["kv_heads"])
    mlp_weights = (2 if "mlp_kind" in model else 3) * embed * model["mlp"]
    tables = (1 if model.get("tied") else 2) * model["vocab"] * embed
    weights = layers * (attention_weights + mlp_weights) + tables
    scores_flop = 12 * layers * model["heads"] * head_dim * row["context"] * source_of(row)["attention_share"]
    rate = row["mfu"] * (platform.peak("bfloat16") or 0.0) if "mfu" in row else row["tflops"] * 1e12 * chips
    return (6 * weights + scores_flop) * tokens / rate


def show_compiled(rows: list[Row]) -> bool:
    """Compile published runs, print their bytes and seconds, and return whether each fits and has seconds."""
    figures = []
    for row in rows:
        platform = jx.Platform.parse(row["platform"])
        if platform.slices > 1 or platform.chip.kind != "tpu" or "doubt" in row:
            continue
        experiment, plan = experiment_of(row)
        report = compile_report(step_recipe(experiment, plan, None), platform)
        seconds = compiler_seconds(report.schedule, plan, platform)
        print(f"{row['name']}: {report}")
        name = row["name"].replace(" ", "_")
        figures.append(Figure(f"{name}_fits", report.fits(usable_bytes(platform) or 0), "", 1, ">="))
        figures.append(Figure(f"{name}_has_seconds", seconds is not None, "", 1, ">="))
        if seconds is not None:
            published = published_seconds(row)
            print(f"{row['name']}: published {published:.2f} s, by the compiler's clock {seconds}", flush=True)
            figures.append(Figure(f"{name}_error", seconds.total / published - 1, "share"))
    if not figures:
        raise SystemExit("--compile: got no run on one TPU slice without a doubt; name another one with --run")
    return show(figures, "published steps, compiled")


def slice_points(rows: list[Row], seconds: list[tuple[float, float]]) -> list[float]:
    """Return the points of MFU between published and modeled runs on two slices, each calibrated by that on one."""
    runs = {(row["model"], row["platform"]): index for index, row in enumerate(rows) if "doubt" not in row}
    points = []
    for (model, platform), index in runs.items():
        one = runs.get((model, platform.removesuffix(" x 2")))
        if one in (None, index):
            continue
        ratio = (seconds[index][0] / seconds[one][0]) / (seconds[index][1] / seconds[one][1])
        points.append(100 * rows[index]["mfu"] * abs(1 / ratio - 1))
    return points


def main() -> bool:
    """Print the table, and return whether every figure reaches its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the first run alone")
    parser.add_argument("--compile", action="store_true", help="compile the runs on one TPU slice")
    parser.add_argument("--run", default="", help="runs whose names contain this word alone")
    arguments = parser.parse_args()
    rows = [row for row in PUBLISHED["rows"] if arguments.run in row["name"]]
    if not rows:
        parser.error(f"--run: got {arguments.run!r}, which no name of a run in published_steps.json contains")
    if arguments.tiny:
        rows = rows[:1]
    if arguments.compile:
        return show_compiled(rows)
    pairs = [(modeled(row), published_seconds(row)) for row in rows]
    stacks = [(jx.Platform.parse(row["platform"]).chip.name, source_of(row)["stack"]) for row in rows]
    errors, left_out_errors = [], []
    print(f"{'run':26}{'published':>10}{'modeled':>10}{'error':>9}{'left out':>10}")
    for index, (row, (model, published)) in enumerate(zip(rows, pairs, strict=True)):
        others = [
            pairs[other][1] / pairs[other][0]
            for other, stack in enumerate(stacks)
            if stack == stacks[index] and other != index and "doubt" not in rows[other]
        ]
        error = model / published - 1
        left_out = model * statistics.median(others) / published - 1 if others else math.nan
        doubt_text = "  doubt: " + row["doubt"] if "doubt" in row else ""
        print(f"{row['name']:26}{published:9.2f}s{model:9.2f}s{error:+9.1%}{left_out:+10.1%}{doubt_text}")
        if "doubt" not in row:
            errors.append(abs(error))
            left_out_errors += [] if math.isnan(left_out) else [abs(left_out)]
    figures = [Figure("runs", len(errors), "runs")]
    if errors:
        figures += [
            Figure("median_error", statistics.median(errors), "share"),
            Figure("worst_error", max(errors), "share"),
        ]
    if left_out_errors:
        figures += [
            Figure("left_out_median_error", statistics.median(left_out_errors), "share", 0.10),
            Figure("left_out_worst_error", max(left_out_errors), "share", 0.25),
        ]
    if points := slice_points(rows, pairs):
        figures.append(Figure("second_slice_worst_points", max(points), "points of MFU", POINTS))
    return show(figures, "modeled seconds of published steps")


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
