"""Bytes that plans send over each mesh axis: closed form beside compiled train steps.

    python experiments/benchmarks/wire_plans.py             # for 8 chips of v5e and 8 H100; needs the extras aot
    python experiments/benchmarks/wire_plans.py --platform "gpu h100 x 8"
    python experiments/benchmarks/wire_plans.py --tiny      # two plans on virtual CPU devices
    python experiments/benchmarks/wire_plans.py --plan pipe # plans with this word in their text, item by item

Decoders of 3 to 8 blocks, in bfloat16. The formulas were read from the programs of five of them, with 2,048 to 50,000
words. The plans of two further models are held out, and drawn by a seed: no formula was changed after they had been
compiled. Bytes are those of whole arrays, times executions, by the
collectives' kind and axes; small sums (below 2 % of a step's bytes together) are left out. A plan counts as right if
the bytes of each kind and axes are within 2 %.

A compiled pipeline lists its collectives in branches of the loop over ticks, as if every branch ran in every tick. So
counts in the loop are scaled to the ticks in which they run: those of messages to the ticks in which any rank sends
one, and all others to one pass of each kind for each microbatch.
"""

import argparse
import collections
import dataclasses
import random
import statistics
from collections.abc import Mapping
from typing import Any

from figures import Figure, show

import jaxscale as jx
from jaxscale.compiler.collectives import Collective
from jaxscale.compiler.compile import compile_report
from jaxscale.pipeline.ticks import ticks
from jaxscale.planning.program import described_step, step_recipe
from jaxscale.planning.search.pipeline_traffic import message_tick_counts
from jaxscale.planning.search.traffic import sizes_of, transfers
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.memory_resolve import traced_blocks

