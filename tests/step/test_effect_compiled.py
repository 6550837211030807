"""What host memory and few bits promise, read off the TPU compiler's own program; each promise fails of its control."""

import dataclasses
import functools
from collections.abc import Callable

import pytest

from jaxscale.compiler.compile import compile_report
from jaxscale.compiler.report import CompileReport
from jaxscale.models.decoder import Decoder
from jaxscale.planning.program import lowered_step
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.values import override

pytestmark = pytest.mark.slow
pytest.importorskip("libtpu")

LENGTH, LAYERS, EMBED, VOCAB = 256, 8, 256, 512
BLOCKS = LAYERS * 12 * EMBED**2 * 4
"""Bytes of the blocks' float32 weights."""


class Tokens:
    """Batches of which only the shapes are asked for."""

    def shapes(self, rows):
        return dict.fromkeys(("tokens", "targets"), ((rows, LENGTH), "int32"))


def experiment():
    model = Decoder(vocab=VOCAB, context=LENGTH, layers=LAYERS, embed=EMBED, heads=4)
    return Experiment("effect", model, Tokens(), batch=8)


@functools.cache
def report(plan: str) -> CompileReport:
    """Of the step of a plan written "field=value field=value"."""
    changes = dict(change.split("=", 1) for change in plan.split())
    recipe = functools.partial(lowered_step, make=experiment, plan=override(Plan(), changes))
    return compile_report(recipe, Platform.parse("tpu v5e:1x1"))


@dataclasses.dataclass(frozen=True)
class Row:
    """A technique, the same without it, and what it promises of its own program beside the other's."""

    plan: str
    control: str
    promise: Callable[[CompileReport, CompileReport], bool]


ROWS = {
    "optimizer_state streamed": Row(
        "optimizer_state=streamed", "", lambda f, c: f.argument_bytes <= 0.4 * c.argument_bytes
    ),
    "optimizer_state host": Row("optimizer_state=host", "", lambda f, c: f.argument_bytes <= 0.1 * c.argument_bytes),
    "weights host": Row(
        "weights=host optimizer_state=streamed",
        "optimizer_state=streamed",
        lambda f, c: total(f) <= total(c) - 0.7 * BLOCKS,
    ),
    "gradients host": Row(
        "weights=host gradients=host optimizer_state=streamed",
        "weights=host optimizer_state=streamed",
        lambda f, c: total(f) <= total(c) - 0.7 * BLOCKS,
    ),
    "memory offload": Row(
        "memory=offload:pofo:16MiB",
        "",
        lambda f, c: f.host_temp_bytes > 0 and f.temp_bytes < 0.8 * c.temp_bytes,
    ),
    "state int8": Row("state=int8", "", lambda f, c: total(f) <= total(c) - 1.3 * BLOCKS),
    "master split": Row(
        "precision=bfloat16 master=split", "precision=bfloat16", lambda f, c: total(f) <= total(c) - 0.2 * BLOCKS
    ),
    "precision": Row("precision=bfloat16", "", lambda f, c: f.temp_bytes <= 0.8 * c.temp_bytes),
}


def total(report: CompileReport) -> int:
    """Bytes of the device."""
    assert report.argument_bytes is not None
    assert report.temp_bytes is not None
    return report.argument_bytes + report.temp_bytes


@pytest.mark.parametrize("name", ROWS)
def test_what_a_technique_promises_shows_in_its_program_and_not_in_its_control(name):
    row = ROWS[name]
    found, control = report(row.plan), report(row.control)
    assert row.promise(found, control), f"{found}\nbeside\n{control}"
    assert not row.promise(control, control)
