"""A save set does in the program what its numbers say: FLOP, residuals, compiled bytes; and no gradient changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from programs.blocks import decoder_block, drawn, loss_of

from jaxscale import blocks
from jaxscale.blocks import Context, Treatment
from jaxscale.errors import UserError
from jaxscale.layers.conv import BatchNorm, Conv
from jaxscale.layers.stack import Chain
from jaxscale.memory.decision import SaveSet
from jaxscale.memory.graph import menu, solve
from jaxscale.memory.keep_named import KeepNamed, StaleGraph, keeping
from jaxscale.memory.save_set import EVERYTHING, save_set
from jaxscale.models.decoder import Decoder
from jaxscale.programs.block import block_graph
from jaxscale.programs.collect import collect
from jaxscale.programs.flop import count_flop
from tests.tiers import variants


def kept(block, save, rolled=True):
    return keeping([save])(block, rolled)


@pytest.fixture(scope="module", params=variants(["chunked", "plain"], default=1))
def case(request):
    block, params, x = decoder_block(attention=request.param)
    return block, params, x, block_graph(block, params, x)


def checkpointed(jaxpr):
    """The equations of `jax.checkpoint` in a jaxpr."""
    for eqn in jaxpr.eqns:
        if "policy" in eqn.params:
            yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from checkpointed(inner)


def test_recomputed_flop_are_exactly_those_of_the_save_set(case):
    block, params, x, graph = case
    plain = count_flop(loss_of(block), params, x).total
    curve = menu(graph, 6)
    assert len(curve) > 4
    for save in curve:
        assert count_flop(loss_of(kept(block, save)), params, x).total - plain == save.flop


def test_what_the_backward_pass_is_given_are_exactly_the_kept_bytes(case):
    block, params, x, graph = case
    save = solve(graph, graph.needed_bytes // 4)

    def residuals(params, x):
        _, pull = jax.vjp(kept(block, save), params, x)
        return jax.tree.leaves(pull)

    given = jax.tree.leaves((params, x))
    sizes = sum(leaf.size * leaf.dtype.itemsize for leaf in given)
    found = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.eval_shape(residuals, params, x))
    constants = 4 * 4 * 2  # the frequencies of the rotary angles
    assert 0 <= found - sizes - save.bytes <= constants


@pytest.mark.parametrize("rolled", variants([True, False], default=1))
def test_gradients_are_those_without_a_plan(case, rolled):
    block, params, x, graph = case
    params, x = drawn(params), drawn(x, 1)
    expected = jax.jit(loss_of(block))(params, x)
    for save in (solve(graph, 0), solve(graph, graph.needed_bytes // 4), save_set(graph, (EVERYTHING,))):
        found = jax.jit(loss_of(kept(block, save, rolled)))(params, x)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)


def test_the_policy_is_ours_and_barriers_stand_where_layers_are_unrolled(case):
    block, params, x, graph = case
    for rolled in (True, False):
        traced = jax.make_jaxpr(kept(block, solve(graph, 1 << 14), rolled))(params, x)
        [eqn] = checkpointed(traced.jaxpr)
        assert isinstance(eqn.params["policy"], KeepNamed)
        assert eqn.params["prevent_cse"] == (not rolled)


def test_a_save_set_of_another_block_is_refused_by_both_names(case):
    block, params, _, graph = case
    longer = jax.ShapeDtypeStruct((2, 32, 32), jnp.float32)
    other = block_graph(block, params, longer).fingerprint
    with pytest.raises(StaleGraph, match=f"made for block {graph.fingerprint}, but this model has block {other}"):
        jax.eval_shape(kept(block, solve(graph, 0)), params, longer)
    with pytest.raises(UserError, match="got two save sets"):
        keeping([SaveSet("a"), SaveSet("a", ("x",))])


def test_a_name_that_the_block_has_not_is_answered_with_a_near_one(case):
    block, params, x, graph = case
    with pytest.raises(UserError, match="did you mean 'mlp_gate'"):
        jax.eval_shape(kept(block, SaveSet(graph.fingerprint, ("mlp_gaet",))), params, x)


def test_offloaded_values_are_marked_for_the_host_and_gradients_stay():
    block, params, x = decoder_block()
    graph = block_graph(block, params, x)
    save = save_set(graph, ("mlp_up",), ("mlp_gate",))
    assert save.host_bytes == save.bytes == 2 * 64 * 96 * 4
    text = str(jax.make_jaxpr(loss_of(kept(block, save)))(params, x))
    assert "<host>[2,64,96]" in text
    params, x = drawn(params), drawn(x, 1)
    found, expected = jax.jit(loss_of(kept(block, save)))(params, x), jax.jit(loss_of(block))(params, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)


class Residual(nnx.Module):
    """A block with state of its own, of another shape behind than in front."""

    def __init__(self, inward, outward, rngs):
        self.conv = Conv(inward, outward, stride=2, rngs=rngs)
        self.norm = BatchNorm(outward, rngs=rngs)

    def __call__(self, x, *, context=Context()):
        return jax.nn.relu(self.norm(self.conv(x), context=context))


def test_blocks_with_statistics_and_a_key_update_them_as_without_a_plan():
    chain = Chain([Residual(2, 4, nnx.Rngs(0)), Residual(4, 4, nnx.Rngs(1))])
    graphdef, state = nnx.split(chain)
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 2))

    def loss(state, x):
        module = nnx.merge(graphdef, state, copy=True)
        made = module(x, context=Context(key=jax.random.key(1)))
        return jnp.sum(jnp.square(made)), nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))

    calls = collect(loss, state, x)
    assert len({call.fingerprint for call in calls}) == len(calls) == 2
    saves = [solve(call.graph, call.graph.needed_bytes // 2) for call in calls]
    expected = jax.jit(jax.grad(loss, has_aux=True))(state, x)
    with blocks.treating(Treatment(keeping(saves))):
        gradients = jax.jit(jax.grad(lambda state, x: loss(state, x), has_aux=True))(state, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), gradients, expected)


LAYERS = 6


def gradient_of_stack(save, module, graphdef, x):
    """Compiled gradient of a decoder's stack whose blocks run under a save set; `None` leaves them alone."""

    def loss(params, x):
        treatment = Treatment() if save is None else Treatment(keeping([save]))
        with blocks.treating(treatment):
            made = nnx.merge(graphdef, params, copy=True)(x, context=Context(attention="plain"))
        return jnp.sum(jnp.square(made))

    return jax.jit(jax.grad(loss)).lower(module, x).compile()


