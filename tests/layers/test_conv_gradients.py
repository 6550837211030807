"""Gradients of convolutions by products, against XLA's own convolutions and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxscale.compiler.collectives import collectives
from jaxscale.layers.conv import convolve
from jaxscale.layers.cpu_convolutions import patches
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.sharding.place import layout
from jaxscale.sharding.rules import AxisRules
from tests.tiers import variants

CASES = {  # images, height, width, channels in and out, window, stride, padding
    "same": (5, 6, 6, 3, 4, (3, 3), 1, "SAME"),
    "stride 2": (4, 7, 9, 3, 4, (3, 3), 2, 1),
    "large window": (3, 8, 8, 2, 3, (7, 7), 2, 3),
    "unequal window": (2, 9, 8, 3, 2, (2, 3), 3, "VALID"),
    "1 x 1": (4, 6, 5, 4, 3, (1, 1), 2, "VALID"),
    "unequal padding": (4, 5, 5, 3, 4, (3, 3), 2, ((0, 2), (1, 0))),
    "negative padding": (1, 4, 4, 2, 2, (3, 3), 1, ((-1, 2), (1, -1))),
    "one pixel": (2, 1, 1, 2, 2, (3, 3), 1, "SAME"),
    "no output": (2, 2, 2, 2, 2, (3, 3), 1, "VALID"),
}


def own_gradients(x, w, dy, stride=1, padding=1):
    """Return (dx, dw) of `convolve`."""
    return jax.vjp(lambda x, w: convolve(x, w, stride=stride, padding=padding), x, w)[1](dy)


def reference(x, w, stride, padding):
    pads = ((padding, padding),) * 2 if isinstance(padding, int) else padding
    return jax.lax.conv_general_dilated(x, w, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def arrays(images, height, width, channels_in, channels_out, window, stride, padding):
    """Return (x, w, dy), random."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(images, height, width, channels_in)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(*window, channels_in, channels_out)), jnp.float32)
    dy_shape = jax.eval_shape(lambda x, w: reference(x, w, stride, padding), x, w).shape
    return x, w, jnp.asarray(rng.normal(size=dy_shape), jnp.float32)


@pytest.mark.parametrize("name", variants(CASES, default=3))
@pytest.mark.parametrize("positions_per_chunk", [1, 40])
def test_gradients_by_products_are_those_of_the_convolution(name, positions_per_chunk, monkeypatch):
    monkeypatch.setattr(patches, "POSITIONS_PER_CHUNK", positions_per_chunk)
    *_, stride, padding = CASES[name]
    x, w, dy = arrays(*CASES[name])
    y, transpose = jax.vjp(lambda x, w: reference(x, w, stride, padding), x, w)
    np.testing.assert_array_equal(convolve(x, w, stride=stride, padding=padding), y)
    gradients = jax.jit(lambda *arrays: own_gradients(*arrays, stride=stride, padding=padding))(x, w, dy)
    for gradient, expected in zip(gradients, transpose(dy), strict=True):
        np.testing.assert_allclose(gradient, expected, atol=2e-5, rtol=2e-5)


def test_gradients_under_vmap_and_checkpoint_and_of_gradients():
    x, w, dy = arrays(4, 6, 6, 3, 4, (3, 3), 1, 1)
    dx, dw = own_gradients(x, w, dy)
    by_row = jax.jit(jax.vmap(lambda x, dy: own_gradients(x[None], w, dy[None])))(x, dy)
    np.testing.assert_allclose(by_row[0][:, 0], dx, atol=2e-5)
    np.testing.assert_allclose(by_row[1].sum(0), dw, atol=2e-5, rtol=2e-5)

    def loss(convolution, x, w):
        return (jax.checkpoint(convolution)(x, w) ** 3).sum()

    def slope(convolution, x, w):
        dx, dw = jax.grad(loss, (1, 2))(convolution, x, w)
        return (dx**2).sum() + (dw**2).sum()

    own, plain = (
        jax.jit(jax.grad(lambda x, w, convolution=convolution: slope(convolution, x, w) / 1e6, (0, 1)))(x, w)
        for convolution in (lambda x, w: convolve(x, w, padding=1), lambda x, w: reference(x, w, 1, 1))
    )
    for gradient, expected in zip(own, plain, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4 * float(abs(expected).max()))


@pytest.mark.parametrize("axes", ["data:8", "data:2,fsdp:2,tensor:2"])
def test_shards_of_the_batch_are_summed_once_and_nothing_is_gathered(axes, monkeypatch):
    monkeypatch.setattr(patches, "POSITIONS_PER_CHUNK", 1)
    x, w, dy = arrays(16, 6, 6, 3, 4, (3, 3), 1, 1)
    mesh = MeshSpec.parse(axes).build()
    by_batch = NamedSharding(mesh, PartitionSpec(tuple(axis for axis in AxisRules().batch if mesh.shape[axis] > 1)))
    whole = NamedSharding(mesh, PartitionSpec())
    with layout(mesh, AxisRules()):
        program = jax.jit(
            lambda *arrays: own_gradients(*arrays),
            in_shardings=(by_batch, whole, by_batch),
            out_shardings=(by_batch, whole),
        )
        compiled = program.lower(x, w, dy).compile()
    rows = collectives(str(compiled.as_text()), mesh)
    assert [(row.kind, row.bytes, row.count) for row in rows] == [("all-reduce", w.nbytes, 1)]
    for gradient, expected in zip(compiled(x, w, dy), own_gradients(x, w, dy), strict=True):
        np.testing.assert_allclose(gradient, expected, atol=2e-5, rtol=2e-5)


def described(platform, kind):
    """Return a mesh of two devices that are not attached."""
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    return AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)


@pytest.mark.parametrize("mesh", [described("tpu", "TPU v5 lite"), described("gpu", "NVIDIA H200")])
def test_programs_of_accelerators_hold_only_convolutions(mesh):
    x, w, dy = arrays(4, 6, 6, 3, 4, (3, 3), 1, 1)

    def plain_gradients(x, w, dy):
        return jax.vjp(lambda x, w: reference(x, w, 1, 1), x, w)[1](dy)

    with layout(mesh, AxisRules(batch=("data",))):
        program = jax.make_jaxpr(lambda *arrays: own_gradients(*arrays))(x, w, dy)
    assert str(program) == str(jax.make_jaxpr(plain_gradients)(x, w, dy))


@pytest.mark.parametrize(
    ("images", "size", "dtype", "product_count"),
    [
        (4, 6, "float32", 2),
        (4, 6, "bfloat16", 0),
        (4, 65, "float32", 0),  # too many positions for either gradient
        (640, 2, "float32", 1),  # too many positions for the product of dx
    ],
)
def test_types_and_sizes_that_products_are_for(images, size, dtype, product_count):
    x, w, dy = (
        jax.ShapeDtypeStruct(shape, dtype) for shape in ((images, size, size, 3), (3, 3, 3, 4), (images, size, size, 4))
    )
    program = jax.make_jaxpr(lambda *arrays: own_gradients(*arrays))(x, w, dy)
    assert str(program).count("dot_general[") == product_count
