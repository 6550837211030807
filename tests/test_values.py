"""Values and their text: round trips over drawn values, and every refusal by its message."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxscale import values
from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.platforms.compiler_options import CompilerOptions
from jaxscale.recipe.kernels import Kernels
from jaxscale.recipe.plan import OffloadPlan, Plan, StatePlan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.sharding.rules import AxisRules
from jaxscale.values import check_types, difference, from_json, override, to_json

PLAN = Plan()


@runtime_checkable
class Builds(Protocol):
    def build(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Rope:
    base: float = 10000.0
    factor: int | None = None

    def __post_init__(self) -> None:
        check_types(self)


@dataclasses.dataclass(frozen=True)
class Net:
    embed: int = 8
    kind: Literal["llama", "gpt2"] = "llama"
    rope: Rope | None = Rope()

    def __post_init__(self) -> None:
        check_types(self)
        if self.embed % 4:
            raise UserError(f"embed: got {self.embed}, expected a multiple of 4")

    def build(self) -> int:
        return self.embed


@dataclasses.dataclass(frozen=True)
class Job:
    name: str
    model: Builds
    data: Any = None
    path: Path | None = None
    sizes: tuple[int, ...] = (1, 2)
    pair: tuple[int, str] = (1, "a")
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    either: Rope | Net = Rope()
    act: Callable[..., Any] | None = None
    on: bool = False
    plan: Plan = PLAN

    def __post_init__(self) -> None:
        check_types(self)


@dataclasses.dataclass(frozen=True)
class Holder:
    model: Any = None


ropes = st.builds(Rope, base=st.floats(allow_nan=False), factor=st.none() | st.integers())
nets = st.builds(
    Net,
    embed=st.integers(1, 10**6).map(lambda n: 4 * n),
    kind=st.sampled_from(["llama", "gpt2"]),
    rope=st.none() | ropes,
)
meshes = st.none() | st.builds(MeshSpec, fsdp=st.integers(2, 8), data=st.integers(1, 8))
plans = st.builds(
    Plan,
    mesh=meshes,
    zero=st.sampled_from([0, 1, 2, 3]),
    microbatches=st.integers(1, 9),
    memory=st.sampled_from(["none", "dots", "full"]).map(MemoryPlan),
    offload=st.builds(OffloadPlan, optimizer_state=st.sampled_from(["device", "streamed", "host"])),
    state=st.builds(StatePlan, st.sampled_from(["float32", "int8", "fp8"])),
    kernels=st.builds(Kernels, loss_chunk=st.none() | st.integers(1, 100)),
    compiler=st.sampled_from(["default", "overlap", "vmem,xla_a=1,2,xla_b=true"]).map(CompilerOptions.parse),
    rules=st.builds(AxisRules, seq=st.sampled_from([(), ("sequence",), ("sequence", "tensor")])),
)
jobs = st.fixed_dictionaries(
    {
        "name": st.text(),
        "model": nets,
        "data": st.none() | ropes | st.booleans() | st.integers() | st.text(),
        "path": st.none() | st.sampled_from([Path("a/b"), Path("/c")]),
        "sizes": st.lists(st.integers()).map(tuple),
        "pair": st.tuples(st.integers(), st.text()),
        "weights": st.dictionaries(st.sampled_from(["a", "b", "c d"]), st.floats(allow_nan=False), max_size=3),
        "either": ropes | nets,
        "on": st.booleans(),
        "plan": plans,
    }
)


@given(jobs)
def test_json_round_trip(drawn: dict[str, Any]):
    job = Job(**drawn)
    text = json.dumps(to_json(job), allow_nan=False)
    assert from_json(Job, json.loads(text)) == job


@settings(max_examples=25)
@given(plans)
def test_missing_fields_take_their_defaults(plan: Plan):
    data = to_json(plan)
    for name in list(data):
        without = {key: item for key, item in data.items() if key != name}
        if name == "mesh" or (plan.mesh is None and name != "reduce"):
            default = next(f.default for f in dataclasses.fields(Plan) if f.name == name)
            assert from_json(Plan, without) == dataclasses.replace(plan, **{name: default})


def leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    """An independent walk: every field, by dotted path."""
    found = {}
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner) and not isinstance(inner, MeshSpec | MemoryPlan | Kernels | CompilerOptions):
            found |= leaves(inner, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = inner
    return found


@given(jobs)
def test_paths_are_every_leaf_and_every_optional_record(drawn: dict[str, Any]):
    job = Job(**drawn)
    optional = {"model.rope"} | ({"either.rope"} if isinstance(job.either, Net) else set())
    assert set(values.paths(job)) == set(leaves(job)) | optional


def spelled(value: Any) -> str:
    """How a user would write it."""
    return json.dumps(value) if isinstance(value, tuple | dict) else str(value)


@given(jobs, jobs, st.data())
def test_override_by_text_equals_replace_by_value(drawn: dict[str, Any], others: dict[str, Any], data: st.DataObject):
    """What is set by path and text is what a hand-written `dataclasses.replace` with another value's fields gives."""
    job, other = Job(**drawn), Job(**others)
    there = leaves(
        dataclasses.replace(other, data=job.data, model=dataclasses.replace(other.model, rope=job.model.rope))
    )
    there = {
        path: item for path, item in there.items() if path.partition(".")[0] not in ("either", "act", "data", "plan")
    }
    chosen = data.draw(st.sets(st.sampled_from(sorted(there))))
    changed = override(job, {path: spelled(there[path]) for path in chosen})
    assert leaves(changed) == leaves(job) | {path: there[path] for path in chosen}


