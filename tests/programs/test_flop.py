import functools

import jax
import jax.numpy as jnp
import pytest
from jax import P, lax
from jax.experimental import pallas as pl

from jaxscale.programs.flop import Flop, count_flop, model_flop


def struct(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def xla_flop(fn, *args) -> float:
    """What the compiler counts; right where there is no loop."""
    return jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("spec", "shapes", "expected"),
    [
        ("mk,kn->mn", [(4, 8), (8, 16)], 2 * 4 * 8 * 16),
        ("bmk,bkn->bmn", [(3, 4, 8), (3, 8, 16)], 2 * 3 * 4 * 8 * 16),
        ("btnh,bsnh->bnts", [(2, 5, 3, 8), (2, 7, 3, 8)], 2 * 2 * 3 * 5 * 7 * 8),
        ("ijk,jki->", [(2, 3, 4), (3, 4, 2)], 2 * 24),
        ("k,k->", [(9,), (9,)], 18),
    ],
)
def test_products(spec, shapes, expected):
    fn = functools.partial(jnp.einsum, spec)
    assert model_flop(fn, *(struct(*shape) for shape in shapes)) == expected


def test_a_gradient_costs_twice_the_forward_pass():
    def loss(w1, w2, x):
        return (jnp.tanh(x @ w1) @ w2).sum()

    args = struct(8, 32), struct(32, 8), struct(16, 8)
    forward = 2 * 16 * 8 * 32 * 2
    assert model_flop(loss, *args) == forward
    # x itself needs no gradient: one product less
    assert model_flop(jax.value_and_grad(loss, argnums=(0, 1)), *args) == 3 * forward - 2 * 16 * 8 * 32
    assert model_flop(jax.value_and_grad(loss, argnums=(0, 1, 2)), *args) == 3 * forward


def test_a_transformer_costs_6nd_and_its_attention():
    B, T, D, N, H, F, V, L = 2, 16, 32, 4, 8, 64, 128, 3

    def block(x, w):
        q, k, v = (jnp.reshape(x @ w[name], (B, T, N, H)) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k), axis=-1)
        x = x + jnp.reshape(jnp.einsum("bnts,bsnh->btnh", scores, v), (B, T, N * H)) @ w["o"]
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    def loss(weights, head, x):
        return jax.nn.logsumexp(lax.scan(block, x, weights)[0] @ head, axis=-1).sum()

    sizes = {"q": (D, N * H), "k": (D, N * H), "v": (D, N * H), "o": (N * H, D), "up": (D, F), "down": (F, D)}
    weights = {name: struct(L, *shape) for name, shape in sizes.items()}
    parameters = L * (4 * D * N * H + 2 * D * F) + D * V
    attention = 12 * B * T * T * N * H * L
    step = jax.value_and_grad(loss, argnums=(0, 1, 2))
    assert model_flop(step, weights, struct(D, V), struct(B, T, D)) == 6 * parameters * B * T + attention


def test_products_agree_with_the_compiler():
    def loss(w, x):
        return ((x @ w["a"]) @ w["b"] @ w["b"].T).sum()

    args = {"a": struct(64, 96), "b": struct(96, 48)}, struct(32, 64)
    step = jax.grad(loss)
    assert model_flop(step, *args) == pytest.approx(xla_flop(step, *args), rel=0.01)


@pytest.mark.parametrize("length", [1, 4])
def test_scan_counts_every_trip(length):
    def fn(x, w, unroll):
        return lax.scan(lambda x, _: (x @ w, None), x, None, length=length, unroll=unroll)[0]

    args = struct(16, 32), struct(32, 32)
    rolled, unrolled = functools.partial(fn, unroll=1), functools.partial(fn, unroll=length)
    assert model_flop(rolled, *args) == length * 2 * 16 * 32 * 32
    assert model_flop(rolled, *args) == pytest.approx(xla_flop(unrolled, *args), rel=0.01)


