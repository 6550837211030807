import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.blocks import Context
from jaxscale.compiler.collectives import collectives
from jaxscale.errors import UserError
from jaxscale.layers.attend_on_mesh import attend
from jaxscale.layers.attention import Attention
from jaxscale.layers.cache import KVCache
from jaxscale.layers.rotary import Rotary
from jaxscale.layers.stack import Stack
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.sharding.place import layout
from jaxscale.sharding.rules import AxisRules

SIZES = {"embed": 12, "heads": 4, "kv_heads": 2, "head_dim": 6}


def _layer(**settings):
    layer = Attention(**SIZES, rngs=nnx.Rngs(0), **({"rotary": Rotary(6)} | settings))
    for name in ("q_norm", "k_norm"):
        if getattr(layer, name) is not None:
            getattr(layer, name).weight[...] = jnp.linspace(0.5, 1.5, 6)
    return layer


def _x(batch=2, length=7):
    return jax.random.normal(jax.random.key(1), (batch, length, 12))


@jax.jit
def _call(layer, x, given):
    return layer(x, **given)


def test_the_layer_is_its_parts():
    layer, x = _layer(qk_norm=1e-3, bias=True, out_bias=True, soft_cap=2.0, window=3, scale=0.3), _x()
    for part in (layer.q, layer.k, layer.v, layer.out):
        part.bias[...] = jnp.linspace(-1, 1, part.bias.size)

    def heads(projection, count):
        return (x @ projection.weight[...] + projection.bias[...][None, None, :]).reshape(2, 7, count, 6)

    def unit(y):
        return y / jnp.sqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-3) * jnp.linspace(0.5, 1.5, 6)[None, None, None, :]

    @jax.jit
    def parts():
        positions = jnp.arange(7)[None, :]
        q, k = (Rotary(6).apply(unit(heads(*pair)), positions) for pair in ((layer.q, 4), (layer.k, 2)))
        y = attend(q, k, heads(layer.v, 2), soft_cap=2.0, window=3, scale=0.3, implementation="plain")
        return y.reshape(2, 7, 24) @ layer.out.weight[...] + layer.out.bias[...][None, None, :]

    expected, unbound = parts(), _call(layer, x, {"window": None})
    np.testing.assert_allclose(_call(layer, x, {}), expected, rtol=2e-5, atol=2e-5)
    assert not np.allclose(unbound, expected, atol=1e-3)
    np.testing.assert_array_equal(unbound, _call(layer, x, {"window": 100}))


def test_logical_axes():
    layer = _layer(bias=True)
    assert layer.q.weight.out_sharding == ("embed", "heads")
    assert layer.k.weight.out_sharding == layer.v.weight.out_sharding == ("embed", "kv_heads")
    assert layer.out.weight.out_sharding == ("heads", "embed")
    assert layer.q.bias.out_sharding == ("heads",)


def test_packed_documents_do_not_see_each_other():
    layer, x = _layer(), _x(1, 7)
    segments, positions = jnp.array([[1, 1, 1, 2, 2, 0, 0]]), jnp.array([[0, 1, 2, 0, 1, 0, 0]])
    packed = _call(layer, x, {"segments": segments, "positions": positions})
    np.testing.assert_allclose(packed[:, :3], _call(layer, x[:, :3], {}), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(packed[:, 3:5], _call(layer, x[:, 3:5], {}), rtol=1e-5, atol=1e-6)
    assert not np.asarray(packed[:, 5:]).any()


def test_implementation_and_dropout_come_with_the_context():
    layer, x = _layer(dropout=0.5), _x()
    chunked = _call(layer, x, {"context": Context(attention="chunked")})
    np.testing.assert_allclose(chunked, _call(layer, x, {}), rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="expected tpu"):
        layer(x, context=Context(attention="splash"))
    dropped = np.asarray(_call(layer, x, {"context": Context(key=jax.random.key(0))}))
    assert 0.3 < (dropped == 0).mean() < 0.7


def test_named_residuals_are_found_by_remat():
    layer, x = _layer(), _x()
    for implementation, names in (("plain", {"attention_out"}), ("chunked", {"attention_out", "attention_lse"})):

        def loss(layer, x, how=implementation):
            return jnp.sum(layer(x, context=Context(attention=how)))

        text = str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss)))(layer, x))
        for name in names | {"attention_q", "attention_k", "attention_v"}:
            assert f"name={name}" in text


