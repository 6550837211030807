"""Who is alive at the peak, from what XLA:CPU dumps in this process; test_compile_tpu and _gpu have theirs."""

import jax
import jax.numpy as jnp
import pytest

from jaxscale.compiler.live import MOMENTS, live_at_the_peak
from jaxscale.compiler.live_names import clean_name, phase_of
from tests.kept_programs import kept


@pytest.fixture(autouse=True)
def _lines_of_the_code():
    """Programs have the lines that their instructions come from, as outside of the tests."""
    frames = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 100)
    yield
    jax.config.update("jax_traceback_in_locations_limit", frames)


def dumped(folder, fn, *shapes, donate=()):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    with kept(folder.with_name(f"{folder.name}_programs")):  # a program that is loaded leaves no dump
        compiled = jax.jit(fn, donate_argnums=donate).lower(*arguments).compile(compiler_options=options)
    memory = compiled.memory_analysis()
    live = live_at_the_peak(folder, "cpu")
    assert live is not None
    total = (
        memory.temp_size_in_bytes
        + memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
    return live, total


def loss(weights, x):
    def layer(x, w):
        with jax.named_scope("mlp"):
            return jnp.tanh(x @ w), None

    with jax.named_scope("layers"):
        x = jax.lax.scan(layer, x, weights["layers"])[0]
    with jax.named_scope("head"):
        return (x @ weights["head"]).sum()


def test_a_gradient_keeps_the_forward_pass(tmp_path):
    def gradient(layers, head, x):
        return jax.grad(loss)({"layers": layers, "head": head}, x)

    live, total = dumped(tmp_path, gradient, (16, 64, 64), (64, 8), (1024, 64))
    peak = max(moment.total for moment in live.timeline)
    assert sum(one.bytes for one in live.tensors) == pytest.approx(peak, rel=0.01)
    assert 0.95 * total < peak <= total  # between buffers of a heap lies a little that nobody uses
    assert len(live.timeline) <= MOMENTS
    by_kind = {kind: [one for one in live.tensors if one.kind == kind] for kind in ("argument", "output", "kept")}
    assert {one.name: one.bytes for one in by_kind["argument"]} == {"layers": 16 * 64 * 64 * 4, "x": 1024 * 64 * 4}
    assert 16 * 64 * 64 * 4 in {one.bytes for one in by_kind["output"]}
    assert not any(one.source for one in by_kind["argument"])
    stacks = [one for one in by_kind["kept"] if one.bytes == 16 * 1024 * 64 * 4]
    assert stacks
    assert all(one.name.startswith("layers/mlp/") and one.phase == "forward" for one in stacks)
    line = loss.__code__.co_firstlineno + 3
    assert {one.source for one in stacks} == {f"compiler/test_live.py:{line}"}
    assert not any(moment.bytes.get("kept") for moment in live.timeline[-1:])


class MLP:
    def __call__(self, x, w):
        return Linear()(jnp.tanh(x), w)


class Linear:
    def __call__(self, x, w):
        return x @ w


def test_modules_name_what_has_no_scope(tmp_path):
    """The chain of modules, and the line that calls the innermost."""

    def gradient(w, x):
        return jax.grad(lambda w: (MLP()(x, w) ** 2).sum())(w)

    live, _ = dumped(tmp_path, gradient, (256, 256), (512, 256))
    made = {(one.source, one.name) for one in live.tensors if one.kind != "argument"}
    line = MLP.__call__.__code__.co_firstlineno + 1
    place = f"compiler/test_live.py:{line}"
    assert made & {(place, "MLP/tanh"), (place, "MLP/Linear/dot_general")}


def test_an_update_in_place(tmp_path):
    live, total = dumped(tmp_path, lambda w, g: w - 0.1 * g, (512, 512), (512, 512), donate=0)
    assert total == pytest.approx(2 * 512 * 512 * 4, rel=0.01)
    assert [(one.name, one.kind, one.phase) for one in live.tensors] == [
        ("g", "argument", None),
        ("w", "argument", None),
    ]


def test_without_a_dump_there_is_nothing(tmp_path):
    assert live_at_the_peak(tmp_path, "cpu") is None


@pytest.mark.parametrize(
    ("op_name", "name", "phase"),
    [
        ("jit(step)/jvp(Decoder)/while/body/closed_call/attention/exp", "Decoder/attention/exp", "forward"),
        ("jit(step)/transpose(jvp(layers))/while/body/checkpoint/mul", "layers/mul", "backward"),
        ("jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/mlp/tanh", "mlp/tanh", "recompute"),
        ("params['layers']['up']", "params['layers']['up']", None),
        ("jit(init)/jit(_normal)/erf_inv", "_normal/erf_inv", None),
    ],
)  # fmt: skip
def test_scopes_as_the_user_wrote_them(op_name, name, phase):
    assert (clean_name(op_name), phase_of(op_name)) == (name, phase)