PLATFORMS = ("tpu v5e:2x4", "gpu h100 x 8")
TOLERANCE = 0.02
Decoder = jx.models.Decoder
MODELS: Mapping[str, jx.models.Decoder] = {
    "narrow": Decoder(vocab=2048, context=256, layers=4, embed=512, heads=8, mlp=2048),
    "tied": Decoder(vocab=16384, context=256, layers=4, embed=512, heads=8, mlp=2048, tied=True),
    "wide": Decoder(vocab=32000, context=512, layers=6, embed=768, heads=12, kv_heads=4, mlp=1536),
    "learned": Decoder(
        vocab=24000, context=256, layers=6, embed=384, heads=6, mlp=1536, tied=True, positions="learned"
    ),
    "grouped": Decoder(vocab=50000, context=512, layers=4, embed=1024, heads=16, kv_heads=4, mlp=2560),
    "deep": Decoder(vocab=40960, context=512, layers=8, embed=640, heads=10, kv_heads=2, mlp=1792, tied=True),
    "broad": Decoder(vocab=12288, context=256, layers=4, embed=768, heads=12, mlp=3072, mlp_kind="gelu_tanh"),
}
BATCH = {"narrow": 32, "tied": 32, "wide": 16, "learned": 32, "grouped": 32, "deep": 16, "broad": 32}
HELD_OUT = ("deep", "broad")
SEEDS = {"deep": 20261201, "broad": 20261202}
DRAWN_COUNT = 12
"""Plans drawn for each model that is held out."""
PLANS: Mapping[str, Mapping[str, Any]] = {  # of the narrow model
    "fsdp:8": {"mesh": "fsdp:8"},
    "fsdp:8, zero 1, 2 microbatches": {"mesh": "fsdp:8", "zero": 1, "microbatches": 2},
    "fsdp:8, zero 2, 2 microbatches": {"mesh": "fsdp:8", "zero": 2, "microbatches": 2},
    "fsdp:8, zero 2, float32": {"mesh": "fsdp:8", "zero": 2, "precision": "float32"},
    "fsdp:8, zero 3": {"mesh": "fsdp:8", "zero": 3},
    "fsdp:8, zero 3, full, 2 microbatches": {"mesh": "fsdp:8", "zero": 3, "microbatches": 2, "memory": "full"},
    "data:2,fsdp:4, zero 1, 2 microbatches": {"mesh": "data:2,fsdp:4", "zero": 1, "microbatches": 2},
    "data:2,fsdp:4, zero 2, 2 microbatches": {"mesh": "data:2,fsdp:4", "zero": 2, "microbatches": 2},
    "data:2,fsdp:4, zero 3": {"mesh": "data:2,fsdp:4", "zero": 3},
    "replica:2,fsdp:4, zero 3": {"mesh": "replica:2,fsdp:4", "zero": 3},
    "data:2,tensor:4": {"mesh": "data:2,tensor:4"},
    "data:2,tensor:4, full, 2 microbatches": {"mesh": "data:2,tensor:4", "microbatches": 2, "memory": "full"},
    "data:2,tensor:4, sequence parallel": {"mesh": "data:2,tensor:4", "sequence_parallel": True},
    "fsdp:2,tensor:4, zero 3, s. p.": {"mesh": "fsdp:2,tensor:4", "zero": 3, "sequence_parallel": True},
    "fsdp:2,tensor:4, zero 3, s. p., full": {
        "mesh": "fsdp:2,tensor:4", "zero": 3, "sequence_parallel": True, "memory": "full",
    },
    "fsdp:2,sequence:4, zero 3": {"mesh": "fsdp:2,sequence:4", "zero": 3},
    "data:2,sequence:4, full": {"mesh": "data:2,sequence:4", "memory": "full"},
    "data:2,sequence:2,tensor:2": {"mesh": "data:2,sequence:2,tensor:2"},
    "data:2, pipeline 1f1b:4x8": {"mesh": "data:2", "pipeline": "1f1b:4x8"},
    "data:4, pipeline interleaved:2x4": {"mesh": "data:4", "pipeline": "interleaved:2x4,v=2"},
    "fsdp:4, zero 1, pipeline 1f1b:2x4": {"mesh": "fsdp:4", "zero": 1, "pipeline": "1f1b:2x4"},
    "fsdp:4, zero 3, pipeline 1f1b:2x4": {"mesh": "fsdp:4", "zero": 3, "pipeline": "1f1b:2x4"},
}  # fmt: skip
TABLE_PLANS: Mapping[str, Mapping[str, Any]] = {
    "fsdp:8, zero 3": {"mesh": "fsdp:8", "zero": 3},
    "fsdp:8, zero 2, 2 microbatches": {"mesh": "fsdp:8", "zero": 2, "microbatches": 2},
    "fsdp:8, zero 1": {"mesh": "fsdp:8", "zero": 1},
    "data:2,tensor:4": {"mesh": "data:2,tensor:4"},
    "fsdp:4,tensor:2, zero 3, s. p.": {"mesh": "fsdp:4,tensor:2", "zero": 3, "sequence_parallel": True},
    "data:2,fsdp:4, zero 3": {"mesh": "data:2,fsdp:4", "zero": 3},
    "data:8": {"mesh": "data:8"},
    "fsdp:4,sequence:2, zero 3": {"mesh": "fsdp:4,sequence:2", "zero": 3},
}
LATER_PLANS: Mapping[str, Mapping[str, Any]] = {
    "data:4,fsdp:2, zero 2, 4 microbatches": {"mesh": "data:4,fsdp:2", "zero": 2, "microbatches": 4},
    "fsdp:8, zero 3, full": {"mesh": "fsdp:8", "zero": 3, "memory": "full"},
    "data:2,fsdp:2,tensor:2, zero 3, s. p.": {"mesh": "data:2,fsdp:2,tensor:2", "zero": 3, "sequence_parallel": True},
    "replica:2,data:2,fsdp:2, zero 2": {"mesh": "replica:2,data:2,fsdp:2", "zero": 2},
    "data:2,fsdp:4, zero 1, 2 microbatches": {"mesh": "data:2,fsdp:4", "zero": 1, "microbatches": 2},
    "data:4,sequence:2": {"mesh": "data:4,sequence:2"},
    "data:2,fsdp:2, zero 2, pipeline 1f1b:2x4": {"mesh": "data:2,fsdp:2", "zero": 2, "pipeline": "1f1b:2x4"},
    "data:4,tensor:2, s. p., full": {"mesh": "data:4,tensor:2", "sequence_parallel": True, "memory": "full"},
    "fsdp:4,tensor:2, zero 2, 2 microbatches": {"mesh": "fsdp:4,tensor:2", "zero": 2, "microbatches": 2},
    "fsdp:2,sequence:2,tensor:2, zero 3": {"mesh": "fsdp:2,sequence:2,tensor:2", "zero": 3},
}
MESHES = (
    "data:8", "fsdp:8", "data:2,fsdp:4", "data:4,fsdp:2", "data:4,tensor:2", "data:2,tensor:4", "fsdp:4,tensor:2",
    "data:2,fsdp:2,tensor:2", "fsdp:4,sequence:2", "data:4,sequence:2", "data:2,fsdp:2,sequence:2",
    "fsdp:2,sequence:2,tensor:2", "replica:2,fsdp:4",
)  # fmt: skip
PIPELINED_MESHES = ("data:4", "fsdp:4", "data:2,fsdp:2")
TINY = ("fsdp:8, zero 2, 2 microbatches", "data:2, pipeline 1f1b:4x8")
Bytes = dict[tuple[str, str], float]
"""Bytes by the kind and the axes of collectives."""