def test_keys_cross_a_sharded_sequence_once():
    """And their gradients are scattered as they are summed: neither is gathered again."""
    layer, mesh = _layer(), MeshSpec.parse("sequence:4").build()
    x = jax.device_put(_x(length=16), NamedSharding(mesh, PartitionSpec(None, "sequence")))
    for how in ("plain", "chunked"):
        context = Context(attention=how)
        with layout(mesh, AxisRules()):
            step = jax.jit(jax.grad(lambda x, context=context: jnp.sum(jnp.square(layer(x, context=context)))))
            found = collectives(step.lower(x).compile().as_text(), mesh)
        sent = collections.defaultdict(int)
        for one in found:
            sent[one.kind] += one.bytes
        keys_and_values = 2 * 2 * 16 * 2 * 6 * 4  # each (2, 16, 2, 6) in float32
        assert sent == {"all-gather": keys_and_values, "reduce-scatter": keys_and_values}


@pytest.mark.parametrize(("how", "settings"), [("auto", {}), ("chunked", {"window": 3}), ("splash", {})])
def test_a_cache_gives_what_the_whole_sequence_gives(how, settings):
    layer, x = _layer(**settings), _x()
    whole = _call(layer, x, {})
    step = jax.jit(lambda x, cache: layer(x, cache=cache, context=Context(attention=how)))
    found, cache = step(x[:, :4], KVCache.empty(2, 10, 2, 6))
    parts = [found]
    for position in range(4, 7):
        found, cache = step(x[:, position : position + 1], cache)
        parts.append(found)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, rtol=2e-5, atol=2e-5)
    assert int(cache.length) == 7
    np.testing.assert_array_equal(cache.valid[0], [True] * 7 + [False] * 3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_of_unequal_length_continue_as_if_alone(side):
    layer, x = _layer(), _x(2, 8)
    lengths = (3, 5)
    prompt, positions, segments = np.zeros((2, 5, 12), np.float32), np.zeros((2, 5), int), np.zeros((2, 5), int)
    for row, length in enumerate(lengths):
        where = slice(0, length) if side == "right" else slice(5 - length, 5)
        prompt[row, where], positions[row, where], segments[row, where] = x[row, :length], np.arange(length), 1
    call = jax.jit(lambda x, **settings: layer(x, **settings))
    alone = call(x)
    given = {"positions": jnp.asarray(positions), "segments": jnp.asarray(segments)}
    _, cache = call(jnp.asarray(prompt), **given, cache=KVCache.empty(2, 8, 2, 6))
    for step in range(2):
        following = jnp.stack([x[row, length + step] for row, length in enumerate(lengths)])[:, None]
        y, cache = call(following, positions=jnp.array(lengths)[:, None] + step, cache=cache)
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(y[row, 0], alone[row, length + step], rtol=2e-5, atol=2e-5)


def test_a_narrow_cache_keeps_its_type_and_the_output_its_own():
    layer, x = _layer(), _x()
    y, cache = _call(layer, x, {"cache": KVCache.empty(2, 8, 2, 6, jnp.bfloat16)})
    assert cache.k.dtype == jnp.bfloat16
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, _call(layer, x, {}), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("cycle", [({"window": 2}, {"window": None}), pytest.param(({},), marks=pytest.mark.variant)])
def test_a_stack_carries_its_layers_caches(cycle):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.attention = Attention(**SIZES, rotary=Rotary(6), rngs=rngs)

        def __call__(self, x, *, context, cache=None, window="own"):
            y = self.attention(x, context=context, cache=cache, window=window)
            return x + y if cache is None else (x + y[0], y[1])

    stack, x = Stack(Block, 4, rngs=nnx.Rngs(0)), _x()
    caches = KVCache.empty(2, 8, 2, 6, layers=4)
    step = jax.jit(lambda x, caches: stack(x, per_layer={"cache": caches}, cycle=cycle, outputs=True))
    first, caches = step(x[:, :5], caches)
    second, caches = step(x[:, 5:], caches)
    whole = jax.jit(lambda x: stack(x, cycle=cycle))(x)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), whole, rtol=3e-5, atol=3e-5)
    np.testing.assert_array_equal(caches.length, [7] * 4)
    assert {field.name for field in dataclasses.fields(caches)} == {"k", "v", "positions", "valid", "length"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Attention(12, 4, 3, 6, rngs=nnx.Rngs(0)), "4 query heads, expected a multiple of the 3 key heads"),
        (lambda: _layer(rotary=Rotary(8)), "expected 6"),
        (lambda: _layer()(_x(), window="all"), "expected a whole number"),
    ],
)
def test_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_a_cache_that_every_device_holds_is_not_sent_over_a_sequence_axis():
    mesh, whole = MeshSpec(sequence=8).build(), PartitionSpec()
    layer = Attention(64, 8, 8, 8, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)

    def advance(state, x, cache):
        with layout(mesh, AxisRules()):
            return nnx.merge(graph, state)(x, cache=cache)

    sharding = NamedSharding(mesh, whole)
    advance = jax.jit(advance, in_shardings=sharding, out_shardings=sharding)
    text = advance.lower(state, jnp.ones((2, 1, 64)), KVCache.empty(2, 64, 8, 8, jnp.float32)).compile().as_text()
    assert collectives(text, mesh) == []
