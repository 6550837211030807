"""Recipes that the tests of the judge send to another process."""

import os
import signal
import time
import types

import jax
import jax.numpy as jnp
from jax import P
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding

LAYERS, EMBED = 8, 1024


def mesh_of(devices, **sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def struct(mesh, shape, dtype, *spec, kind=None):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.with_memory_kind(kind) if kind else sharding)


def train_step(devices, rows=65536):
    """Eight rematerialized layers, momentum, weights and momentum donated and sharded over all devices."""
    mesh = mesh_of(devices, fsdp=len(devices))

    def block(x, w):
        with jax.named_scope("block"):
            return jax.nn.silu(x @ w.astype(jnp.bfloat16)), None

    def loss(w, x):
        y, _ = jax.lax.scan(jax.checkpoint(block, prevent_cse=False), x, w)
        with jax.named_scope("loss"):
            return (y.astype(jnp.float32) ** 2).mean()

    def step(w, momentum, x):
        momentum = 0.9 * momentum + jax.grad(loss)(w, x)
        return w - 0.1 * momentum, momentum

    sharding = NamedSharding(mesh, P(None, "fsdp"))
    w = struct(mesh, (LAYERS, EMBED, EMBED), jnp.float32, None, "fsdp")
    x = struct(mesh, (rows, EMBED), jnp.bfloat16, "fsdp")
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=(sharding, sharding)).lower(w, w, x)


def zero(devices, rows=4096):
    """ZeRO by hand on data x fsdp: weights gathered, gradients scattered over fsdp and summed over data."""
    mesh = mesh_of(devices, data=2, fsdp=len(devices) // 2)

    def local(w, x):
        whole = jax.lax.all_gather(w, "fsdp", tiled=True)
        gradient = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(jax.lax.pcast(whole, ("data",), to="varying"))
        gradient = jax.lax.psum_scatter(gradient, "fsdp", tiled=True)
        return w - jax.lax.psum(gradient, "data")

    step = jax.shard_map(local, mesh=mesh, in_specs=(P("fsdp"), P(("data", "fsdp"))), out_specs=P("fsdp"))
    w = struct(mesh, (EMBED, EMBED), jnp.float32, "fsdp")
    return jax.jit(step).lower(w, struct(mesh, (rows, EMBED), jnp.float32, ("data", "fsdp")))


def offloaded(devices, rows=16384):
    """Gradient of eight layers whose inputs wait in host memory for the backward pass."""
    mesh = mesh_of(devices[:1], data=1)
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["input"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def block(x, w):
        x = checkpoint_name(x, "input")
        return jnp.tanh(x @ w), None

    def loss(w, x):
        return jax.lax.scan(jax.checkpoint(block, policy=policy, prevent_cse=False), x, w)[0].sum()

    w = struct(mesh, (LAYERS, EMBED, EMBED), jnp.bfloat16)
    return jax.jit(jax.grad(loss)).lower(w, struct(mesh, (rows, EMBED), jnp.bfloat16))


def unrolled(devices):
    """A traced program, not a lowered one: a loop of unknown length around a product."""
    mesh = mesh_of(devices, data=len(devices))

    def spin(x):
        return jax.lax.while_loop(lambda x: x.sum() < 1e3, lambda x: x @ x, x)

    return jax.jit(spin).trace(struct(mesh, (64, 64), jnp.float32))


def dies(devices, number=signal.SIGFPE):
    os.kill(os.getpid(), number)


def sleeps(devices):
    time.sleep(600)


def fails(devices):
    raise KeyError("no such layer")


def nothing(devices):
    return None


def made_by(devices, make):
    return make(devices)


def elsewhere(devices):
    """A program for other devices than the given ones."""
    return jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), jnp.float32))


def big_kernel(devices):
    """A Pallas kernel whose scratch is larger than a core's memory."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def kernel(x, out, scratch):
        scratch[...] = jnp.zeros_like(scratch)
        out[...] = x[...] + scratch[:8, :128]

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        scratch_shapes=[pltpu.VMEM((72000, 512), jnp.float32)],
    )
    mesh = mesh_of(devices[:1], data=1)
    return jax.jit(call).lower(struct(mesh, (8, 128), jnp.float32))


def matmul_kernel(devices, flops=2 * 512**3):
    """A Pallas kernel that says its cost, and one that does not."""
    from jax.experimental import pallas as pl

    def kernel(x, y, out):
        out[...] = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)

    def call(x, **options):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((512, 512), jnp.float32), **options)(x, x)

    said = pl.CostEstimate(flops=flops, bytes_accessed=3, transcendentals=0)
    mesh = mesh_of(devices[:1], data=1)
    x = struct(mesh, (512, 512), jnp.float32)
    return jax.jit(lambda x: call(x, cost_estimate=said) + call(x)).lower(x)


def kept(devices, rows=2**18, embed=2048):
    """Gradient of eight layers that keep everything, on one device."""
    mesh = mesh_of(devices[:1], data=1)

    def loss(w, x):
        y, _ = jax.lax.scan(lambda x, w: (jax.nn.silu(x @ w), None), x, w)
        return (y.astype(jnp.float32) ** 2).mean()

    w = struct(mesh, (LAYERS, embed, embed), jnp.bfloat16)
    return jax.jit(jax.grad(loss), donate_argnums=0).lower(w, struct(mesh, (rows, embed), jnp.bfloat16))


TOO_LARGE = 2 * 4 * 2**36
"""Device bytes of `too_large`: its argument and its result."""


def too_large(devices):
    """Half a terabyte on one device."""
    mesh = mesh_of(devices[:1], data=1)
    return jax.jit(lambda x: x * 2 + 1).lower(struct(mesh, (2**18, 2**18), jnp.float32))


class FailsLikeTriton:
    """A lowered program whose compiler fails as XLA:GPU does on some products, unless they are a library's."""

    def __init__(self, lowered, options):
        self._lowered = lowered
        self._lowering = types.SimpleNamespace(_compiler_options_kvs=tuple(options.items()))

    def __getattr__(self, name):
        return getattr(self._lowered, name)

    def compile(self, compiler_options):
        options = dict(compiler_options or {})
        if options.pop("xla_gpu_enable_triton_gemm", True):
            raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.1")
        return self._lowered.compile(compiler_options=options or None)


def fails_like_triton(devices, has_option=False):
    return FailsLikeTriton(zero(devices), {"xla_gpu_enable_triton_gemm": True} if has_option else {})
