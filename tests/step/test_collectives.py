"""The documentation's table of what crosses the wires is what the compiled programs hold."""

import collections
import re
from pathlib import Path

import numpy as np
import pytest

from jaxscale.compiler.collectives import collectives
from jaxscale.models.decoder import Decoder
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.build import build
from tests.tiers import variants

PAGE = Path(__file__).parents[2] / "docs" / "choosing" / "wires.md"
EXPERIMENT = Experiment(
    name="collectives", model=Decoder(vocab=64, context=16, layers=3, embed=32, heads=4, mlp=48), data=None, batch=8
)
BATCH = {name: np.zeros((8, 16), np.int32) for name in ("tokens", "targets")}


def in_blocks(jitted, step):
    """How many collectives of each kind and axes one block runs: those in the loops over layers."""
    text = jitted.lower(step.layout.abstract, step.abstract_batch(BATCH)).compile().as_text()
    found = collections.Counter()
    for c in collectives(text, step.mesh):
        if c.in_loop:
            found[f"{c.kind} {'+'.join(c.axes or ('?',))}"] += 1
    return found


def words(counter):
    return ", ".join(f"{n} {kind}" for kind, n in sorted(counter.items())) or "none"


def rows():
    """(options, forward, backward) of each row of the page's table."""
    section = PAGE.read_text()
    return [
        tuple(cell.strip().strip("`") for cell in line.split("|")[1:4])
        for line in section.splitlines()
        if "--plan" in line
    ]


def plan_of(options):
    fields = dict(re.findall(r"--plan\.([\w-]+) (\S+)", options))
    return Plan(
        mesh=MeshSpec.parse(fields["mesh"]),
        zero=int(fields.get("zero", 0)),
        sequence_parallel="sequence-parallel" in options,
    )


DEFAULT = ("--plan.mesh fsdp:4 --plan.zero 3", "--plan.mesh tensor:4 --plan.sequence-parallel True")
"""Rows that are compiled by default: one of shards, one of a tensor axis."""


@pytest.mark.parametrize(
    "row", variants([pytest.param(row, id=row[0]) for row in rows()], [row for row in rows() if row[0] in DEFAULT])
)
def test_the_table_is_what_the_programs_hold(row):
    options, forward, backward = row
    step = build(EXPERIMENT, plan_of(options))
    ahead = in_blocks(step.evaluate_fn, step)
    both = in_blocks(step.step_fn, step)
    assert (words(ahead), words(both - ahead)) == (forward, backward)


def test_the_table_has_every_layout_and_zero_1_is_not_zero_2():
    table = {row[0]: row[1:] for row in rows()}
    assert len(table) == 8
    one, two = (next(cells for options, cells in table.items() if f"zero {z}" in options) for z in (1, 2))
    assert one != two


def test_weights_that_tensor_splits_too_are_gathered_and_scattered_over_fsdp_alone():
    """An MLP's matrices are larger along the dim that tensor splits; XLA gathers a dim that both split over both."""
    model = Decoder(vocab=64, context=16, layers=3, embed=32, heads=4, mlp=256)
    experiment = Experiment(name="collectives", model=model, data=None, batch=8)
    step = build(experiment, Plan(mesh="data:2,fsdp:2,tensor:2", zero=3, sequence_parallel=True))
    kinds_and_axes = set(in_blocks(step.step_fn, step))
    assert {"all-gather fsdp", "reduce-scatter fsdp", "all-reduce data"} <= kinds_and_axes
    assert not {each for each in kinds_and_axes if "fsdp+tensor" in each or "all-to-all" in each}


if __name__ == "__main__":
    for options, *_ in rows():
        step = build(EXPERIMENT, plan_of(options))
        ahead = in_blocks(step.evaluate_fn, step)
        print(f"| `{options}` | {words(ahead)} | {words(in_blocks(step.step_fn, step) - ahead)} |")
