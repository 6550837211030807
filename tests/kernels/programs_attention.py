"""Programs with attention that tests send to compilers for chips that are not here."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import api
from pallas_kernels.attention.api import attention
from tests.kernels.aot import lowered


def structs(case: Any) -> tuple[Any, ...]:
    """Types of q, k, v, and of segment ids where the case has them."""
    shapes = ((case.T, case.N), (case.S, case.K), (case.S, case.K))
    made = [jax.ShapeDtypeStruct((case.B, length, heads, case.H), case.dtype) for length, heads in shapes]
    ids = [jax.ShapeDtypeStruct((case.B, length), jnp.int32) for length in (case.T, case.S)]
    return *made, *(ids if case.segments else [])


def _run(case: Any, implementation: str | None, q: Any, k: Any, v: Any, *ids: Any) -> Any:
    return attention(q, k, v, segment_ids=ids or None, implementation=implementation, **case.options)


def forward(devices: Any, case: Any, implementation: str | None = None) -> Any:
    return lowered(devices, functools.partial(_run, case, implementation), structs(case))


def gradient(devices: Any, case: Any, implementation: str | None = None) -> Any:
    def loss(q: Any, k: Any, v: Any, *ids: Any) -> Any:
        return _run(case, implementation, q, k, v, *ids).astype(jnp.float32).sum()

    return lowered(devices, jax.grad(loss, (0, 1, 2)), structs(case))


def rematerialized(devices: Any, keep: bool, check_vma: bool = True, layers: int = 4) -> Any:
    """A scan over layers under `jax.checkpoint` and `jax.shard_map`, rows and heads sharded: its gradient.

    Args:
        devices: four.
        keep: keep the residuals that attention names; else none.
        check_vma: of `jax.shard_map`.
        layers: of the scan.
    """
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names(*api.NAMES) if keep else policies.nothing_saveable
    place = jax.P("data", None, "model", None)

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x: Any, w: Any) -> Any:
        heads = jnp.einsum("btd,dnh->btnh", x, w)
        q, k, v = heads[:, :, :16], heads[:, :, 16:24], heads[:, :, 24:]
        local = jax.shard_map(attention, in_specs=(place,) * 3, out_specs=place, check_vma=check_vma)
        return x + jnp.einsum("btnh,dnh->btd", local(q, k, v), w[:, :16])

    def loss(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0].astype(jnp.float32).sum()

    args = (
        jax.ShapeDtypeStruct((layers, 1024, 32, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((4, 2048, 1024), jnp.bfloat16),
    )
    specs = (jax.P(None, None, "model", None), jax.P("data"))
    return lowered(devices, jax.grad(loss), args, mesh={"data": 2, "model": 2}, specs=specs)


def parts(devices: Any, check_vma: bool) -> Any:
    """The gradient of attention whose queries are sharded over four devices, keys and values whole on each."""
    place = jax.P(None, "sequence")

    def local(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, query_offset=jax.lax.axis_index("sequence") * q.shape[1])

    def loss(q: Any, k: Any, v: Any) -> Any:
        specs = (place, jax.P(), jax.P())
        out = jax.shard_map(local, in_specs=specs, out_specs=place, check_vma=check_vma)(q, k, v)
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    heads = ((4096, 8), (4096, 2), (4096, 2))
    args = [jax.ShapeDtypeStruct((2, length, count, 128), jnp.bfloat16) for length, count in heads]
    return lowered(devices, jax.grad(loss, (0, 1, 2)), args, mesh={"sequence": 4}, specs=(place, jax.P(), jax.P()))


class Tokens:
    """Batches of which only the shapes are asked for."""

    def shapes(self, rows: int) -> Any:
        return dict.fromkeys(("tokens", "targets"), ((rows, 2048), "int32"))


def experiment() -> Any:
    """A small decoder of long rows, with grouped heads of 128."""
    from jaxscale.models.decoder import Decoder
    from jaxscale.recipe.experiment import Experiment

    model = Decoder(vocab=1024, context=2048, layers=4, embed=512, heads=4, kv_heads=2, head_dim=128, tied=True)
    return Experiment("long rows", model, Tokens(), batch=16)
