"""The graph of a block against what JAX does with it: residuals, FLOP, bytes per device."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from programs.blocks import decoder_block

from jaxscale.platforms.platform import Platform
from jaxscale.programs.block import block_graph
from jaxscale.programs.flop import count_flop
from jaxscale.sharding import place
from jaxscale.sharding.mesh import AXES, MeshSpec
from jaxscale.sharding.rules import AxisRules
from jaxscale.trees import tree_bytes


@pytest.mark.parametrize("attention", ["plain", "chunked"])
def test_flop_and_residuals_are_those_of_the_program(attention):
    block, params, x = decoder_block(attention=attention)
    graph = block_graph(block, params, x)
    assert graph.flop == count_flop(block, params, x).total

    def residuals(params, x):
        _, pull = jax.vjp(block, params, x)
        return [leaf for leaf in jax.tree.leaves(pull) if not any(leaf is given for given in inputs(params, x))]

    def inputs(params, x):
        return [*jax.tree.leaves(params), x]

    # beside the inputs; values that only have two names, or are constants, make the difference
    kept = tree_bytes(jax.eval_shape(residuals, params, x))
    assert abs(graph.needed_bytes - kept) / kept < 0.3


def test_values_of_a_function_with_its_own_derivative_are_kept_by_the_names_it_gives():
    block, params, x = decoder_block(attention="chunked")
    graph = block_graph(block, params, x)
    by_mark = {value.mark: value for value in graph.values}
    out, lse = by_mark["attention_out"], by_mark["attention_lse"]
    assert out.bytes == 2 * 64 * 32 * 4
    assert lse.bytes == 2 * 64 * 4 * 4
    assert {graph.by_name[value.name] for value in (out, lse)} <= set(graph.needed)
    assert "attention" in out.source


def test_a_kept_value_has_its_bytes_its_source_and_its_name():
    block, params, x = decoder_block()
    graph = block_graph(block, params, x)
    up = graph.values[graph.by_name["mlp_up"]]
    assert (up.shape, up.dtype, up.bytes) == ((2, 64, 96), "float32", 2 * 64 * 96 * 4)
    assert graph.equations[up.producer].flop == 2 * 2 * 64 * 32 * 96
    assert "linear.py" in up.source
    assert graph.carried_bytes == 2 * 64 * 32 * 4 == graph.output_bytes


def test_names_are_unique_and_equations_run_in_order():
    graph = block_graph(*decoder_block(attention="chunked"))
    assert len(graph.by_name) == len(graph.values)
    for number, equation in enumerate(graph.equations):
        assert all(graph.values[index].producer == number for index in equation.outputs)
        assert all(graph.values[index].producer < number for index in equation.inputs)


def test_only_what_is_differentiated_is_needed():
    mask = jnp.ones((4, 4))  # closed over: an array, not a parameter

    def fn(w, x):
        return jnp.sum((x @ w) * mask)

    w, x = (jax.ShapeDtypeStruct((4, 4), jnp.float32) for _ in range(2))
    assert block_graph(fn, w, x).needed_bytes == 0


def test_seconds_are_those_of_the_slower_of_arithmetic_and_memory():
    block, params, x = decoder_block(embed=256, mlp=512, length=256, dtype=jnp.bfloat16)
    chip = Platform.parse("tpu v5e:2x2").chip
    graph = block_graph(block, params, x, chip=chip)
    assert chip.bfloat16 is not None
    assert chip.memory_bandwidth is not None
    for equation in graph.equations:
        moved = equation.bytes / chip.memory_bandwidth
        # float32 products run in bfloat16 passes, at the same peak
        assert equation.seconds == pytest.approx(max(equation.flop / (0.8 * chip.bfloat16), moved))
    assert block_graph(block, params, x).seconds == 0
    unknown = dataclasses.replace(chip, memory_bandwidth=None)
    assert block_graph(block, params, x, chip=unknown).seconds == 0


@pytest.mark.parametrize(("mesh", "heads", "rows"), [("data:2", 1, 2), ("tensor:2", 2, 1), ("data:2,tensor:2", 2, 2)])
def test_bytes_and_flop_are_those_of_one_device(mesh, heads, rows):
    block, params, x = decoder_block()
    whole = block_graph(block, params, x)
    with place.layout(MeshSpec.parse(mesh).build(jax.devices()), AxisRules()):
        graph = block_graph(block, params, x)
    assert graph.fingerprint == whole.fingerprint
    bytes_of = {value.name: value.bytes for value in graph.values}
    for value in whole.values:
        if value.name in ("mlp_up", "mlp_gate", "attention_q", "attention_k", "attention_v"):
            assert bytes_of[value.name] == value.bytes // (heads * rows), value.name
        if value.name == "norm":
            assert bytes_of[value.name] == value.bytes // rows
    assert graph.flop == whole.flop // (heads * rows)
    assert graph.carried_bytes == whole.carried_bytes // rows


def test_a_mesh_needs_no_devices():
    block, params, x = decoder_block()
    sizes = dict.fromkeys(AXES, 1)
    sizes |= {"fsdp": 2, "tensor": 2}
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    with place.layout(mesh, AxisRules()):  # type: ignore[arg-type]
        graph = block_graph(block, params, x)
    assert graph.values[graph.by_name["mlp_up"]].bytes == 2 * 64 * 96 * 4 // 4


def test_activations_without_any_placement_are_split_along_their_first_dim():
    def fn(w, x):
        return jnp.tanh(x @ w) @ w

    w, x = (jax.ShapeDtypeStruct((8, 8), jnp.float32) for _ in range(2))
    whole = block_graph(fn, w, x)
    part = block_graph(fn, w, x, mesh={"data": 4}, batch=("data",))
    assert part.needed_bytes == whole.needed_bytes // 4
    assert part.flop == whole.flop // 4
