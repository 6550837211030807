"""What each technique promises, read off the compiled program: bytes, FLOP, collectives, types.

A row has a plan, the plan without the technique, and a promise of the program of the first, given that of the second.
The promise must hold, and must fail of the second: a technique that did nothing would be found out.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import optax
import pytest

from jaxscale.compiler.collectives import Collective, collectives
from jaxscale.compiler.hlo_flop import program_flop
from jaxscale.compiler.hlo_program import HloProgram
from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryRule
from jaxscale.models import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.pipeline.plan import OPTIONS
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import OffloadPlan, Plan, StatePlan
from jaxscale.replicas.codecs import CODECS
from jaxscale.step.build import build
from jaxscale.step.compiled_checks import bytes_over
from jaxscale.values import override
from jaxscale.values.annotations import field_types
from tests.plans import grouped

TESTS = Path(__file__).parents[1]
LENGTH, ROWS = 64, 8
MODEL = Decoder(vocab=512, context=LENGTH, layers=4, heads=4, embed=64, mlp=256)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Data that tells its shapes and nothing else."""

    length: int = LENGTH

    def shapes(self, batch):
        return dict.fromkeys(("tokens", "targets"), ((batch, self.length), "int32"))


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a compiled step shows, per device."""

    temp: int
    arguments: int
    flop: int
    sent: tuple[Collective, ...]
    slow: int
    optimizer: float
    parameters: float
    text: str

    def bytes_of(self, kind: str, axis: str, dtype: str | None = None) -> int:
        """Bytes of the collectives of a kind over an axis."""
        return sum(
            one.bytes * one.count
            for one in self.sent
            if one.kind == kind and one.axes is not None and axis in one.axes and dtype in (None, one.dtype)
        )


EXPERIMENT = Experiment("effect", MODEL, Tokens(), optimizer=Optimizer(), batch=ROWS, steps=8)
LONG = dataclasses.replace(
    EXPERIMENT,
    model=dataclasses.replace(MODEL, context=1024, layers=1, vocab=64),
    data=Tokens(1024),
    batch=1,
)
"""Rows so long that scores of attention are most of what there is."""
FULLER, FULLEST = dataclasses.replace(EXPERIMENT, batch=2 * ROWS), dataclasses.replace(EXPERIMENT, batch=4 * ROWS)
"""So many rows on a device that activations are most of what there is."""
WIDE = dataclasses.replace(EXPERIMENT, model=dataclasses.replace(MODEL, vocab=8192, layers=1, embed=16, mlp=16))
"""A vocabulary so large that logits are most of what there is."""


def plan_of(text: str) -> Plan:
    """The plan written "field=value field=value"."""
    fields: dict[str, str] = {}
    for part in text.split():
        name, _, value = part.partition("=")
        fields[name] = value
    return override(Plan(), grouped(fields))


@functools.cache
def facts(plan: str, experiment: Experiment = EXPERIMENT) -> Facts:
    """Of the step of a plan written "field=value field=value", compiled."""
    step = build(experiment, plan_of(plan))
    batch = {name: np.zeros(shape, dtype) for name, (shape, dtype) in experiment.data.shapes(experiment.batch).items()}
    compiled = step.compile(batch)
    text = step.program
    assert text is not None
    sent = tuple(collectives(text, step.mesh))
    own = step.memory(batch)
    return Facts(
        temp=compiled.temp_bytes,
        arguments=sum(own.values()),
        flop=program_flop(HloProgram(text)).total,
        sent=sent,
        slow=bytes_over(sent, "replica", step.mesh.shape["replica"]),
        optimizer=own["optimizer"] / step.parameters,
        parameters=own["parameters"] / step.parameters,
        text=text,
    )


Promise = Callable[[Facts, Facts], bool]


@dataclasses.dataclass(frozen=True)
class Row:
    """A technique, the same without it, and what it promises of its own program beside the other's."""

    plan: str
    control: str
    promise: Promise
    experiment: Experiment = EXPERIMENT
    slow: bool = True


def fewer_temporaries(share: float) -> Promise:
    """At most this share of the temporary bytes."""
    return lambda found, control: found.temp <= share * control.temp


def recomputes(share: float) -> Promise:
    """At most this share of the temporary bytes, for more FLOP."""
    return lambda found, control: found.temp <= share * control.temp and found.flop > control.flop


def sends(share: float) -> Promise:
    """At most this share of the bytes between replicas, and some."""
    return lambda found, control: 0 < found.slow <= share * control.slow


