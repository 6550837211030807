"""What kernels say of their cost, as the planner counts it: the same on both platforms."""

import jax
import jax.numpy as jnp
import pytest

from jaxscale.programs.flop import count_flop
from pallas_kernels.adam8.api import Settings, adam8
from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.norm.api import rms_norm
from pallas_kernels.quantize.api import quantize
from pallas_kernels.top_k.api import top_k

M, D, F, E = 512, 256, 128, 4


def given(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def gradients(x, w, sizes, platform):
    return jax.grad(lambda x, w: grouped_matmul(x, w, sizes, platform=platform).astype(jnp.float32).sum(), (0, 1))(x, w)


SIZES = given((E,), jnp.int32)
MOMENT = given((M, D), jnp.uint8), given((M // 128, D), jnp.float32)
PARAMETER = given((M, D), jnp.float32)
ADAM = PARAMETER, PARAMETER, (given((M, D), jnp.int8), MOMENT[1]), MOMENT, given((5,), jnp.float32)
COSTS = {
    "grouped_matmul": (grouped_matmul, (given((M, D)), given((E, D, F)), SIZES), {}, 2 * M * D * F),
    "its gradients": (gradients, (given((M, D)), given((E, D, F)), SIZES), {}, 4 * M * D * F),
    "norm": (rms_norm, (given((M, 1024)), given((1024,), jnp.float32)), {}, 8 * M * 1024),
    "quantize": (quantize, (given((M, 128)),), {"bits": 8, "block": 128, "axis": -1}, 8 * M * 128),
    "top_k": (top_k, (given((M, D)),), {"k": 4, "block": 256, "axis": -1}, 7 * 4 * M * D),
    "adam8": (adam8, ADAM, {"settings": Settings()}, 45 * M * D),
}


@pytest.mark.parametrize("platform", ["tpu v5e", "gpu h200"])
@pytest.mark.parametrize("name", COSTS)
def test_flop_are_those_of_the_definition(name, platform):
    function, args, options, flop = COSTS[name]
    found = count_flop(lambda *args: function(*args, platform=platform, **options), *args)
    kernels = found.by_primitive.get("pallas_call", found.by_primitive.get("ragged_dot_general"))
    assert kernels == flop
