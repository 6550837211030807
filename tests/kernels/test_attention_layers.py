"""Attention of `jaxscale.layers` by our kernels: on a mesh, as one layer among others, and when it is refused."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, PartitionSpec

from jaxscale.errors import UserError
from jaxscale.layers.attend_on_mesh import attend
from jaxscale.layers.attention_kernel import attend_kernel
from jaxscale.layers.attention_splash import attend_splash
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.sharding.place import layout
from jaxscale.sharding.rules import AxisRules
from pallas_kernels.attention.visibility import Visibility
from tests.kernels import battery

LONG = 256
DOCUMENTS = jnp.array([[1] * 100 + [2] * 130 + [0] * 26, [1] * 256])
PACKED = {"q_segments": DOCUMENTS, "kv_segments": DOCUMENTS}
TPU = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


def _draw(heads=4, groups=2, width=64, length=LONG, dtype=jnp.bfloat16):
    shapes = [(2, length, n, width) for n in (heads, groups, groups)]
    return [jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate(shapes)]


def _gradients(function, arguments):
    def loss(*x):
        out = function(*x).astype(jnp.float32)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arguments)


def _kernel(q, k, v, *, soft_cap=None, implementation="tpu", interpret=True, **given):
    visibility, scale = Visibility(**given), q.shape[-1] ** -0.5
    settings = {"scale": scale, "soft_cap": soft_cap, "interpret": interpret}
    if implementation == "splash":
        return attend_splash(q, k, v, visibility, **settings)
    return attend_kernel(q, k, v, visibility, implementation=implementation, **settings)


ON = [("tpu", None), ("tpu", "data:2,tensor:2"), ("tpu", "tensor:4"), ("tpu", "data:1")]
ON += [("tpu", "data:2,sequence:2"), ("tpu", "sequence:2,tensor:4")]
if battery.GPU_INTERPRETER:  # of one device
    ON += [("gpu", None), ("gpu", "data:1")]


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "mesh"), ON)
def test_kernels_are_the_definition_on_meshes(implementation, mesh):
    """Where heads are sharded further than key heads, too; and splash, by others, agrees."""
    arguments, settings = _draw(), {**PACKED, "soft_cap": 3.0}
    (_, want), want_grads = _gradients(
        lambda *x: attend(*x, **settings, implementation="plain"), [x.astype(jnp.float32) for x in arguments]
    )
    with contextlib.nullcontext() if mesh is None else layout(MeshSpec.parse(mesh).build(), AxisRules()):
        found = {
            name: _gradients(functools.partial(_kernel, implementation=name, **settings), arguments)
            for name in (implementation, "splash")
        }
    for (_, out), grads in found.values():
        battery.close([out, *grads], [want, *want_grads], {"bfloat16": 1e-2, "float32": 1e-2}, "attention")


@pytest.mark.parametrize("settings", [{"window": 9, "soft_cap": 3.0, "packed": True}, {"causal": False}], ids=str)
def test_queries_may_be_sharded(settings):
    """Each device holds 16 positions of them, and sums of what its queries tell of keys and values."""
    arguments, settings = _draw(2, 1, length=64, dtype=jnp.float32), dict(settings)
    if settings.pop("packed", False):
        ids = jnp.array([[1] * 30 + [2] * 30 + [0] * 4, [1] * 64])
        settings |= {"q_segments": ids, "kv_segments": ids}
    want = _gradients(functools.partial(attend, **settings, implementation="plain"), arguments)
    with layout(MeshSpec.parse("sequence:4").build(), AxisRules()):
        got = _gradients(functools.partial(_kernel, **settings), arguments)
    (_, out), grads = got
    (_, plain), plain_grads = want
    battery.close([out, *grads], [plain, *plain_grads], {"float32": 1e-5}, "attention")


@pytest.mark.parametrize("mesh", ["data:2,tensor:2", "sequence:4"])
@pytest.mark.parametrize(("device", "primitive"), [(TPU, "pallas_call["), (H200, "mpmd_map[")])
def test_a_layout_decides_which_kernels_run(device, primitive, mesh):
    """Also for a chip that is not here: its kernels are traced, and no other way is."""

    def loss(*x):
        return attend(*x, window=100, soft_cap=3.0).astype(jnp.float32).sum()

    with layout(MeshSpec.parse(mesh).build([device] * 4), AxisRules()):
        jaxpr = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*_draw()))
    assert jaxpr.count(primitive) == 3
    assert "platform_index" not in jaxpr


@pytest.mark.parametrize("mesh", ["pipe:2,tensor:2", pytest.param("pipe:2,sequence:2", marks=pytest.mark.slow)])
def test_kernels_lower_where_some_axes_are_manual(mesh):
    """As within a pipeline's stage: the kernel is manual over what is left."""
    mesh, arguments = MeshSpec.parse(mesh).build(), _draw()

    def body(q, k, v):
        with layout(jax.sharding.get_abstract_mesh(), AxisRules(batch=())):
            return _kernel(q, k, v)

    region = jax.shard_map(
        body, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), axis_names={"pipe"}, check_vma=False
    )
    found = jax.jit(region)(*arguments)
    np.testing.assert_allclose(
        found.astype(jnp.float32), attend(*arguments, implementation="plain").astype(jnp.float32), atol=3e-2
    )


def test_what_kernels_cannot_do_is_refused_by_name():
    q, k, v = _draw()
    run = functools.partial(_kernel, interpret=False)
    with pytest.raises(UserError, match="'tpu': attention: implementation 'tpu' cannot run: it is for TPUs, and the"):
        attend(q, k, v, implementation="tpu")
    with pytest.raises(UserError, match="it is for GPUs"):
        attend(q, k, v, implementation="cudnn")
    with pytest.raises(UserError, match="'gpu': got positions"):
        run(q, k, v, implementation="gpu", q_positions=jnp.zeros((1, LONG), int))
    with pytest.raises(UserError, match="traced window"):
        run(q, k, v, window=jnp.int32(3))
    given = jax.ShapeDtypeStruct(q.shape, q.dtype)
    there = layout(MeshSpec.parse("sequence:2").build([H200] * 2), AxisRules())
    with there, pytest.raises(UserError, match=r"'cudnn': .*cuDNN does not support query_offset"):
        jax.eval_shape(functools.partial(run, implementation="cudnn"), given, given, given)