def test_nested_loops_multiply():
    def fn(x, w):
        def inner(x, _):
            return (x @ w, None)

        return lax.fori_loop(0, 5, lambda _, x: lax.scan(inner, x, None, length=3)[0], x)

    assert model_flop(fn, struct(4, 8), struct(8, 8)) == 15 * 2 * 4 * 8 * 8


def test_while_loops_are_flagged():
    def fn(x):
        return lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x)

    flop = count_flop(fn, struct(8, 8))
    assert (flop.total, flop.unknown_loops) == (2 * 8**3, 1)
    with pytest.raises(ValueError, match="unknown number of trips"):
        model_flop(fn, struct(8, 8))

    # a loop without matrix products does not matter
    def harmless(x):
        return lax.while_loop(lambda x: x < 9, lambda x: x + 1, x)

    assert model_flop(harmless, struct()) == 0


def test_cond_takes_its_dearest_branch():
    def fn(x):
        return lax.switch(x[0, 0].astype(int), [lambda x: x, lambda x: x @ x @ x, lambda x: x @ x], x)

    assert model_flop(fn, struct(8, 8)) == 2 * 2 * 8**3


def test_recomputation_is_counted_where_it_is_traced():
    def block(x, w):
        return jnp.sin(x @ w)

    def loss(x, w, wrap):
        return wrap(block)(wrap(block)(x, w), w).sum()

    args = struct(4, 8), struct(8, 8)
    product = 2 * 4 * 8 * 8
    plain = jax.value_and_grad(functools.partial(loss, wrap=lambda f: f), argnums=(0, 1))
    remat = jax.value_and_grad(functools.partial(loss, wrap=jax.checkpoint), argnums=(0, 1))
    assert model_flop(plain, *args) == 6 * product
    assert model_flop(remat, *args) == 8 * product


def test_custom_rules_and_jit_are_entered_once():
    @jax.custom_vjp
    def square(x):
        return jax.jit(lambda x: x @ x)(x)

    square.defvjp(lambda x: (square(x), x), lambda x, g: (g @ x.T + x.T @ g,))

    @jax.custom_jvp
    def twice(x):
        return x @ x

    twice.defjvp(lambda x, t: (twice(*x), x[0] @ t[0] + t[0] @ x[0]))
    assert model_flop(square, struct(8, 8)) == 2 * 8**3
    assert model_flop(twice, struct(8, 8)) == 2 * 8**3
    assert model_flop(jax.value_and_grad(lambda x: square(x).sum()), struct(8, 8)) == 3 * 2 * 8**3
    assert model_flop(jax.vmap(square), struct(3, 8, 8)) == 3 * 2 * 8**3


def test_shard_map_counts_every_device():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def local(x, w):
        return lax.psum(x @ w, "tensor")

    full = jax.shard_map(local, mesh=mesh, in_specs=(P("data", "tensor"), P("tensor")), out_specs=P("data"))
    assert model_flop(full, struct(8, 16), struct(16, 4)) == 2 * 8 * 16 * 4
    part = jax.shard_map(
        local, mesh=mesh, in_specs=(P(None, "tensor"), P("tensor")), out_specs=P(), axis_names={"tensor"}
    )
    assert model_flop(part, struct(8, 16), struct(16, 4)) == 2 * 8 * 16 * 4