def plan_of(fields: Mapping[str, Any], platform: Platform) -> Plan:
    """Return a plan of the tables; XLA:CPU sums nothing in bfloat16, so its plans are float32."""
    precision = "float32" if platform.chip.kind == "cpu" else "bfloat16"
    return dataclasses.replace(Plan(precision=precision), **fields)


def drawn_plans(seed: int) -> dict[str, dict[str, Any]]:
    """Draw plans for 8 devices: a mesh, a pipeline of two ranks in one of four, and what the mesh allows; by text."""
    generator = random.Random(seed)
    plans: dict[str, dict[str, Any]] = {}
    while len(plans) < DRAWN_COUNT:
        has_pipeline = generator.random() < 0.25
        axes = generator.choice(PIPELINED_MESHES if has_pipeline else MESHES)
        fields: dict[str, Any] = {"mesh": axes, "memory": generator.choice(("none", "full"))}
        if "fsdp" in axes:
            fields["zero"] = generator.choice((1, 2, 3))
        if has_pipeline:
            fields["pipeline"] = generator.choice(("1f1b:2x4", "gpipe:2x4", "zb-h1:2x4"))
        else:
            fields["microbatches"] = generator.choice((1, 2))
        if "tensor" in axes and "sequence" not in axes:
            fields["sequence_parallel"] = generator.choice((False, True))
        values = [f"{name.replace('_', ' ')} {value}" for name, value in fields.items() if name != "mesh"]
        plans[", ".join([axes, *values])] = fields
    return plans


def cases() -> list[tuple[str, str, Mapping[str, Any]]]:
    """Return the cases: name of the model, text of the plan, and its fields."""
    plans_by_model = {"narrow": PLANS, "tied": TABLE_PLANS, "wide": TABLE_PLANS}
    plans_by_model |= dict.fromkeys(("learned", "grouped"), LATER_PLANS)
    plans_by_model |= {model: drawn_plans(seed) for model, seed in SEEDS.items()}
    return [(model, text, fields) for model, plans in plans_by_model.items() for text, fields in plans.items()]


def experiment_of(name: str) -> jx.Experiment:
    """Return the experiment of a model's name; "small" is that of --tiny."""
    model = MODELS.get(name) or Decoder(vocab=512, context=64, layers=4, embed=64, heads=8, mlp=256)
    data = jx.data.Text("text.txt", context=model.context)
    return jx.Experiment("wire", model, data, batch=BATCH.get(name, 32))


