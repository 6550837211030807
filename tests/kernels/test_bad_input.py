"""Bad input that several kernels share: types, sizes and uses that no test of one kernel has.

The rest of the list is in each kernel's own tests: `BAD` there, and what a named implementation says.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.adam8.api import Settings, adam8
from pallas_kernels.adam8.tpu import Tiles as AdamTiles
from pallas_kernels.attention.api import attention
from pallas_kernels.cross_entropy.api import cross_entropy
from pallas_kernels.dispatch import CannotRun
from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.norm import api as norm_api
from pallas_kernels.norm.api import layer_norm, rms_norm
from pallas_kernels.quantize import api as quantize_api
from pallas_kernels.quantize.api import dequantize, quantize
from pallas_kernels.quantize.cases import Case
from pallas_kernels.tiles import Tiles
from pallas_kernels.top_k import api as top_k_api
from pallas_kernels.top_k.api import top_k

ON_TPU = {"implementation": "tpu", "platform": "tpu v5e"}
ON_GPU = {"implementation": "gpu", "platform": "gpu h200"}


def wide(*shape):
    return jnp.zeros(shape or (128, 512), jnp.float64)


def moment(kind):
    return jnp.zeros((128, 512), kind), jnp.zeros((1, 512), jnp.float32)


FLOAT64 = {
    "attention on tpu": (lambda: attention(*(wide(1, 128, 2, 64),) * 3, **ON_TPU), "bfloat16 or float32, not float64"),
    "attention on gpu": (lambda: attention(*(wide(1, 128, 2, 64),) * 3, **ON_GPU), "bfloat16 or float16, not float64"),
    "adam8": (
        lambda: adam8(wide(), wide(), moment(jnp.int8), moment(jnp.uint8), jnp.ones(5)),
        "p float64.*expected float32",
    ),
    "quantize": (lambda: quantize(wide()), "got float64, expected float32 or bfloat16"),
    "top_k": (lambda: top_k(wide(), 2), "got float64, expected float32 or bfloat16"),
    "norm on tpu": (lambda: rms_norm(wide(), wide(512), **ON_TPU), "bfloat16 or float32, not float64"),
    "norm on gpu": (lambda: rms_norm(wide(), wide(512), **ON_GPU), "float16 or float32, not float64"),
    "grouped_matmul": (
        lambda: grouped_matmul(wide(), wide(1, 512, 128), jnp.array([128]), **ON_GPU),
        "bfloat16 or float16, not float64",
    ),
    "cross_entropy": (
        lambda: cross_entropy(wide(), wide(), jnp.zeros(128, int), **ON_TPU),
        "bfloat16 or float32, not float64",
    ),
}


@pytest.mark.parametrize("use", FLOAT64)
def test_no_kernel_takes_float64(use):
    call, said = FLOAT64[use]
    with jax.enable_x64(True), pytest.raises((ValueError, CannotRun), match=said):
        call()


NARROW = {
    "quantize": (lambda: quantize(jnp.zeros((128, 96)), **ON_GPU), "columns that are a multiple of 64, not 96"),
    "quantize rows": (
        lambda: quantize(jnp.zeros((96, 128)), axis=-1, **ON_GPU),
        "rows that are a multiple of 64, not 96",
    ),
    "top_k": (lambda: top_k(jnp.zeros((128, 96)), 2, **ON_GPU), "columns that are a multiple of 64, not 96"),
}


@pytest.mark.parametrize("use", NARROW)
def test_columns_that_a_kernel_cannot_take(use):
    call, said = NARROW[use]
    with pytest.raises(CannotRun, match=said):
        call()


HERE = {
    "attention": lambda x, **how: attention(*(x[None, :, None, :128],) * 3, **how),
    "adam8": lambda x, **how: adam8(x, x, moment(jnp.int8), moment(jnp.uint8), jnp.ones(5), **how),
    "quantize": quantize,
    "top_k": lambda x, **how: top_k(x, 2, **how),
    "rms_norm": lambda x, **how: rms_norm(x, x[0], **how),
    "cross_entropy": lambda x, **how: cross_entropy(x, x, jnp.zeros(128, int), **how)[0],
}


@pytest.mark.parametrize("kernel", HERE)
def test_a_named_kernel_says_why_it_cannot_run_on_arrays_that_are_here(kernel):
    """Without a platform or a mesh: where they are on a CPU, and while a program is traced that may be for a TPU."""
    x = jnp.zeros((128, 512))
    with pytest.raises(CannotRun, match=rf"{kernel}: implementation 'tpu' cannot run: .* the target is cpu"):
        HERE[kernel](x, implementation="tpu")
    run = functools.partial(HERE[kernel], implementation="tpu")
    for program in (jax.jit(run).trace(x), jax.jit(lambda: run(x)).trace()):
        assert "tpu_custom_call" in program.lower(lowering_platforms=("tpu",)).as_text()


def test_cudnn_says_why_it_cannot_run_here():
    x = jnp.zeros((1, 128, 2, 64), jnp.bfloat16)
    with pytest.raises(CannotRun, match="attention: implementation 'cudnn' cannot run: it is for GPUs"):
        attention(x, x, x, implementation="cudnn")


def test_top_k_is_not_interpreted_without_a_name():
    with pytest.raises(ValueError, match="interpret needs a named"):
        top_k(jnp.zeros((128, 128)), 2, interpret=True)


@pytest.mark.parametrize(
    ("kernel", "function"),
    [
        ("grouped_matmul", lambda x: grouped_matmul(x, x[None], jnp.array([128]), **ON_GPU)),
        ("cross_entropy", lambda x: cross_entropy(x, x, jnp.zeros(128, int), **ON_TPU)[0]),
    ],
)
def test_second_derivatives_of_kernels_are_refused(kernel, function):
    def slope(x):
        return jax.grad(lambda x: function(x).astype(jnp.float32).sum())(x).astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match=f"{kernel}: kernels have no second derivatives"):
        jax.jit(jax.grad(slope)).trace(jnp.zeros((128, 128), jnp.bfloat16))


TRACED = {
    "attention": (lambda x, n: inspect.unwrap(attention)(*(x[None, :, None, :64],) * 3, window=n), "window"),
    "attention's cap": (
        lambda x, n: inspect.unwrap(attention)(*(x[None, :, None, :64],) * 3, logit_soft_cap=n),
        "logit_soft_cap",
    ),
    "rms_norm": (lambda x, n: inspect.unwrap(rms_norm)(x, x[0], eps=n), "eps"),
    "top_k": (lambda x, n: inspect.unwrap(top_k)(x, n), "k"),
    "quantize": (lambda x, n: inspect.unwrap(quantize)(x, block=n), "block"),
    "cross_entropy": (lambda x, n: inspect.unwrap(cross_entropy)(x, x, jnp.zeros(128, int), vocab=n), "vocab"),
}


@pytest.mark.parametrize("use", TRACED)
def test_traced_options_are_refused_by_name(use, monkeypatch):
    """Annotations, which tests check, would refuse them first."""
    call, name = TRACED[use]
    monkeypatch.setattr(top_k_api, "_case", inspect.unwrap(top_k_api._case))
    monkeypatch.setattr(quantize_api, "_case", inspect.unwrap(quantize_api._case))
    monkeypatch.setattr(norm_api, "_norm", inspect.unwrap(norm_api._norm))
    kernel = use.partition("'")[0]
    with pytest.raises(ValueError, match=rf"{kernel}: got a traced value as {name}, .* static_argnames='{name}'"):
        jax.jit(lambda n: call(jnp.zeros((128, 512)), n))(2)


LISTS = {
    "segment_ids of keys and queries": (
        lambda x: attention(*(jnp.ones((2, 3, 1, 8)),) * 3, segment_ids=[[0, 0, 1], [0, 1, 1]]),
        "attention: got segment_ids as a list whose members are not arrays, expected one array, or a pair",
    ),
    "segment_ids of one row": (
        lambda x: attention(*(jnp.ones((1, 3, 1, 8)),) * 3, segment_ids=[[0, 0, 1]]),
        r"attention: got segment_ids as a list .* take jnp.asarray\(segment_ids\)",
    ),
    "sizes": (lambda x: grouped_matmul(x, x[None], [64, 64]), "grouped_matmul: got sizes of type list, expected an"),
    "labels": (lambda x: cross_entropy(x, x, [0] * 128), r"cross_entropy: got labels of type list, .*jnp.asarray"),
    "weight": (lambda x: rms_norm(x, [1.0] * 128), "rms_norm: got weight of type list"),
}


@pytest.mark.parametrize("use", LISTS)
def test_lists_are_refused_by_name(use):
    call, says = LISTS[use]
    with pytest.raises(ValueError, match=says):
        call(jnp.ones((128, 128)))


def test_second_derivatives_of_chunks_are_refused():
    def slope(x):
        return jax.grad(lambda x: attention(x, x, x, implementation="chunked").sum())(x).sum()

    with pytest.raises(NotImplementedError, match=r"attention: kernels have no second derivatives .*'reference'"):
        jax.grad(slope)(jnp.ones((1, 8, 1, 8)))


def test_every_function_explains_itself():
    """As attention does: of a call, whose arrays may be described."""
    make = jax.ShapeDtypeStruct
    x, row, whole = make((128, 512), jnp.bfloat16), make((512,), jnp.float32), make((128,), jnp.int32)
    matrices, sizes = make((2, 512, 128), jnp.bfloat16), make((2,), jnp.int8)
    told = (
        rms_norm.explain(x, row, x, platform="tpu v5e"),
        layer_norm.explain(x, row, row, platform="gpu h200"),
        cross_entropy.explain(x, x, whole, vocab=100, platform="tpu v5e"),
        grouped_matmul.explain(x, matrices, sizes, platform="gpu h200"),
    )
    assert [(found.kernel, found.chosen) for found in told] == [
        ("rms_norm", "tpu"),
        ("layer_norm", "gpu"),
        ("cross_entropy", "chunked"),
        ("grouped_matmul", "gpu"),
    ]
    with pytest.raises(ValueError, match="vocab 129"):
        cross_entropy.explain(x, x, whole, vocab=129, platform="tpu v5e")
    with pytest.raises(ValueError, match="quantize: got blocks of 100 along dim -2"):
        quantize.explain(Case("mine", 512, 4096, block=100), "tpu v6e")


def test_kernels_that_round_or_choose_have_no_derivative():
    x = jnp.zeros((256, 128))
    codes = [(jnp.zeros((256, 128), kind), jnp.zeros((2, 128))) for kind in (jnp.int8, jnp.uint8)]
    for kernel, run in (
        ("quantize", lambda x: quantize(x, **ON_TPU)[1].sum()),
        ("top_k", lambda x: top_k(x, 2, block=128, **ON_TPU)[0].sum()),
        ("adam8", lambda x: adam8(x, x, *codes, jnp.ones(5), Settings(block=128), **ON_TPU)[0].sum()),
        ("adam8", lambda x: adam8(x, x, *codes, jnp.ones(5), Settings(block=128), **ON_GPU)[0].sum()),
    ):
        with pytest.raises(NotImplementedError, match=f"{kernel}: kernels have no derivatives; pass implementation="):
            jax.jit(jax.grad(run)).trace(x)


def test_tiles_that_a_case_cannot_take_are_refused():
    x, codes = jnp.zeros((768, 128)), (moment(jnp.int8), moment(jnp.uint8))
    for run in (
        lambda **how: quantize(x, block=64, tiles=Tiles(96, 128), **how),
        lambda **how: top_k(x, 2, block=64, tiles=Tiles(96, 128), **how),
        lambda **how: adam8(
            jnp.zeros((128, 512)), jnp.zeros((128, 512)), *codes, jnp.ones(5), Settings(block=128),
            tiles=AdamTiles(4, 128), **how,
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"got tiles .*expected for these shapes one of Tiles\("):
            run(**ON_TPU)
        with pytest.raises(ValueError, match="tiles belong to the named kernel 'tpu', and not to None"):
            run()


@pytest.mark.parametrize("way", ["chunked", pytest.param("tpu", marks=pytest.mark.slow)])
def test_weights_that_are_all_zero(way):
    x = jax.random.normal(jax.random.key(0), (128, 128))
    how = {"implementation": way, "interpret": way == "tpu"}
    loss = jax.value_and_grad(lambda x: cross_entropy(x, x, jnp.arange(128), jnp.zeros(128), **how)[0])
    total, slope = loss(x)
    assert float(total) == 0
    np.testing.assert_array_equal(slope, 0)


@pytest.mark.parametrize("way", ["ragged", pytest.param("reference", marks=pytest.mark.slow)])
def test_rows_of_no_group_reach_nothing(way):
    """Not even where they are NaN: not the product, not the gradients."""
    x = jnp.ones((8, 4)).at[5:].set(jnp.nan)
    w, sizes = jnp.ones((2, 4, 4)), jnp.array([2, 3])

    def total(x, w):
        y = grouped_matmul(x, w, sizes, implementation=way)
        return y.sum(), y

    slopes, y = jax.grad(total, (0, 1), has_aux=True)(x, w)
    np.testing.assert_array_equal(y[5:], 0)
    assert all(np.isfinite(one).all() for one in (y, *slopes))


@pytest.mark.parametrize("way", ["reference", pytest.param("tpu", marks=pytest.mark.slow)])
def test_an_infinity_comes_out_as_nan_in_its_block_alone(way):
    """Of a codec's block; a NaN is for the caller to keep out."""
    x = jnp.ones((256, 128)).at[3, 5].set(jnp.inf)
    told = np.asarray(dequantize(*quantize(x, implementation=way, interpret=way == "tpu")))
    hurt = ~np.isfinite(told)
    assert hurt[:128, 5].all()
    assert hurt.sum() == 128


def test_state_that_is_not_given_away_stays():
    """The kernel writes where its arguments lie: of those that are not donated it has a copy."""
    moment = (jnp.ones((128, 128), jnp.int8), jnp.ones((1, 128)))
    second = (jnp.ones((128, 128), jnp.uint8), jnp.ones((1, 128)))
    given = (jnp.ones((128, 128)), jnp.ones((128, 128)), moment, second)
    after = adam8(*given, jnp.ones(5), Settings(block=128), implementation="tpu", interpret=True)
    assert float(jnp.abs(after[0] - 1).max()) > 0.1
    assert all(bool((one == 1).all()) for one in jax.tree.leaves(given))