@given(plans)
def test_every_field_of_a_plan_has_a_text(plan: Plan):
    base = Plan()
    changes = {path: spelled(item) for path, item in leaves(plan).items()}
    assert override(base, changes) == plan


def test_changes_of_one_value_are_made_together():
    assert override(Plan(), {"sequence_parallel": "true", "mesh": "tensor:2"}).sequence_parallel
    with pytest.raises(UserError, match="sequence_parallel True: sequences are sharded over the tensor axis"):
        override(Plan(), {"sequence_parallel": "true", "mesh": "fsdp:2"})


def test_hyphens_numbers_and_none():
    job = Job("a", Net())
    assert override(job, {"model.rope.base": "5e5"}).model.rope.base == 5e5
    assert override(job, {"plan.microbatches": "1e2"}).plan.microbatches == 100
    assert override(job, {"plan.offload.optimizer-state": "host"}).plan.offload.optimizer_state == "host"
    assert override(job, {"model.rope": "none"}).model.rope is None
    assert override(job, {"plan.rules.seq": "sequence, tensor"}).plan.rules.seq == ("sequence", "tensor")
    assert override(job, {"plan.rules.seq": ""}).plan.rules.seq == ()
    assert override(Holder(7), {"model": "8"}).model == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.embd": "16"}, "unknown field 'model.embd'; did you mean 'model.embed'?"),
        ({"embed": "16"}, "unknown field 'embed'; did you mean 'model.embed'?"),
        ({"modle.embed": "16"}, "unknown field 'modle.embed'; did you mean 'model.embed'?"),
        ({"plan.zeor": "3"}, "did you mean 'plan.zero'?"),
        ({"zeor": "3"}, "did you mean 'plan.zero'?"),
        ({"model.embed": "big"}, "model.embed: got 'big', expected a whole number"),
        ({"model.embed": "16.5"}, "model.embed: got '16.5', expected a whole number"),
        ({"model.embed": "6"}, "model.embed: got 6, expected a multiple of 4"),
        ({"model.kind": "lama"}, "model.kind: got 'lama', expected llama or gpt2; did you mean 'llama'?"),
        ({"model.rope.factor": "x"}, "model.rope.factor: got 'x', expected a whole number, or none"),
        ({"model.rope.base": "nan"}, "model.rope.base: got 'nan', expected a number"),
        ({"plan.zero": "7"}, "plan.zero: got '7', expected 0 or 1 or 2 or 3"),
        ({"plan.mesh": "fsdb:4"}, "plan.mesh: unknown mesh axis 'fsdb'"),
        ({"plan.memory": "ful"}, "did you mean 'full'?"),
        ({"plan.reduce": "bfloat"}, "did you mean 'bfloat16'?"),
        ({"plan.microbatches": "0"}, "plan.microbatches: got 0, expected a whole number >= 1"),
        ({"plan": "x"}, "plan consists of fields: set one of plan.mesh, plan.zero"),
        ({"on": "maybe"}, "on: got 'maybe', expected true or false"),
        ({"on": "ture"}, "did you mean 'true'?"),
        ({"sizes": "1,x"}, "sizes[1]: got 'x', expected a whole number"),
        ({"sizes": "[1"}, "sizes: got '[1', which is not JSON"),
        ({"pair": "1"}, "pair: got '1', expected a list (a whole number, text)"),
        ({"act": "relu"}, "act: got 'relu'"),
        ({"model.rope": "none", "model.rope.base": "1"}, "are both given"),
        ({"model.rope.base": "1", "model.rope": "none"}, "are both given"),
        ({"": "1"}, "unknown field ''"),
    ],
)
def test_refused_overrides(changes, message):
    with pytest.raises(UserError) as error:
        override(Job("a", Net()), changes)
    assert message in str(error.value)