def modeled(plan: Plan, experiment: jx.Experiment, platform: Platform) -> Bytes:
    """Return the modeled bytes by kind and axes."""
    assert plan.mesh is not None
    ranks, pipeline_microbatches = (1, plan.microbatches) if plan.pipeline is None else plan.pipeline.shape()
    split = MeshSpec(tensor=plan.mesh.tensor, sequence=plan.mesh.sequence)
    alone = Plan(mesh=split, precision=plan.precision, sequence_parallel=plan.sequence_parallel)
    one_row = dataclasses.replace(experiment, batch=1)
    step = described_step(one_row, platform, alone, split.devices)
    sizes = sizes_of(step, traced_blocks(step.objective))
    sizes = dataclasses.replace(sizes, block_weights=sizes.block_weights // ranks, layers=sizes.layers // ranks)
    rows = experiment.batch // plan.mesh.batch_shards // pipeline_microbatches
    recomputed = float(plan.memory.rule == "full")
    nbytes: Bytes = collections.defaultdict(float)
    for each in transfers(plan, sizes, rows, recomputed=recomputed, chip=platform.chip.kind):
        nbytes[each.kind, "+".join(each.axes)] += each.nbytes * each.count
    return nbytes


def compiled(plan: Plan, experiment: jx.Experiment, platform: Platform) -> Bytes:
    """Return the bytes of the compiled step by kind and axes."""
    report = compile_report(step_recipe(experiment, plan, None), platform)
    if report.crashed:
        raise SystemExit(f"{plan}: {report.crashed}")
    nbytes: Bytes = collections.defaultdict(float)
    for each in report.collectives or ():
        axes = "other groups" if each.axes is None else "+".join(each.axes)
        nbytes[each.kind, axes] += each.bytes * each.count * _executed_share(each, plan)
    return nbytes


def _executed_share(collective: Collective, plan: Plan) -> float:
    """Return the share of the listed executions that happen: less than 1 in the loop over a pipeline's ticks."""
    if plan.pipeline is None or not collective.in_loop:
        return 1.0
    schedule = plan.pipeline.schedule()
    tick_count = 1 + max(ticks(schedule).values())
    if collective.axes == ("pipe",):
        return sum(message_tick_counts(plan.pipeline)) / 2 / tick_count
    return schedule.microbatches * schedule.chunks / tick_count


def difference(model: Bytes, program: Bytes) -> tuple[float, str]:
    """Return the largest relative difference of any kind and axes, and where it is; small sums do not count."""
    total = sum(program.values())
    large_keys = [key for key in {*model, *program} if max(model.get(key, 0), program.get(key, 0)) > TOLERANCE * total]
    errors = {key: model.get(key, 0) / program[key] - 1 if program.get(key) else 1.0 for key in large_keys}
    worst = max(errors, key=lambda key: abs(errors[key]))
    return errors[worst], " over ".join(worst)


def main() -> bool:
    """Print the table, and return whether every figure reaches its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="two plans of a small model on virtual CPU devices")
    parser.add_argument("--platform", help="one platform, such as 'tpu v5e:2x4'")
    parser.add_argument("--plan", help="a word in the text of the plans to compare; prints all kinds and axes")
    arguments = parser.parse_args()
    rows, platforms = cases(), [arguments.platform] if arguments.platform else PLATFORMS
    if arguments.tiny:
        rows, platforms = [("small", text, PLANS[text]) for text in TINY], ["cpu x 8"]
    rows = [row for row in rows if not arguments.plan or arguments.plan in row[1]]
    figures = []
    for platform_text in platforms:
        platform = Platform.parse(platform_text)
        errors: dict[bool, list[tuple[float, float]]] = {False: [], True: []}  # by whether held out: largest, of a step
        print(f"{platform_text}\n{'model':9}{'plan':76}{'modeled':>14}{'compiled':>15}  largest difference")
        for name, text, fields in rows:
            plan, experiment = plan_of(fields, platform), experiment_of(name)
            model, program = (of(plan, experiment, platform) for of in (modeled, compiled))
            error, place = difference(model, program)
            model_sum, program_sum = sum(model.values()), sum(program.values())
            errors[name in HELD_OUT].append((abs(error), abs(model_sum / program_sum - 1)))
            print(f"{name:9}{text:76}{model_sum:14,.0f}{program_sum:15,.0f}  {error:+.1%} {place}", flush=True)
            if arguments.plan:
                for key in sorted({*model, *program}):
                    print(f"    {' over '.join(key):47}{model.get(key, 0):14,.0f}{program.get(key, 0):15,.0f}")
        for is_held_out, pairs in errors.items():
            if pairs:
                label = f"{platform.chip.kind}_held_out" if is_held_out else platform.chip.kind
                right_count = sum(largest <= TOLERANCE for largest, _ in pairs)
                bar = 12 if len(pairs) > 12 and not is_held_out else None
                figures += [
                    Figure(f"{label}_plans", len(pairs), "plans"),
                    Figure(f"{label}_plans_within_2_percent", right_count, "plans", bar, ">="),
                    Figure(f"{label}_median_error_of_a_step", statistics.median(e for _, e in pairs), "share"),
                    Figure(f"{label}_worst_error_of_a_step", max(e for _, e in pairs), "share"),
                ]
    return show(figures, "bytes of collectives, by plan")


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
