import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.layers.dropout import Dropout
from jaxscale.layers.stack import Stack
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.sharding.place import layout
from jaxscale.sharding.rules import AxisRules


def _context(examples, step=0):
    return Context(key=jax.random.fold_in(jax.random.key(5), step), examples=jnp.asarray(examples))


def _whole():
    return Dropout(0.25, site="here")(jnp.ones((8, 16, 4)), _context(range(8)))


def test_keeps_the_mean_and_its_share():
    y = np.asarray(Dropout(0.25, site="here")(jnp.ones((64, 1000)), _context(range(64))))
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
    # 64,000 draws: the share's standard deviation is 0.0017
    assert abs((y == 0).mean() - 0.25) < 0.007
    assert len({row.tobytes() for row in y}) == 64


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_mask_does_not_depend_on_microbatches(parts):
    dropout = Dropout(0.25, site="here")
    found = [dropout(jnp.ones((8 // parts, 16, 4)), _context(rows)) for rows in np.split(np.arange(8), parts)]
    np.testing.assert_array_equal(np.concatenate(found), _whole())


@pytest.mark.parametrize("mesh", ["data:8", "data:2,fsdp:2,tensor:2"])
def test_the_mask_does_not_depend_on_the_mesh(mesh):
    spec = MeshSpec.parse(mesh)
    devices, rules = spec.build(), AxisRules()
    rows = NamedSharding(devices, PartitionSpec(("replica", "data", "fsdp")))
    with layout(devices, rules):
        found = jax.jit(lambda x, context: Dropout(0.25, site="here")(x, context))(
            jax.device_put(jnp.ones((8, 16, 4)), rows), _context(range(8))
        )
    assert not found.sharding.is_fully_replicated
    np.testing.assert_array_equal(found, _whole())


def test_the_mask_depends_on_step_layer_site_and_example():
    x = jnp.ones((2, 64))
    here, there = Dropout(0.5, site="here"), Dropout(0.5, site="there")
    masks = [
        here(x, _context([0, 1])),
        here(x, _context([0, 1], step=1)),
        there(x, _context([0, 1])),
        here(x, _context([0, 1]).at_layer(1)),
        here(x, _context([2, 3])),
    ]
    assert len({np.asarray(mask).tobytes() for mask in masks}) == len(masks)


@pytest.mark.parametrize("scan", [True, False])
def test_scanned_layers_draw_what_layers_alone_draw(scan):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.gain = nnx.Param(jnp.ones((1,)), out_sharding=("norm",))
            self.dropout = Dropout(0.5, site="here")

        def __call__(self, x, *, context):
            return self.gain[None, :] * self.dropout(x, context)

    x, context = jnp.ones((2, 64)), _context([4, 7])
    expected = x
    for layer in range(3):
        expected = Dropout(0.5, site="here")(expected, context.at_layer(layer))
    assert 0 < np.mean(np.asarray(expected) == 8) < 0.3
    np.testing.assert_array_equal(Stack(Block, 3, rngs=nnx.Rngs(0), scan=scan)(x, context=context), expected)


def test_narrow_types_stay():
    assert Dropout(0.5, site="here")(jnp.ones((2, 4), jnp.bfloat16), _context([0, 1])).dtype == jnp.bfloat16


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_out_of_range_is_refused(rate):
    with pytest.raises(UserError, match="at least 0 and less than 1"):
        Dropout(rate, site="here")