def test_a_whole_number_may_be_longer_than_any_float():
    assert override(Job("a", Net()), {"sizes": "1" + "0" * 400}).sizes == (10**400,)


def test_nothing_inside_none():
    with pytest.raises(UserError, match=r"model\.rope is none,"):
        override(Job("a", Net(rope=None)), {"model.rope.base": "1"})


@given(st.dictionaries(st.text(max_size=12), st.text(max_size=12), min_size=1, max_size=3))
def test_no_override_gives_anything_but_a_value_or_a_user_error(changes):
    with contextlib.suppress(UserError):
        assert isinstance(override(Job("a", Net()), changes), Job)


@given(st.sampled_from(sorted(leaves(Job("a", Net())))), st.text(max_size=12))
def test_no_text_gives_anything_but_a_value_or_a_user_error(path, text):
    with contextlib.suppress(UserError):
        assert isinstance(override(Job("a", Net()), {path: text}), Job)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"zeor": 3}, "plan.json: unknown field 'zeor'"),
        ({"zeor": 3}, "did you mean 'zero'?"),
        ({"zero": "3"}, "plan.json: zero: got '3', expected 0 or 1 or 2 or 3; did you mean '3'?"),
        ({"zero": True}, "plan.json: zero: got True"),
        ({"microbatches": 2.0}, "plan.json: microbatches: got 2.0, expected a whole number"),
        ({"mesh": 4}, "plan.json: mesh: got 4, expected a MeshSpec"),
        ({"mesh": "fsdp"}, "plan.json: mesh: mesh 'fsdp'"),
        ({"precision": "bfloat"}, "precision: got 'bfloat', expected float32 or bfloat16; did you mean 'bfloat16'?"),
        ({"rules": {"seq": "tensor"}}, "plan.json: rules.seq: got 'tensor', expected a list"),
        ({"rules": {"seq": ["tensr"]}}, "plan.json: rules: unknown mesh axis for seq 'tensr'"),
        ({"rules": {"sec": []}}, "plan.json: unknown field 'rules.sec'"),
        ([], "plan.json: value: got [] (list), expected a Plan"),
    ],
)
def test_refused_json(data, message):
    with pytest.raises(UserError) as error:
        from_json(Plan, data, "plan.json")
    assert message in str(error.value)


def test_missing_field_without_default():
    with pytest.raises(UserError, match=r"e\.json: name is missing, and has no default"):
        from_json(Job, {"model": to_json(Holder(Net()))["model"]}, "e.json")


def test_open_fields_name_their_class():
    data = to_json(Job("a", Net(), data=Rope(), either=Net()))
    for name in ("model", "data", "either"):
        assert data[name]["type"].startswith(f"{__name__}:")
    assert "type" not in data["plan"]
    with pytest.raises(UserError, match=r"model\.type: got 'nowhere:Net', expected MODULE:CLASS"):
        from_json(Job, {"name": "a", "model": {"type": "nowhere:Net"}})