CONVOLUTIONS = {
    "plain": {"window_strides": (1, 1), "padding": "VALID"},
    "padded": {"window_strides": (1, 1), "padding": "SAME"},
    "strided": {"window_strides": (2, 2), "padding": "SAME"},
    "dilated": {"window_strides": (1, 1), "padding": "SAME", "rhs_dilation": (2, 2)},
    "grouped": {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 4},
    "transposed": {"window_strides": (1, 1), "padding": [(1, 1), (1, 1)], "lhs_dilation": (2, 2)},
}


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions_agree_with_the_compiler(options):
    groups = options.get("feature_group_count", 1)
    conv = functools.partial(lax.conv_general_dilated, **options, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    args = struct(2, 9, 11, 8), struct(3, 3, 8 // groups, 16)
    # the CPU compiler rewrites small convolutions as products: ask it before it optimises
    counted = jax.jit(conv).lower(*args).cost_analysis()["flops"]
    assert model_flop(conv, *args) == counted
    gradient = jax.grad(lambda x, w: conv(x, w).sum(), argnums=(0, 1))
    counted = jax.jit(gradient).lower(*args).cost_analysis()["flops"]
    assert model_flop(gradient, *args) == pytest.approx(counted, rel=0.02)


def test_convolution_by_hand():
    conv = functools.partial(lax.conv, window_strides=(2, 2), padding="VALID")
    # NCHW: 1x4x8x8 by 6 kernels of 4x3x3, output 3x3
    assert model_flop(conv, struct(1, 4, 8, 8), struct(6, 4, 3, 3)) == 2 * 6 * 3 * 3 * 4 * 3 * 3


def test_ragged_products_count_each_row_once():
    def fn(x, w):
        return lax.ragged_dot(x, w, jnp.array([2, 4], jnp.int32))

    args = struct(6, 8), struct(2, 8, 4)
    product = 2 * 6 * 8 * 4
    assert model_flop(fn, *args) == product
    assert model_flop(jax.grad(lambda x, w: fn(x, w).sum(), argnums=(0, 1)), *args) == 2 * product


def test_a_kernel_counts_its_estimate_or_its_body():
    def kernel(x, y):
        y[...] = x[...] @ x[...]

    def run(x, **options):
        return pl.pallas_call(kernel, out_shape=struct(16, 8), grid=(2,), in_specs=[spec], out_specs=spec, **options)(x)

    spec = pl.BlockSpec((8, 8), lambda i: (i, 0))
    estimate = pl.CostEstimate(flops=123, transcendentals=0, bytes_accessed=0)
    assert model_flop(run, struct(16, 8)) == 2 * 2 * 8**3
    assert model_flop(functools.partial(run, cost_estimate=estimate), struct(16, 8)) == 123


def test_what_no_result_needs_is_not_counted():
    def fn(x):
        unused = jax.jit(lambda x: (x @ x, x @ x @ x))(x)
        return unused[0]

    assert model_flop(fn, struct(8, 8)) == 2 * 8**3
    assert model_flop(lambda x: (x @ x, x)[1], struct(8, 8)) == 0


def test_flop_adds_and_scales():
    flop = Flop({"dot_general": 3, "add": 1}) + Flop({"dot_general": 4}, unknown_loops=1) * 2
    assert (flop.total, flop.unknown_loops, flop.by_primitive["dot_general"]) == (12, 1, 11)


def test_no_device_holds_the_model():
    huge = struct(2**20, 2**20)
    assert model_flop(lambda x: x @ x, huge) == 2 * 2**60


def test_devices_of_a_pipeline_run_the_branches_of_their_table():
    table = jnp.asarray([[1, 0, 2], [2, 1, 0]])  # ranks and ticks: two actions of each rank, and an idle tick
    mesh = jax.sharding.AbstractMesh((2, 2), ("pipe", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec(("pipe", "data"))

    def run(x):
        row = table[jax.lax.axis_index("pipe")]
        branches = [lambda x: x, lambda x: x @ x, lambda x: x @ x @ x]

        def tick(x, code):
            return jax.lax.cond(code > 0, lambda x: jax.lax.switch(code, branches, x), lambda x: x, x), None

        return jax.lax.scan(tick, x, row)[0]

    fn = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"pipe", "data"}, check_vma=False)
    product = 2 * 8**3
    assert count_flop(fn, struct(4 * 8, 8)).total == 2 * 2 * (1 + 2) * product
