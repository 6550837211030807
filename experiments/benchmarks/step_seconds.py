"""Modeled seconds of train steps beside published ones.

    python experiments/benchmarks/step_seconds.py             # all rows of published_steps.json
    python experiments/benchmarks/step_seconds.py --tiny      # the first row
    python experiments/benchmarks/step_seconds.py --compile   # compile the rows of TPUs; needs the extra aot-tpu

Each row is a run that its authors published: MaxText on TPUs and GPUs, torchtitan on GPUs. A row marked "doubt"
differs from its script in what the row states, and counts apart. Two errors are shown: that of the model as it ships,
whose efficiencies of v4, v5e and v5p were fitted to 11 other tables of MaxText; and leave one out, where the row's
seconds are multiplied by the one number (the median ratio) that the other rows of its chip and software give.

With --compile, the rows of TPUs without a doubt are compiled, and their seconds by libtpu's schedule stand beside the
published ones: the cycles that it estimates, kernels by their declared FLOP, and collectives by their bytes.
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
from jaxscale.planning.program import step_recipe
from jaxscale.planning.search.compiler_seconds import compiler_seconds
from jaxscale.planning.search.step_seconds import StepSeconds, modeled_seconds

ROWS = Path(__file__).with_name("published_steps.json")


def experiment_of(row: dict[str, Any]) -> tuple[jx.Experiment, jx.Plan]:
    """Return the experiment and the plan of a published run."""
    model = jx.models.Decoder(context=row["context"], **row["model"])
    experiment = jx.Experiment(row["name"], model, jx.data.Text("text.txt", context=row["context"]), batch=row["batch"])
    mesh = jx.MeshSpec.parse(row["mesh"])
    plan = jx.Plan(
        mesh=mesh,
        zero=row["zero"],
        precision=row["precision"],
        memory=row["memory"],
        sequence_parallel=mesh.tensor > 1,
    )
    return experiment, plan


def modeled(row: dict[str, Any]) -> float:
    """Return the modeled seconds of a step of a published run."""
    experiment, plan = experiment_of(row)
    return modeled_seconds(experiment, jx.Platform.parse(row["platform"]), plan).total


def compiled(row: dict[str, Any]) -> StepSeconds | None:
    """Compile a step of a published run, and return its seconds by the compiler's schedule."""
    experiment, plan = experiment_of(row)
    platform = jx.Platform.parse(row["platform"])
    report = compile_report(step_recipe(experiment, plan, None), platform)
    print(f"{row['name']}: {report}")
    return compiler_seconds(report.schedule, plan, platform)


def show_compiled(rows: list[dict[str, Any]]) -> bool:
    """Print the seconds of published runs by the compiler's schedule, and return whether each row has them."""
    figures = []
    for row in rows:
        if "doubt" in row or not row["platform"].startswith("tpu"):
            continue
        seconds, published = compiled(row), published_seconds(row)
        if seconds is None:
            print(f"{row['name']}: no seconds")
            return False
        print(f"{row['name']}: published {published:.2f} s, by the compiler's clock {seconds}")
        figures.append(Figure(f"{row['name'].replace(' ', '_')}_error", seconds.total / published - 1, "share"))
    return show(figures, "published steps by the compiler's clock")


def published_seconds(row: dict[str, Any]) -> float:
    """Return the seconds of a step from the published MFU or tokens per second."""
    platform, model, published = jx.Platform.parse(row["platform"]), row["model"], row["published"]
    tokens = row["batch"] * row["context"]
    if "tokens_per_second_per_chip" in published:
        return tokens / (published["tokens_per_second_per_chip"] * platform.chips * platform.slices)
    embed, width = model["embed"], model["head_dim"]
    attention_weights = embed * width * 2 * (model["heads"] + model["kv_heads"])
    weights = model["layers"] * (attention_weights + 3 * embed * model["mlp"]) + model["vocab"] * embed
    scores_flop = 12 * model["layers"] * model["heads"] * width * row["context"]  # not halved for causality
    peak = platform.peak("bfloat16")
    assert peak is not None
    return (6 * weights + scores_flop) * tokens / (published["mfu_full_attention"] * peak)


def main() -> bool:
    """Print the table, and return whether every figure reaches its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the first row alone")
    parser.add_argument("--compile", action="store_true", help="compile the rows of TPUs, for their compiler's clock")
    arguments = parser.parse_args()
    rows = json.loads(ROWS.read_text())["rows"]
    if arguments.tiny:
        rows = rows[:1]
    if arguments.compile:
        return show_compiled(rows)
    pairs = [(modeled(row), published_seconds(row)) for row in rows]
    stacks = [(jx.Platform.parse(row["platform"]).chip.name, row["source"].split(",")[0]) for row in rows]
    errors, left_out_errors = [], []
    print(f"{'run':26}{'published':>10}{'modeled':>10}{'error':>9}{'left out':>10}")
    for index, (row, (model, published)) in enumerate(zip(rows, pairs, strict=True)):
        others = [
            pairs[other][1] / pairs[other][0]
            for other, stack in enumerate(stacks)
            if stack == stacks[index] and other != index
        ]
        error = model / published - 1
        left_out = model * statistics.median(others) / published - 1 if others else math.nan
        doubt_text = "  doubt: " + row["doubt"] if "doubt" in row else ""
        print(f"{row['name']:26}{published:9.2f}s{model:9.2f}s{error:+9.1%}{left_out:+10.1%}{doubt_text}")
        if "doubt" not in row:
            errors.append(abs(error))
            left_out_errors += [] if math.isnan(left_out) else [abs(left_out)]
    figures = [
        Figure("median_error", statistics.median(errors), "share"),
        Figure("worst_error", max(errors), "share"),
    ]
    if left_out_errors:
        figures += [
            Figure("left_out_median_error", statistics.median(left_out_errors), "share", 0.10),
            Figure("left_out_worst_error", max(left_out_errors), "share", 0.25),
        ]
    return show(figures, "modeled seconds of published steps")


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