def test_code_goes_to_json_one_way():
    data = to_json(Job("a", Net(), act=json.loads))
    assert data["act"] == {"callable": "json:loads"}
    assert values.has_code(data)
    assert not values.has_code(to_json(Job("a", Net())))
    with pytest.raises(UserError, match="act: json:loads is code"):
        from_json(Job, data)
    assert to_json(Holder(Net)) == {"model": {"callable": f"{__name__}:Net"}}
    assert to_json(Holder(object())) == {"model": {"object": "builtins:object"}}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rope(base="x"), "base: got 'x', expected a number"),
        (lambda: Rope(base=True), "base: got True, expected a number"),
        (lambda: Rope(base=float("nan")), "base: got nan, expected a number"),
        (lambda: Rope(factor=1.5), "factor: got 1.5, expected a whole number, or none"),
        (lambda: Rope(factor=False), "factor: got False"),
        (lambda: Net(kind="lama"), "kind: got 'lama', expected llama or gpt2; did you mean 'llama'?"),
        (lambda: Job("a", 3), "model: got 3, expected a Builds"),
        (lambda: Job("a", Net), "model: got the class Net, expected a Builds"),
        (lambda: Job(1, Net()), "name: got 1, expected text"),
        (lambda: Job("a", Net(), sizes=[1]), "sizes: got [1] (list), expected a list"),
        (lambda: Job("a", Net(), sizes=(1, "2")), "sizes[1]: got '2', expected a whole number"),
        (lambda: Job("a", Net(), pair=(1,)), "pair: got (1,) (tuple)"),
        (lambda: Job("a", Net(), path="x"), "path: got 'x', expected a path, or none"),
        (lambda: Job("a", Net(), weights={"a": "b"}), "weights.a: got 'b', expected a number"),
        (lambda: Job("a", Net(), plan=Net()), "plan: got Net("),
        (lambda: Job("a", Net(), act=3), "act: got 3, expected a function, or none"),
        (lambda: Job("a", Net(), on=1), "on: got 1, expected true or false"),
    ],
)
def test_check_types(make, message):
    with pytest.raises(UserError) as error:
        make()
    assert message in str(error.value)


def test_int_passes_for_float():
    assert Rope(base=3).base == 3


def test_a_string_that_reads_like_what_lacks_is_a_difference_of_its_own():
    (found,) = difference({"data": None}, {"data": "absent"})
    assert found.second == "absent"
    (found,) = difference({"data": None}, {})
    assert found.second is values.ABSENT
    assert str(found) == "data (None here, absent there)"


@given(jobs, jobs)
def test_difference_is_empty_only_for_equals_and_names_what_differs(drawn: dict[str, Any], others: dict[str, Any]):
    a, b = Job(**drawn), Job(**others)
    found = difference(to_json(a), to_json(b))
    if found:
        assert json.dumps(to_json(a)) != json.dumps(to_json(b))
    mended = json.loads(json.dumps(to_json(a)))
    for path, _, there in found:
        assume(path.count(".") <= 2)  # a key of `weights` may hold dots
        *parents, leaf = path.split(".")
        level = mended
        for parent in parents:
            assume(parent in level)
            level = level[parent]
        if there is values.ABSENT:
            level.pop(leaf)
        else:
            level[leaf] = there
    assert mended == to_json(b)


def test_difference_reads_well():
    found = difference({"a": 1, "b": {"c": True, "d": [1]}}, {"b": {"c": 1, "d": [1]}, "e": None})
    assert [str(one) for one in found] == [
        "a (1 here, absent there)",
        "b.c (True here, 1 there)",
        "e (absent here, None there)",
    ]


def test_read_json(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        values.read_json(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_bytes(b'{"zero": ')
    with pytest.raises(UserError, match="is not JSON"):
        values.read_json(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not JSON"):
        values.read_json(tmp_path / "plan.json")
