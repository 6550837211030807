"""Attention: every implementation is the reference, and the reference is attention."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import attention
from pallas_kernels.attention import tpu
from pallas_kernels.attention.cases import CASES
from tests.kernels import battery


def arrays(case, key):
    keys = jax.random.split(key, 3)
    shapes = ((case.T, case.N), (case.S, case.K), (case.S, case.K))
    made = [
        jax.random.normal(one, (case.B, length, heads, case.H), case.dtype)
        for one, (length, heads) in zip(keys, shapes, strict=True)
    ]
    if not case.segments:
        return tuple(made)

    def ids(length):
        return jnp.minimum(jnp.arange(length) * (case.segments + 1) // length, case.segments)[None].repeat(case.B, 0)

    q_ids = ids(case.T)
    return *made, q_ids, jnp.where(ids(case.S) == case.segments, -1, ids(case.S))


def run(case, implementation, interpret):
    settings = dict(case.options, implementation=implementation, interpret=interpret)
    if implementation == "tpu":
        settings["tiles"] = tpu.Tiles(*(case.tile,) * 6)
    return lambda q, k, v, *ids: attention(q, k, v, segment_ids=ids or None, **settings)


def supports(case, implementation):
    return case.dtype in {"tpu": ("bfloat16", "float32"), "gpu": ("bfloat16", "float16")}[implementation]


SUBJECT = battery.Subject(CASES, arrays, run, differentiable=(0, 1, 2), supports=supports)


@pytest.mark.parametrize(("case", "implementation", "interpret"), battery.parameters(SUBJECT))
def test_battery(case, implementation, interpret, capfd):
    battery.check(SUBJECT, case, implementation, interpret, capfd)
