"""What goes together with a pipeline, and why the rest does not: the README's table, made by building each pair."""

import dataclasses
import re
from pathlib import Path

import pytest
from flax import nnx

from jaxscale.errors import UserError
from jaxscale.models import ForeignModel, ResNet, classification
from jaxscale.models.decoder import Decoder
from jaxscale.step.build import build
from jaxscale.step.experiment import Experiment
from jaxscale.step.plan import Plan
from jaxscale.values import override

README = Path(__file__).parents[2] / "README.md"


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Shapes of batches."""

    def shapes(self, rows):
        return dict.fromkeys(("tokens", "targets"), ((rows, 8), "int32"))


DECODER = Decoder(vocab=12, context=8, layers=4, embed=8, heads=2)

GOES = {
    "`mesh` data, replica": [{"mesh": "data:2"}, {"mesh": "replica:2"}],
    "`mesh` fsdp with `zero` 1, 2, 3": [{"mesh": "fsdp:2", "zero": str(stage)} for stage in (1, 2, 3)],
    "`mesh` tensor, with and without `sequence_parallel`": [
        {"mesh": "tensor:2"},
        {"mesh": "tensor:2", "sequence_parallel": "true"},
    ],
    "`mesh` sequence": [{"mesh": "sequence:2"}],
    "`precision`, `reduce`, `matmul`": [
        {"precision": "bfloat16"},
        {"precision": "bfloat16", "reduce": "bfloat16"},
        {"matmul": "highest"},
    ],
    "`memory`, every rule": [
        {"memory": rule}
        for rule in (
            "dots",
            "full",
            "jax:dots_saveable",
            "sqrt",
            "periodic:2",
            "revolve:1",
            "chain:20KiB",
            "save:20KiB",
        )
    ]
    + [{"memory": rule} for rule in ("greedy:20KiB", "dtr_static:20KiB", "offload:pofo:20KiB", "offload:vdnn:20KiB")],
    "`stash`, `stages`, `unroll`": [{"stash": "input"}, {"stages": "3,1"}, {"unroll": "2"}],
    "`optimizer_state` streamed, host": [{"optimizer_state": "streamed"}, {"optimizer_state": "host"}],
    "`loss_chunk`, `attention`": [{"loss_chunk": "4"}, {"attention": "chunked"}],
}
REFUSED = {
    "`weights` host": {"weights": "host"},
    "`gradients` host": {"weights": "host", "gradients": "host"},
    "another `microbatches`": {"microbatches": "2"},
    "a `mesh` with another pipe axis": {"mesh": "pipe:4"},
}
MODELS = {
    "a model without a `Stack` (ResNet)": ResNet(classes=10, channels=1, stages=(1, 1), width=8, stem="small"),
    "a Flax model that is not ours": ForeignModel(lambda rngs: nnx.Linear(2, 3, rngs=rngs), classification()),
}


def outcome(changes, model=DECODER):
    """What building says: "" where it goes."""
    try:
        build(Experiment("pairs", model, Tokens(), batch=16), override(Plan(), {"pipeline": "1f1b:2x4", **changes}))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "label", [pytest.param(label, marks=[pytest.mark.slow] * (len(pairs) > 3)) for label, pairs in GOES.items()]
)
def test_it_goes(label):
    assert [outcome(changes) for changes in GOES[label]] == [""] * len(GOES[label])
    assert f"| {label} | yes |" in README.read_text()


@pytest.mark.parametrize("label", [*REFUSED, *MODELS])
def test_it_is_refused_for_the_reason_that_the_readme_gives(label):
    given = re.search(rf"\| {re.escape(label)} \| no: (.*) \|", README.read_text())
    assert given is not None, label
    said = outcome(REFUSED[label]) if label in REFUSED else outcome({}, MODELS[label])
    assert given[1] in said