def computes_in(*dtypes: str) -> Promise:
    """Each of these types is in the program."""
    return lambda found, control: all(found.text.count(f"{dtype}[") for dtype in dtypes)


PLAIN, DATA = "mesh=1 unroll=4", "mesh=data:4 unroll=4"

ROWS_OF = {
    "memory full": Row(f"{PLAIN} memory=full", PLAIN, recomputes(0.4), slow=False),
    "memory full, on four devices": Row(f"{DATA} memory=full", DATA, recomputes(0.5), FULLER),
    "memory revolve": Row(f"{PLAIN} memory=revolve:2", PLAIN, recomputes(0.45)),
    "memory revolve, on four devices": Row(f"{DATA} memory=revolve:2", DATA, recomputes(0.55)),
    "memory chain": Row(f"{PLAIN} memory=chain:1MiB", PLAIN, recomputes(0.45)),
    "memory sqrt": Row(f"{PLAIN} memory=sqrt", PLAIN, recomputes(0.75)),
    "memory periodic": Row(f"{PLAIN} memory=periodic:1", PLAIN, recomputes(0.45)),
    "memory dots": Row(f"{PLAIN} memory=dots", PLAIN, fewer_temporaries(0.8)),
    "memory save": Row(f"{PLAIN} memory=save:1MiB", PLAIN, recomputes(0.45)),
    "memory greedy": Row(f"{PLAIN} memory=greedy:1MiB", PLAIN, recomputes(0.45)),
    "memory dtr_static": Row(f"{PLAIN} memory=dtr_static:1MiB", PLAIN, recomputes(0.45)),
    "memory jax": Row(f"{PLAIN} memory=jax:nothing_saveable", PLAIN, recomputes(0.45)),
    "microbatches": Row("mesh=1 unroll=4 microbatches=8", PLAIN, fewer_temporaries(0.4)),
    "unroll": Row(PLAIN, "mesh=1", lambda f, c: f.text.count(" dot(") > 2 * c.text.count(" dot(")),
    "loss_chunk": Row("mesh=1 loss_chunk=8", "mesh=1", fewer_temporaries(0.5), WIDE),
    "attention chunked": Row("mesh=1 attention=chunked", "mesh=1 attention=plain", fewer_temporaries(0.5), LONG),
    "zero 1": Row("mesh=fsdp:4 zero=1", "mesh=fsdp:4", lambda f, c: f.optimizer < 0.27 * c.optimizer + 0.1, slow=False),
    "zero 2": Row("mesh=fsdp:4 zero=2", "mesh=fsdp:4 zero=1", lambda f, c: f.bytes_of("reduce-scatter", "fsdp") > 0),
    "zero 3": Row(
        "mesh=fsdp:4 zero=3",
        "mesh=fsdp:4 zero=2",
        lambda f, c: f.parameters < 0.3 * 4 and f.bytes_of("all-gather", "fsdp") > 0,
    ),
    "data": Row(
        "mesh=data:4", "mesh=1", lambda f, c: 3.9 * f.flop < plain_flop() and f.bytes_of("all-reduce", "data") > 0
    ),
    "tensor": Row("mesh=tensor:4", "mesh=1", lambda f, c: f.parameters < 2 and f.bytes_of("all-reduce", "tensor") > 0),
    "sequence": Row(
        "mesh=sequence:4",
        "mesh=data:4",
        lambda f, c: f.bytes_of("all-gather", "sequence") > 0 and f.flop < plain_flop() / 3,
    ),
    "sequence_parallel": Row(
        "mesh=tensor:4 sequence_parallel=True",
        "mesh=tensor:4",
        lambda f, c: f.bytes_of("reduce-scatter", "tensor") > 0,
    ),
    "precision": Row(
        "mesh=1 precision=bfloat16", "mesh=1", lambda f, c: f.text.count("bf16[") > 0.1 * f.text.count("f32[")
    ),
    "state int8": Row("mesh=1 state=int8", "mesh=1", lambda f, c: f.optimizer < 0.5 * 8),
    "state int4": Row("mesh=1 state=int4", "mesh=1 state=int8", lambda f, c: f.optimizer < 0.85 * c.optimizer),
    "state dynamic8": Row("mesh=1 state=dynamic8", "mesh=1", lambda f, c: f.optimizer < 0.5 * 8),
    "state fp8": Row("mesh=1 state=fp8", "mesh=1", lambda f, c: f.optimizer < 0.5 * 8),
    "master split": Row(
        "mesh=1 precision=bfloat16 master=split", "mesh=1 precision=bfloat16", lambda f, c: f.parameters < 2.1
    ),
    "matmul fp8": Row("mesh=1 matmul=fp8", "mesh=1", computes_in("f8e4m3fn", "f8e5m2")),
    "matmul int8": Row("mesh=1 matmul=int8", "mesh=1", computes_in("s8")),
    "matmul int4": Row("mesh=1 matmul=int4", "mesh=1 matmul=int8", computes_in("s8", "f8e5m2")),
    # a code's share of 32 bits, and a tenth for scales, vectors and what every step sums
    "reduce int8": Row("mesh=replica:2 reduce=int8", "mesh=replica:2", sends(1.1 * 8 / 32)),
    "reduce int4": Row("mesh=replica:2 reduce=int4", "mesh=replica:2", sends(1.1 * 4 / 32)),
    "reduce onebit": Row("mesh=replica:2 reduce=onebit", "mesh=replica:2", sends(1.1 * 1 / 32)),
    "reduce qsgd": Row("mesh=replica:2 reduce=qsgd:4bit", "mesh=replica:2", sends(1.1 * 4 / 32)),
    # values and places of the largest, twice their share
    "reduce topk": Row("mesh=replica:2 reduce=topk:0.01,warmup=0", "mesh=replica:2", sends(2 * 0.01)),
    "reduce dgc": Row("mesh=replica:2 reduce=dgc:0.01,warmup=0", "mesh=replica:2", sends(2 * 0.01)),
    # factors of rank 2, of matrices 64 wide and 64 to 512 long
    "reduce powersgd": Row("mesh=replica:2 reduce=powersgd:2", "mesh=replica:2", sends(2 * (1 / 64 + 1 / 64))),
    "reduce gradzip": Row("mesh=replica:2 reduce=gradzip:2", "mesh=replica:2", sends(2 * (1 / 64 + 1 / 64))),
    "diloco": Row(
        "mesh=replica:2 diloco=every=2",
        "mesh=replica:2",
        lambda f, c: f.slow < 4096,
    ),
    "pipeline": Row(
        "pipeline=1f1b:2x4",
        "mesh=data:2",
        lambda f, c: f.parameters < 0.75 * 4 and f.bytes_of("collective-permute", "pipe") > 0,
    ),
    "stash": Row("pipeline=1f1b:4x8 stash=input", "pipeline=1f1b:4x8", recomputes(0.5), FULLEST),
    "stages": Row("pipeline=1f1b:2x4 stages=1,3", "pipeline=1f1b:2x4", lambda f, c: f.parameters > 1.2 * c.parameters),
    "rules": Row("mesh=tensor:4 rules.mlp=()", "mesh=tensor:4", lambda f, c: f.parameters > 1.2 * c.parameters),
    "lowering": Row(
        "pipeline=gpipe:2x4 lowering=phased",
        "pipeline=gpipe:2x4",
        lambda f, c: f.text.count(" conditional(") < c.text.count(" conditional("),
    ),
}
ELSEWHERE = {
    "optimizer_state": 'step/test_effect_compiled.py: "optimizer_state streamed": Row(',
    "weights": 'step/test_effect_compiled.py: "weights host": Row(',
    "gradients": 'step/test_effect_compiled.py: "gradients host": Row(',
    "memory=offload": 'step/test_effect_compiled.py: "memory offload": Row(',
    "kernels": "recipe/test_kernels.py: def test_the_named_loss_reaches_the_step_and_holds_no_logits(",
    "compiler": "compiler/test_options.py: def test_the_program_depends_on_the_options(",
    "synchronous_steps": "step/test_streamed.py: def test_synchronous_steps_come_first(",
    "anneal": "pipeline/test_asynchronous.py: def test_each_remedy(",
    "correction": "pipeline/test_asynchronous.py: def test_each_remedy(",
}
"""Where the effect of other fields and rules is shown, a file and what it has: they change numbers, or need a device
whose host has a memory of its own, or kernels."""


