"""Bytes that plans send over each mesh axis: closed form beside compiled train steps.

    python experiments/benchmarks/wire_plans.py             # for 8 chips of v5e and 8 H100; needs the extras aot
    python experiments/benchmarks/wire_plans.py --platform "gpu h100 x 8"
    python experiments/benchmarks/wire_plans.py --tiny      # two plans on virtual CPU devices
    python experiments/benchmarks/wire_plans.py --plan pipe # plans with this word in their text, item by item

A decoder of 4 blocks (width 512, 2048 words, 256 positions), 32 rows, bfloat16. Bytes are those of whole arrays, times
executions, by the collectives' kind and axes; small sums (below 2 % of a step's bytes together) are left out. A plan
counts as right if the bytes of each kind and axes are within 2 %.

A compiled pipeline lists its collectives in branches of the loop over ticks, as if every branch ran in every tick. So
counts in the loop are scaled to the ticks in which they run: those of messages to the ticks in which any rank sends
one, and all others to one pass of each kind for each microbatch.
"""

import argparse
import collections
import dataclasses
from collections.abc import Mapping

from figures import Figure, show

import jaxscale as jx
from jaxscale.compiler.collectives import Collective
from jaxscale.compiler.compile import compile_report
from jaxscale.pipeline.ticks import ticks
from jaxscale.planning.program import described_step, step_recipe
from jaxscale.planning.search.pipeline_traffic import message_ticks
from jaxscale.planning.search.traffic import sizes_of, transfers
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.memory_resolve import traced_blocks

PLATFORMS = ("tpu v5e:2x4", "gpu h100 x 8")
TOLERANCE = 0.02
MODEL = jx.models.Decoder(vocab=2048, context=256, layers=4, embed=512, heads=8, mlp=2048)
EXPERIMENT = jx.Experiment("wire", MODEL, jx.data.Text("text.txt", context=256), batch=32)
PLANS: Mapping[str, Mapping[str, object]] = {
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
TINY = ("fsdp:8, zero 2, 2 microbatches", "data:2, pipeline 1f1b:4x8")
Bytes = dict[tuple[str, str], float]
"""Bytes by the kind and the axes of collectives."""


def plan_of(name: str, platform: Platform) -> Plan:
    """Return a plan of the table; XLA:CPU sums nothing in bfloat16, so its plans are float32."""
    precision = "float32" if platform.chip.kind == "cpu" else "bfloat16"
    return Plan(**({"precision": precision} | dict(PLANS[name])))  # type: ignore[arg-type]


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
        return sum(message_ticks(plan.pipeline)) / 2 / tick_count
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
    experiment, names, platforms = EXPERIMENT, list(PLANS), [arguments.platform] if arguments.platform else PLATFORMS
    if arguments.tiny:
        model = jx.models.Decoder(vocab=512, context=64, layers=4, embed=64, heads=8, mlp=256)
        experiment = jx.Experiment("small", model, jx.data.Text("text.txt", context=64), batch=32)
        names, platforms = list(TINY), ["cpu x 8"]
    names = [name for name in names if not arguments.plan or arguments.plan in name]
    figures = []
    for platform_text in platforms:
        platform, right_count = Platform.parse(platform_text), 0
        errors = []
        print(f"{platform_text}\n{'plan':40}{'modeled':>12}{'compiled':>12}  largest difference")
        for name in names:
            plan = plan_of(name, platform)
            model, program = (of(plan, experiment, platform) for of in (modeled, compiled))
            error, place = difference(model, program)
            errors.append(abs(sum(model.values()) / sum(program.values()) - 1))
            right_count += abs(error) <= TOLERANCE
            print(
                f"{name:40}{sum(model.values()):12,.0f}{sum(program.values()):12,.0f}  {error:+.1%} {place}",
                flush=True,
            )
            if arguments.plan:
                for key in sorted({*model, *program}):
                    print(f"    {' over '.join(key):44}{model.get(key, 0):14,.0f}{program.get(key, 0):14,.0f}")
        label = platform.chip.kind
        figures += [
            Figure(f"{label}_plans", len(names), "plans"),
            Figure(f"{label}_plans_within_2_percent", right_count, "plans", 12 if len(names) > 12 else None, ">="),
            Figure(f"{label}_worst_error_of_a_step", max(errors), "share"),
        ]
    return show(figures, "bytes of collectives, by plan")


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
