"""Models and forms that a pipeline takes or refuses: the page's table. `test_composition.py` has the techniques."""

import dataclasses
import re
from pathlib import Path

import pytest
from flax import nnx
from unlike_blocks import Unlike

from jaxscale.errors import UserError
from jaxscale.models import ForeignModel, ResNet, classification
from jaxscale.models.decoder import Decoder
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.simulate import simulate
from jaxscale.pipeline.schedules import METHODS
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.step.build import build
from jaxscale.values import override
from tests.plans import grouped

PAGE = Path(__file__).parents[2] / "docs" / "choosing" / "pipelines.md"


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Shapes of batches."""

    def shapes(self, rows):
        return dict.fromkeys(("tokens", "targets"), ((rows, 8), "int32"))


DECODER = Decoder(vocab=12, context=8, layers=4, embed=8, heads=2)

REFUSED = {
    "`gradients` host": (
        {"weights": "host", "gradients": "host"},
        "gradients on the host are not summed over a pipeline's microbatches",
    ),
    "another `microbatches`": ({"microbatches": "2"}, "a pipeline specifies by itself how many"),
    "a `mesh` with another pipe axis": ({"mesh": "pipe:4"}, "leave pipe out of the mesh"),
}
OTHERS = {
    "batch norm (ResNet)": (
        ResNet(classes=10, channels=1, stages=(1, 1), width=8, stem="small"),
        {},
        "this model holds running statistics",
    ),
    "a Flax model that is not ours": (
        ForeignModel(lambda rngs: nnx.Linear(2, 3, rngs=rngs), classification()),
        {},
        "this model has no blocks to cut into stages",
    ),
    "a `Chain` of unlike blocks with `stash` input": (Unlike(), {"stash": "input"}, ""),
    "a `Chain` with `mesh` data, replica, fsdp and `zero` 1, 2": (
        Unlike(),
        {"stash": "input", "mesh": "fsdp:2", "zero": "2"},
        "",
    ),
    "a `Chain` with `stash` residuals": (Unlike(), {}, "residuals have other shapes in each stage"),
    "a `Chain` with `mesh` tensor, sequence": (
        Unlike(),
        {"stash": "input", "mesh": "tensor:2"},
        "a stage's weights form one flat array",
    ),
    "a `Chain` with `zero` 3": (
        Unlike(),
        {"stash": "input", "mesh": "fsdp:2", "zero": "3"},
        "a stage's weights form one flat array",
    ),
    "a `Chain` with a `memory` rule that looks at all blocks": (
        Unlike(),
        {"stash": "input", "memory": "sqrt"},
        "the rule looks at all blocks in sequence",
    ),
}


def table() -> str:
    """The page's."""
    refused = [(label, reason) for label, (_, reason) in REFUSED.items()]
    refused += [(label, reason) for label, (_, _, reason) in OTHERS.items()]
    rows = [f"| {label} | {f'no: {reason}' if reason else 'yes'} |" for label, reason in refused]
    return "\n".join(["| with `--plan.pipeline` | goes |", "|---|---|", *rows])


def outcome(changes, model=DECODER):
    """What building says: "" where it goes."""
    try:
        build(
            Experiment("pairs", model, Tokens(), batch=16),
            override(Plan(), grouped({"pipeline": "1f1b:2x4", **changes})),
        )
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("label", REFUSED)
def test_it_is_refused_for_the_reason_that_the_page_gives(label):
    changes, reason = REFUSED[label]
    assert reason in outcome(changes)


@pytest.mark.parametrize("label", OTHERS)
def test_other_models(label):
    model, changes, reason = OTHERS[label]
    said = outcome(changes, model)
    assert reason in said
    assert bool(reason) == bool(said)


def test_the_page_has_this_table():
    assert f"\n{table()}\n" in PAGE.read_text(), f"make it this:\n{table()}"


def test_the_page_has_the_simulators_figures():
    """Every schedule that it compares, and every synchronous one compared."""
    rows = re.findall(
        r"^\| \[`([\w-]+)`\]\([^)]*\)(?:, v=(\d))?[^|]*\| ([\d.]+) \| ([\d.]+) % \| ([\d.]+) \| ([\d.]+) \|$",
        PAGE.read_text(),
        re.M,
    )
    for name, chunks, *told in rows:
        schedule = METHODS[name].schedule(8, 32, int(chunks) if chunks else None)
        costs = Costs.alike(schedule)
        found, apart = simulate(schedule, costs), simulate(schedule, costs, "dataflow")
        figures = [found.seconds, round(100 * found.bubble, 1), max(found.live_shares), apart.seconds]
        assert [float(word) for word in told] == figures, name
    assert {name for name, *_ in rows} == {name for name, method in METHODS.items() if not method.steps} - {"search"}


if __name__ == "__main__":
    print(table())