def test_every_field_and_every_named_value_has_a_row():
    chosen = {part for row in ROWS_OF.values() for part in row.plan.split()}
    fields = {part.partition("=")[0].partition(".")[0] for part in chosen}
    groups = {"offload": {field.name for field in dataclasses.fields(OffloadPlan)}, "state": {"state", "master"}}
    groups |= {"kernels": {"kernels", "attention", "loss_chunk"}, "pipeline": {"pipeline", *OPTIONS[1:]}}
    values = {part.partition(":")[0].partition(",")[0] for part in chosen}
    named = {"memory": set(get_args(MemoryRule)) - {"none", "fit", "file"}, "reduce": set(CODECS)}
    named |= {"state": set(get_args(field_types(StatePlan)["moments"]))}
    named |= {"master": set(get_args(field_types(StatePlan)["master"]))}
    named |= {"precision": set(get_args(field_types(Plan)["precision"]))}
    wanted = {name for field in dataclasses.fields(Plan) for name in groups.get(field.name, {field.name})}
    wanted |= {f"{name}={value}" for name, of_field in named.items() for value in of_field - {"float32"}}
    assert wanted - fields - values == set(ELSEWHERE)
    for place in ELSEWHERE.values():
        file, _, line = place.partition(": ")
        assert line in (TESTS / file).read_text()


