"""Experiments and plans drawn at random: each trains one step, or is refused by name before anything is compiled.

Valid ones are drawn from what the documentation allows; the others are valid ones with one thing wrong. What training
gives is tested elsewhere (`step/test_equal_training.py`): here a step must run, and its loss must be that of a model
that knows nothing.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args, get_origin

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.models.decoder import Decoder, Llama3Scaling, MlpKind
from jaxscale.optim.leaves import leaves_of
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Checkpointing, Evaluation, Experiment, Guard, Samples
from jaxscale.recipe.kernels import Kernels
from jaxscale.recipe.plan import PLAN_VERSION, OffloadPlan, Plan, StatePlan, read_plan
from jaxscale.sharding.mesh import AXES, MeshSpec
from jaxscale.sharding.rules import AxisRules
from jaxscale.step.build import build
from jaxscale.values import to_json
from jaxscale.values.annotations import alternatives, field_types

BATCH, CONTEXT = 8, 8
QUIET = {"derandomize": True, "deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}

# the run-time check of annotations draws which item of a container it checks
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")

Drawn = dict[str, dict[str, Any]]
"""Fields of each part of an experiment that is to be made."""

PARTS: dict[str, type] = {
    "mesh": MeshSpec,
    "rules": AxisRules,
    "kernels": Kernels,
    "offload": OffloadPlan,
    "state": StatePlan,
    "plan": Plan,
    "model": Decoder,
    "optimizer": Optimizer,
    "evaluation": Evaluation,
    "samples": Samples,
    "checkpoint": Checkpointing,
    "guard": Guard,
    "experiment": Experiment,
}


MEMORY = (
    *("none", "dots", "full", "jax:dots_with_no_batch_dims_saveable", "sqrt", "periodic:1", "revolve:1"),
    *("chain:1MiB", "save:1MiB", "save:12KiB:flop", "greedy:12KiB", "dtr_static:12KiB", "offload:pofo:12KiB"),
)
"""Memory plans that any model takes: these budgets hold the inputs of blocks."""


class Fed:
    """Data that tell the shapes of `batch_of` and nothing else."""

    def __init__(self, vocab: int, packed: bool) -> None:
        self.batch = batch_of(vocab, packed)

    def shapes(self, batch: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return {name: (rows.shape, rows.dtype.name) for name, rows in self.batch.items()}


def make(drawn: Drawn) -> Experiment:
    """The experiment of the fields drawn: the same calls that an experiment file makes."""
    plan = dict(drawn["plan"])
    if "mesh" in drawn:
        plan.setdefault("mesh", MeshSpec(**drawn["mesh"]))
    for part in ("rules", "kernels", "offload", "state"):
        if part in drawn:
            plan.setdefault(part, PARTS[part](**drawn[part]))
    given = {name: PARTS[name](**drawn.get(name, {})) for name in ("optimizer", "samples", "checkpoint", "guard")}
    given |= {"evaluation": Evaluation(**drawn.get("evaluation", {})), "plan": Plan(**plan), "data": Fed(16, False)}
    return Experiment(**{"name": "drawn", "model": Decoder(**drawn["model"]), **given, **drawn["experiment"]})


def sometimes(draw: Callable[..., Any], value: Any, strategy: Any) -> Any:
    """Mostly the plain value."""
    return draw(st.one_of(st.just(value), st.just(value), strategy))


@st.composite
def meshes(draw: Callable[..., Any], microbatches: int) -> dict[str, int]:
    """At most 8 devices; the rows of a microbatch divide over replica, data and fsdp."""
    sizes, left, rows = {}, 8, BATCH // microbatches
    for axis in draw(st.permutations(["data", "fsdp", "tensor", "sequence", "replica"])):
        room = left if axis in ("tensor", "sequence") else min(left, rows)
        size = draw(st.sampled_from([n for n in (1, 2, 4) if n <= room]))
        left //= size
        rows //= 1 if axis in ("tensor", "sequence") else size
        if size > 1:
            sizes[axis] = size
    return sizes


@st.composite
def models(draw: Callable[..., Any], tensor: int) -> dict[str, Any]:
    """Tiny decoders whose heads and mlp divide by `tensor`."""
    bools = st.booleans()
    heads = draw(st.sampled_from([n for n in (2, 4) if n % tensor == 0]))
    norm = draw(st.sampled_from(["rms", "layer", "layer_no_bias"]))
    positions = draw(st.sampled_from(["rotary", "learned", "none"]))
    layers = draw(st.integers(1, 2))
    scaling = Llama3Scaling(original_context=4) if positions == "rotary" and draw(bools) else None
    caps = st.sampled_from([None, 5.0, 30.0])
    return {
        "vocab": draw(st.integers(16, 18)),
        "context": CONTEXT,
        "layers": layers,
        "embed": draw(st.sampled_from([8, 16])),
        "heads": heads,
        "kv_heads": draw(st.sampled_from([None, *(n for n in (1, 2, 4) if heads % n == 0 and n % tensor == 0)])),
        "head_dim": draw(st.sampled_from([None, 4, 8])),
        "mlp": draw(st.sampled_from([None, 8, 12])),
        "norm": norm,
        "norm_plus_one": norm == "rms" and draw(bools),
        "post_norms": draw(bools),
        "mlp_kind": draw(st.sampled_from(get_args(MlpKind))),
        "positions": positions,
        "rotary_scaling": scaling,
        "tied": draw(bools),
        "attention_bias": draw(bools),
        "mlp_bias": draw(bools),
        "qk_norm": draw(bools),
        "attention_soft_cap": draw(caps),
        "final_soft_cap": draw(caps),
        "windows": tuple(draw(st.lists(st.sampled_from([None, 1, 3, 8]), min_size=1, max_size=layers))),
        "embedding_scale": draw(bools),
        "attention_scale": draw(st.sampled_from([None, 0.5])),
        "dropout": draw(st.sampled_from([0.0, 0.3])),
        "z_loss": draw(st.sampled_from([0.0, 1e-3])),
        "scaled_init": draw(bools),
    }


@st.composite
def valid(draw: Callable[..., Any]) -> Drawn:
    """What trains."""
    microbatches = draw(st.sampled_from([1, 1, 2, 4]))
    mesh = draw(st.one_of(st.none(), meshes(microbatches), meshes(microbatches), meshes(microbatches)))
    sizes = mesh or {}
    tensor, sequence = sizes.get("tensor", 1), sizes.get("sequence", 1)
    model = draw(models(tensor))
    shards = sizes.get("fsdp", 1) > 1 or mesh is None
    precision = draw(st.sampled_from(["float32", "bfloat16"]))
    optimizer = draw(st.sampled_from(["adamw", "sgd", "lion", "adafactor"]))
    momentum = draw(st.sampled_from([0.0, 0.9]))
    stateless = optimizer == "adafactor" or (optimizer == "sgd" and momentum == 0)
    stages = [0, *([] if stateless and precision == "float32" else [1]), 2, 3] if shards else [0]
    cycles = model["layers"] // len(model["windows"])
    memory = draw(st.sampled_from(MEMORY))
    rolls = memory in ("none", "dots", "full") or memory.startswith("jax:")
    plan = {
        "zero": draw(st.sampled_from(stages)),
        "sequence_parallel": tensor > 1 and CONTEXT % (tensor * sequence) == 0 and draw(st.booleans()),
        "microbatches": microbatches,
        "precision": precision,
        "reduce": draw(st.sampled_from([None, "float32", precision])),
        "memory": MemoryPlan.parse(memory),
        "unroll": 2 if rolls and len(model["windows"]) == 1 and cycles == 2 and draw(st.booleans()) else 1,
    }
    attention = draw(st.sampled_from([None, "plain", "chunked"]))
    chunk = draw(st.sampled_from([None, *(chunk for chunk in (1, 3) if chunk < CONTEXT // sequence)]))
    drawn = {
        "plan": plan,
        "kernels": {"named": () if attention is None else (("attention", attention),), "loss_chunk": chunk},
        "model": model,
        "optimizer": {
            "name": optimizer,
            "momentum": momentum if optimizer == "sgd" else None,
            "schedule": draw(st.sampled_from(["cosine", "linear", "constant"])),
            "warmup": draw(st.sampled_from([0, 3])),
            "decay": draw(st.sampled_from(["matrices", "all"])),
            "clip": draw(st.sampled_from([None, 1.0])),
        },
        "experiment": {"steps": 4, "batch": BATCH, "seed": draw(st.integers(0, 2**31 - 1))},
    }
    return drawn if mesh is None else {**drawn, "mesh": mesh}


def batch_of(vocab: int, packed: bool) -> dict[str, np.ndarray]:
    """Rows of random tokens; if packed, of two documents and some padding."""
    random = np.random.default_rng(0)
    tokens, targets = (random.integers(0, vocab, (BATCH, CONTEXT), np.int32) for _ in range(2))
    batch = {"tokens": tokens, "targets": targets}
    if packed:
        row = np.array([1, 1, 1, 2, 2, 2, 2, 0], np.int32)
        batch["segments"] = np.tile(row, (BATCH, 1))
        batch["positions"] = np.tile(np.array([0, 1, 2, 0, 1, 2, 3, 0], np.int32), (BATCH, 1))
        batch["weights"] = (batch["segments"] > 0).astype(np.float32)
        batch["weights"][:, 2] = 0
    return batch


def trains_one_step(drawn: Drawn, packed: bool) -> None:
    """Build, compile and run a step, and look at what it says of itself."""
    vocab = drawn["model"]["vocab"]
    step = build(dataclasses.replace(make(drawn), data=Fed(vocab, packed)))
    batch = batch_of(vocab, packed)
    state, placed = step.init(), step.place(batch)
    step.compile(placed)
    state, metrics = step(state, placed)
    found = {name: value.item() for name, value in metrics.items()}
    assert found["weight"] == (BATCH * 6 if packed else BATCH * CONTEXT)
    assert (found["skipped"], int(state.step)) == (0, 1)
    assert math.isfinite(found["grad_norm"])
    assert found["grad_norm"] > 0
    # logits of a new model are near 0; a scaled embedding that is tied to the head makes them a little larger
    assert abs(found["loss"] - math.log(vocab)) < 0.25, found


@pytest.mark.parametrize("draws", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_a_valid_draw_trains_one_step(draws: int) -> None:
    test = given(valid(), st.booleans())(trains_one_step)
    seed(draws)(settings(max_examples=draws, phases=[Phase.generate], **QUIET)(test))()


# What is wrong -----------------------------------------------------------------------------------------------------

WRONG: dict[str, dict[str, list[Any]]] = {
    "experiment": {
        "name": ["", "a/b", ".."],
        "steps": [0, -1, 2**31],
        "batch": [0, -8, 2**31],
        "seed": [-1, 2**31],
    },
    "evaluation": {"every": [-1], "batches": [0, -2]},
    "samples": {"every": [-1], "tokens": [0], "temperature": [-0.1, math.inf, math.nan], "prompts": [("",), ("a", "")]},
    "checkpoint": {"every": [-1], "minutes": [-1.0, math.inf], "keep": [0, -1]},
    "guard": {"spike": [-1.0, math.nan], "warmup": [-1], "update": [-1.0, math.inf], "patience": [0]},
    "optimizer": {
        "name": ["adam", "SGD"],
        "learning_rate": [0.0, -1e-3, math.inf, math.nan],
        "final_learning_rate": [-1.0, math.inf],
        "warmup": [-1],
        "schedule": ["cosin"],
        "b1": [1.0, -0.1],
        "b2": [1.5],
        "eps": [-1e-8, math.inf],
        "momentum": [-0.5, 0.9, math.inf],
        "trust": [0.02],
        "rank": [0, 4],
        "weight_decay": [-0.1, math.inf],
        "decay": ["none"],
        "clip": [0.0, -1.0],
    },
    "plan": {
        "zero": [4, -1],
        "microbatches": [0, -1, 3, 16],
        "precision": ["bf16", "float16"],
        "matmul": ["best"],
        "reduce": ["float16"],
        "unroll": [0, -2],
    },
    "kernels": {
        "loss_chunk": [0, -1],
        "named": [(("attention", "splash"),), (("attention", "flash"),), (("atention", "plain"),)],
        "default": ["best"],
    },
    "offload": {"weights": ["disk"], "gradients": ["pinned"], "optimizer_state": ["stream"]},
    "state": {"moments": ["int2"], "master": ["bfloat16"]},
    "mesh": {axis: [0, -1, 16] for axis in AXES} | {"pipe": [2], "expert": [2]},
    "rules": {
        "heads": [("tensr",), ("tensor", "tensor")],
        "embed": [("x",)],
        "batch": [("data", "data")],
    },
    "model": {
        "vocab": [0, -1],
        "context": [0],
        "layers": [0],
        "embed": [0, -8],
        "heads": [0, 3],
        "kv_heads": [0, 3],
        "head_dim": [0, -4],
        "mlp": [0],
        "norm": ["rmsnorm"],
        "norm_eps": [0.0, -1.0, math.inf],
        "mlp_kind": ["swish"],
        "positions": ["alibi"],
        "rotary_base": [0.0, -1.0],
        "attention_soft_cap": [0.0, -1.0],
        "final_soft_cap": [0.0],
        "windows": [(), (0,), (None, None, None)],
        "attention_scale": [0.0, -1.0],
        "dropout": [1.0, -0.1, math.nan],
        "z_loss": [-1.0, math.inf],
        "init_std": [0.0, math.nan],
    },
}
"""Values of the right type that no run can take."""


def other_types(hint: Any) -> list[Any]:
    """Values that are not of a declared type; empty where anything is."""
    allowed = alternatives(hint)
    if any(member is Any or getattr(member, "_is_protocol", False) for member in allowed):
        return []
    kinds = {get_origin(member) or member for member in allowed}
    options = [option for member in allowed if get_origin(member) is Literal for option in get_args(member)]
    plain: list[tuple[type, Any]] = [(int, 7), (float, 1.5), (bool, True), (str, "seven"), (tuple, (1.5,)), (dict, {})]
    wrong = [value for kind, value in plain if kind not in kinds and value not in options]
    if float in kinds:
        wrong.remove(7)
    return wrong if type(None) in kinds else [*wrong, None]


FIELDS = [
    (part, name, values)
    for part, kind in PARTS.items()
    for name, hint in field_types(kind).items()
    if (values := other_types(hint)) and (part, name) != ("plan", "mesh")
]


@st.composite
def bad_field(draw: Callable[..., Any]) -> tuple[str, str, Any]:
    """A field out of range, or of a wrong type."""
    if draw(st.booleans()):
        part = draw(st.sampled_from(sorted(WRONG)))
        name = draw(st.sampled_from(sorted(WRONG[part])))
        return part, name, draw(st.sampled_from(WRONG[part][name]))
    part, name, values = draw(st.sampled_from(FIELDS))
    return part, name, draw(st.sampled_from(values))


COMBINATIONS: list[dict[str, dict[str, Any]]] = [
    {"mesh": {"data": 16}},
    {"mesh": {"data": 3}},
    {"mesh": {"fsdp": 2}, "experiment": {"batch": 7}},
    {"experiment": {"batch": 9}, "plan": {"microbatches": 2}},
    {"mesh": {"data": 4, "fsdp": 4}},
    {"mesh": {"data": 2}, "plan": {"microbatches": 8}},
    {"mesh": {"tensor": 8}},
    {"mesh": {"tensor": 4}, "model": {"heads": 4, "kv_heads": 2}},
    {"mesh": {"tensor": 2}, "model": {"heads": 2, "kv_heads": None, "mlp": 9}},
    {"mesh": {"sequence": 3}},
    {"mesh": {"sequence": 4, "tensor": 2}, "model": {"context": 12}, "plan": {"sequence_parallel": True}},
    {"mesh": {"pipe": 2}},
    {"mesh": {"expert": 4}},
    {"mesh": {"data": 2}, "plan": {"zero": 1}},
    {"mesh": {"tensor": 2}, "plan": {"zero": 3}},
    {"mesh": {"data": 4}, "plan": {"sequence_parallel": True}},
    {"mesh": {"tensor": 2}, "model": {"context": 9}, "plan": {"sequence_parallel": True}},
    {"mesh": {"data": 2}, "rules": {"batch": ()}},
    {"mesh": {"data": 2}, "rules": {"batch": ("tensor",)}},
    {"mesh": {"fsdp": 2}, "plan": {"zero": 1, "precision": "float32"}, "optimizer": {"name": "sgd", "momentum": 0.0}},
    {"plan": {"precision": "float32", "reduce": "bfloat16"}},
    {"model": {"embed": 8, "heads": 3, "head_dim": None}},
    {"model": {"heads": 4, "kv_heads": 3}},
    {"model": {"heads": 2, "head_dim": 3, "positions": "rotary"}},
    {"model": {"positions": "learned", "rotary_scaling": Llama3Scaling()}},
    {"model": {"norm": "layer", "norm_plus_one": True}},
    {"model": {"layers": 1, "windows": (None, 4)}},
]
"""Fields that are right one by one, and do not go together on 8 devices and 8 rows."""


@st.composite
def invalid(draw: Callable[..., Any]) -> Drawn:
    """A valid draw with one thing wrong."""
    drawn = {part: dict(fields) for part, fields in draw(valid()).items()}
    if draw(st.integers(0, 2)) == 0:
        changes = draw(st.sampled_from(COMBINATIONS))
        drawn |= {"mesh": {}} if "mesh" in changes else {}
        drawn["plan"] |= {"zero": 0, "sequence_parallel": False, "microbatches": 1, "unroll": 1}
        drawn["model"] |= {"heads": 2, "kv_heads": None, "head_dim": None, "windows": (None,), "rotary_scaling": None}
    else:
        part, name, value = draw(bad_field())
        changes = {part: {name: value}}
    for part, fields in changes.items():
        drawn.setdefault(part, {}).update(fields)
    return drawn


@pytest.fixture(scope="module", autouse=True)
def constants() -> None:
    """Optax makes its zeros eagerly: once in a process, whatever is refused after it."""
    for name in get_args(field_types(Optimizer)["name"]):
        params = {"x": np.zeros(1, np.float32)}
        Optimizer(name=name).build(4, leaves_of(params)).init(params)


@contextlib.contextmanager
def nothing_compiles() -> Iterator[None]:
    """Fails if XLA is asked to compile anything inside."""
    compiled = []

    def listen(name: str, *_: Any, **__: Any) -> None:
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


def is_refused(drawn: Drawn) -> None:
    """One error of ours, in one line, and nothing compiled for it."""
    with nothing_compiles(), pytest.raises(UserError) as refusal:
        build(make(drawn))
    message = str(refusal.value)
    assert message
    assert "\n" not in message
    assert "Traceback" not in message
    assert "jax." not in message


@settings(max_examples=200, phases=[Phase.generate], **QUIET)
@given(invalid())
def test_an_invalid_draw_is_refused(drawn: Drawn) -> None:
    is_refused(drawn)


@pytest.mark.parametrize("changes", COMBINATIONS, ids=str)
def test_each_combination_is_refused(changes: Drawn) -> None:
    model = {"vocab": 17, "context": CONTEXT, "layers": 2, "embed": 8, "heads": 2}
    drawn: Drawn = {"plan": {}, "model": model, "experiment": {"batch": BATCH}}
    make(drawn)
    for part, fields in changes.items():
        drawn[part] = {**drawn.get(part, {}), **fields}
    is_refused(drawn)


@pytest.mark.parametrize("part", WRONG)
def test_each_value_out_of_range_is_refused(part: str) -> None:
    model = {"vocab": 17, "context": CONTEXT, "layers": 2, "embed": 8, "heads": 2}
    for name, values in WRONG[part].items():
        for value in values:
            drawn: Drawn = {"plan": {}, "model": model, "experiment": {"batch": BATCH}}
            is_refused({**drawn, part: {**drawn.get(part, {}), name: value}})


@settings(max_examples=150, phases=[Phase.generate], **QUIET)
@given(valid(), st.data())
def test_a_plan_file_is_read_back_or_refused(tmp_path_factory: Any, drawn: Drawn, data: Any) -> None:
    plan = make(drawn).plan
    path = tmp_path_factory.getbasetemp() / "plan.json"
    content = {"version": PLAN_VERSION, **json.loads(json.dumps(to_json(plan)))}
    path.write_text(json.dumps(content))
    assert read_plan(path) == plan
    name = data.draw(st.sampled_from(sorted(content)))
    change = data.draw(st.sampled_from(["rename", "type", "cut"]))
    if change == "rename":
        content[name + "x"] = content.pop(name)
    elif change == "type":
        newer = [PLAN_VERSION + 90] * (name == "version")  # which is a number of microbatches elsewhere
        content[name] = data.draw(st.sampled_from([3.25, "seven", [[]], {"zzz": 1}, -1, *newer]))
    text = json.dumps(content)
    path.write_text(text[: data.draw(st.integers(0, len(text) - 1))] if change == "cut" else text)
    with pytest.raises(UserError) as refusal:
        read_plan(path)
    assert str(path) in str(refusal.value)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_many_draws(part: int) -> None:
    """500 in all: each is drawn right or wrong, and trains or is refused accordingly."""

    def either(drawn: Drawn, broken: Drawn, packed: bool, right: bool) -> None:
        if right:
            trains_one_step(drawn, packed)
        else:
            is_refused(broken)

    test = given(valid(), invalid(), st.booleans(), st.booleans())(either)
    seed(10 + part)(settings(max_examples=125, phases=[Phase.generate], **QUIET)(test))()