def test_compiled_flop_and_bytes_are_the_predicted_ones():
    config = Decoder(vocab=32, context=256, layers=LAYERS, embed=128, heads=2, kv_heads=2, mlp=384)
    stack = nnx.eval_shape(lambda: config.build(nnx.Rngs(0)).blocks)
    graphdef, params = nnx.split(stack)
    params = nnx.to_pure_dict(params)
    x = jax.ShapeDtypeStruct((4, 256, 128), jnp.float32)

    def forward(params, x):
        return nnx.merge(graphdef, params, copy=True)(x, context=Context(attention="plain"))

    [call] = collect(forward, params, x)
    assert (call.count, call.rolled) == (LAYERS, True)
    least, most = solve(call.graph, 0), solve(call.graph, call.graph.needed_bytes // 2)
    compiled = {save: gradient_of_stack(save, params, graphdef, x) for save in (least, most)}
    flop = {save: found.cost_analysis()["flops"] for save, found in compiled.items()}
    # the body of a loop counts once
    expected = least.flop - most.flop
    assert abs(flop[least] - flop[most] - expected) <= 0.005 * flop[least]
    temp = {save: found.memory_analysis().temp_size_in_bytes for save, found in compiled.items()}
    assert temp[most] - temp[least] == pytest.approx(LAYERS * (most.bytes - least.bytes), rel=0.2)