def plain_flop() -> int:
    """FLOP of the plain step on one device."""
    return facts("mesh=1").flop


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if row.slow else pytest.mark.variant if name == "zero 1" else ())
        for name, row in ROWS_OF.items()  # by default, `test_compiled_checks.py` has each stage of ZeRO
    ],
)
def test_what_a_technique_promises_shows_in_its_program_and_not_in_its_control(name):
    row = ROWS_OF[name]
    found, control = facts(row.plan, row.experiment), facts(row.control, row.experiment)
    assert row.promise(found, control), (found.temp, control.temp, found.flop, control.flop, found.optimizer)
    assert not row.promise(control, control)


@pytest.mark.parametrize(
    ("plan", "experiment", "message"),
    [
        ("mesh=1 zero=3", {}, "zero 3: ZeRO shards over the fsdp axis, but mesh 1 has none; .* or zero 0"),
        ("mesh=data:2 zero=1", {}, "add fsdp:N"),
        (
            "mesh=1 loss_chunk=64",
            {},
            "a row has 64 target positions, so one chunk would hold all of them; take less than 64",
        ),
        ("mesh=sequence:4 loss_chunk=16", {}, "64 target positions, 16 on each of 4 devices"),
        ("mesh=1 optimizer_state=streamed", {"optimizer": Optimizer("sgd")}, "sgd keeps no array that could lie"),
        (
            "pipeline=pipedream:2 synchronous_steps=8",
            {"model": dataclasses.replace(MODEL, tied=False)},
            "every step would be synchronous",
        ),
    ],
)
def test_what_would_do_nothing_is_refused_with_the_way_round(plan, experiment, message):
    with pytest.raises(UserError, match=message):
        build(dataclasses.replace(EXPERIMENT, **experiment), plan_of(plan))


def test_a_chunk_below_a_row_and_a_named_implementation_are_taken():
    for plan in ("mesh=1 loss_chunk=63", "mesh=1 loss_chunk=64 kernels=cross_entropy=chunked"):
        build(EXPERIMENT, plan_of(plan))


def test_one_device_that_nobody_named_leaves_zero_out_and_says_so():
    step = build(EXPERIMENT, Plan(zero=3), devices=jax.devices()[:1])
    assert step.plan.zero == 0
    assert any("zero 0 instead of 3, because there is one device along fsdp" in line for line in step.describe())
    assert build(EXPERIMENT, Plan(zero=3)).plan.zero == 3


def test_options_beside_a_rule_of_ones_own_are_refused():
    with pytest.raises(UserError, match=r"optimizer.b1: got 0.9 together with optimizer.custom"):
        Optimizer(b1=0.9, custom=optax.sgd)


USERS = """
import dataclasses, json, sys
import jax
jax.config.update("jax_num_cpu_devices", 1)
from jaxscale.memory.plan import MemoryPlan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.build import build
from jaxscale.state.batches import batch_shapes
from jaxscale.records.source import load_file
experiment, _ = load_file("experiments/shakespeare.py")
found = {}
for rule in sys.argv[1:]:
    plan = dataclasses.replace(experiment.plan, mesh=MeshSpec(), memory=MemoryPlan.parse(rule))
    step = build(experiment, plan)
    found[rule] = step.plan.unroll, step.compile(batch_shapes(experiment)).temp_bytes
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_default_recipe_recomputes_on_a_cpu_with_the_flags_of_a_user():
    rules = ["none", "full", "chain:2MiB", "revolve:2"]
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", USERS, *rules]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=clean)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    whole = found["none"][1]
    assert found["none"][0] == 4
    for rule in rules[1:]:
        unroll, temp = found[rule]
        assert unroll == 1
        # the gradients of one block and of the head are there whatever is kept: 21 MiB of 56
        assert temp <= 0.45 * whole, (rule, temp, whole)
