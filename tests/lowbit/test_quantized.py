"""Any optax rule with its state in a few bits: which leaves, that nothing else changes, and what is refused."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale.errors import UserError
from jaxscale.lowbit.in_blocks import find_reshaper
from jaxscale.lowbit.quantize import decode, is_quantized
from jaxscale.lowbit.quantized import (
    StatePolicy,
    dequantize,
    quantize_state,
    quantized_bytes_and_size,
    quantized_shardings,
)
from tests.tiers import variants

PARAMS = {
    "blocks": {"up": jnp.ones((2, 128, 32)), "norm": jnp.ones((2, 4096)), "small": jnp.ones((4, 4))},
    "embedding": jnp.ones((128, 64)),
    "head": jnp.ones((128, 64)),
}
MASK = {"blocks": {"up": True, "norm": False, "small": True}, "embedding": False, "head": False}
LABELS = {"blocks": {"up": "a", "norm": "b", "small": "b"}, "embedding": "b", "head": "b"}
BOTH = ["mu/up", "nu/up"]
RULES: dict[str, tuple[Callable[[], optax.GradientTransformation], list[str]]] = {
    "adamw": (lambda: optax.adamw(1e-3), BOTH),
    "adamw_bf16": (lambda: optax.adamw(1e-3, mu_dtype=jnp.bfloat16), BOTH),
    "lion": (lambda: optax.lion(1e-3), ["mu/up"]),
    "sgd": (lambda: optax.sgd(0.1, momentum=0.9), ["trace/up"]),
    "amsgrad": (lambda: optax.amsgrad(1e-3), ["mu/up", "nu/up", "nu_max/up"]),
    "lamb": (lambda: optax.lamb(1e-3), BOTH),
    "chain": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), BOTH),
    "masked": (lambda: optax.masked(optax.adamw(1e-3), MASK), BOTH),
    "multi_transform": (lambda: optax.multi_transform({"a": optax.adamw(1e-3), "b": optax.sgd(0.1)}, LABELS), BOTH),
    "inject_hyperparams": (lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3), BOTH),
    "multi_steps": (lambda: optax.MultiSteps(optax.adamw(1e-3), 2).gradient_transformation(), BOTH),
    "schedule_free": (lambda: optax.contrib.schedule_free_adamw(1e-3), ["nu/up"]),
    "ademamix": (lambda: optax.contrib.ademamix(1e-3), ["m1/up", "m2/up", "nu/up"]),
}


def names(state: Any) -> list[str]:
    """Field and parameter of each quantized leaf."""
    found = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_quantized)[0]
    parts = [[getattr(k, "name", getattr(k, "key", None)) for k in path] for path, leaf in found if is_quantized(leaf)]
    return [f"{part[part.index('blocks') - 1]}/{part[-1]}" for part in parts]


@pytest.mark.parametrize(
    "name",
    variants(RULES, default=["adamw", "lion", "sgd", "masked", "multi_transform", "inject_hyperparams", "multi_steps"]),
)
def test_the_moments_of_large_matrices_are_quantized_and_nothing_else(name: str) -> None:
    make, expected = RULES[name]
    rule = quantize_state(make(), "int8")
    state = jax.eval_shape(rule.init, PARAMS)
    assert sorted(names(state)) == sorted(expected)
    plain = jax.eval_shape(make().init, PARAMS)
    assert jax.tree.structure(jax.eval_shape(dequantize, state)) == jax.tree.structure(plain)
    for q in jax.tree.leaves(state, is_leaf=is_quantized):
        if is_quantized(q):
            assert (q.map, q.block) in {("soft8", 128), ("sqrt8", 128)}
    after = jax.eval_shape(rule.update, PARAMS, state, PARAMS)[1]
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(after)] == [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
    # optax's own traversal sees a quantized array as the parameter's
    seen = optax.tree.map_params(
        rule,
        lambda leaf, param: leaf if isinstance(leaf, optax.MaskedNode) else leaf.shape == param.shape,
        state,
        PARAMS,
        transform_non_params=lambda _: True,
        is_leaf=lambda x: is_quantized(x) or isinstance(x, optax.MaskedNode),
    )
    assert all(jax.tree.leaves(seen))


@pytest.mark.parametrize("states", variants(["int8", "int4", "fp8", "dynamic8"], default=3))
def test_a_step_is_the_rules_own_on_the_decoded_state(states: Any) -> None:
    make = RULES["adamw"][0]
    rule, plain = quantize_state(make(), states), make()
    draw = np.random.default_rng(0)
    gradients = jax.tree.map(lambda p: jnp.asarray(draw.normal(size=p.shape), jnp.float32), PARAMS)

    @jax.jit
    def two(gradients: Any) -> Any:
        state = rule.update(gradients, rule.init(PARAMS), PARAMS)[1]
        whole = dequantize(state)
        return state, rule.update(gradients, state, PARAMS), plain.update(gradients, whole, PARAMS)

    state, (updates, after), (expected, whole) = two(gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9), updates, expected)
    moments = whole[0]
    for field in ("mu", "nu"):
        q, exact = getattr(after[0], field)["blocks"]["up"], np.asarray(getattr(moments, field)["blocks"]["up"])
        bound = {"int4": 0.24, "fp8": 0.07}.get(states, 0.02) * np.abs(exact).max()
        assert np.abs(np.asarray(decode(q)) - exact).max() <= bound
        assert np.abs(np.asarray(decode(q)) - exact).max() > 0, "nothing was quantized"
    assert int(state[0].count) == 1
    assert quantized_bytes_and_size(after)[0] / quantized_bytes_and_size(after)[1] == (
        4 / 128 + (0.5 if states == "int4" else 1)
    )


@pytest.mark.parametrize(
    ("platform", "states", "rule"),
    variants(
        [
            ("tpu", "int8", lambda: optax.adamw(1e-3, mask=lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree))),
            ("gpu", "int4", lambda: optax.adamw(1e-3)),
            ("tpu", "int8", lambda: optax.lamb(1e-3)),  # mixes numbers: not in blocks
            ("tpu", "int8", lambda: optax.contrib.schedule_free_adamw(1e-3)),
            ("tpu", "dynamic8", lambda: optax.lamb(1e-3)),
        ],
        default=3,
    ),
)
def test_the_forms_for_tpu_and_gpu_give_the_same_update_and_state(platform: str, states: Any, rule: Any) -> None:
    here, there = (quantize_state(rule(), states, StatePolicy(block=32), platform=where) for where in ("cpu", platform))
    draw = np.random.default_rng(0)
    gradients = jax.tree.map(lambda p: jnp.asarray(draw.normal(size=p.shape), jnp.float32), PARAMS)
    state = here.init(PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(there.update, gradients, state, PARAMS)[1])
    once, again = jax.jit(lambda *a: (here.update(*a), there.update(*a)))(gradients, state, PARAMS)
    for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(again), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.isclose(a, b, rtol=1e-5, atol=1e-9).mean() > 0.999, "more than codes that a rounding tips over"
        assert np.abs(a - b).max() <= 1


def _by_ndim(tree: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim == 3, tree)


def _scaled(function: Any) -> Any:
    rescaled = optax.stateless(lambda updates, _: jax.tree.map(function, updates))
    return optax.chain(rescaled, optax.trace(0.9))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (optax.adamw(1e-3), True),
        (optax.adamw(1e-3, mask=_by_ndim), False),
        (_scaled(lambda g: g * (g.shape[-2] / 64)), False),
        (_scaled(lambda g: g * jnp.float32(g.ndim)), False),
        (_scaled(lambda g: g * jnp.asarray(np.arange(g.size, dtype=np.float32).reshape(g.shape))), False),
    ],
    ids=["adamw", "mask by ndim", "fan-in", "ndim as a number", "an array"],
)
def test_a_rule_that_looks_at_shapes_is_not_run_in_blocks(rule: Any, expected: bool) -> None:
    state = quantize_state(rule, "int8", StatePolicy(block=32)).init(PARAMS)
    assert (find_reshaper(rule, PARAMS, state) is not None) == expected


def test_a_state_without_zero_levels_starts_from_zero_and_other_starts_are_kept() -> None:
    started = quantize_state(optax.rmsprop(1e-3, initial_scale=0.5), "int8").init(PARAMS)
    found = jax.tree.leaves(started, is_leaf=is_quantized)
    np.testing.assert_allclose(decode(next(q for q in found if is_quantized(q))), 0.5)
    for states in ("int8", "dynamic8", "int4", "fp8"):
        program = jax.make_jaxpr(quantize_state(optax.adamw(1e-3), states).init)(PARAMS)  # pyright: ignore[reportArgumentType]
        assert "reduce_max" not in str(program), "zeros are encoded, which XLA folds for seconds"
    assert "reduce_max" in str(jax.make_jaxpr(quantize_state(optax.rmsprop(1e-3, initial_scale=0.5)).init)(PARAMS))


def test_a_bad_gradient_spoils_its_own_places_alone() -> None:
    rule = quantize_state(optax.adamw(1e-3), "int8")
    good = jax.tree.map(jnp.ones_like, PARAMS)
    up = good["blocks"]["up"].at[0, 3, 5].set(jnp.nan).at[1, 7, 9].set(jnp.inf)
    bad = {**good, "blocks": {**good["blocks"], "up": up}}
    step = jax.jit(rule.update)
    _, state = step(bad, rule.init(PARAMS), PARAMS)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(state[0].mu["blocks"]["up"]))
    updates, state = step(good, state, PARAMS)
    assert np.isfinite(np.asarray(updates["blocks"]["up"])).all()
    assert np.isfinite(np.asarray(decode(state[0].nu["blocks"]["up"]))).all()


def test_blocks_divide_every_shard_and_never_lie_along_layers() -> None:
    params = {"w": jnp.ones((96, 64)), "gain": jnp.ones((64, 128))}
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    local = {"w": NamedSharding(mesh, PartitionSpec("fsdp")), "gain": (64, 128)}
    layers = {"w": False, "gain": True}
    rule = quantize_state(optax.lion(1e-3), "int8", local=local, layers=layers)
    state = jax.eval_shape(rule.init, params)
    assert (state[0].mu["w"].block, state[0].mu["w"].scale.shape) == (48, (2, 64))
    assert not is_quantized(state[0].mu["gain"])
    spread = quantized_shardings(state[0].mu["w"], local["w"])
    assert spread.codes == spread.scale == local["w"]


def test_what_is_refused_says_why() -> None:
    large = {"w": jnp.ones((256, 256))}
    with pytest.raises(UserError, match=r"would quantize no leaf.*Adafactor's factors.*Use states='float32'"):
        quantize_state(optax.adafactor(1e-3, multiply_by_parameter_scale=False), "int8").init(large)
    with pytest.raises(UserError, match="would quantize no leaf"):
        quantize_state(optax.sgd(0.1), "int8").init(large)
    with pytest.raises(UserError, match="would quantize no leaf"):
        quantize_state(optax.adamw(1e-3), "int8").init({"w": jnp.ones((8, 8))})
    with pytest.raises(UserError, match="unknown states 'int9'"):
        inspect.unwrap(quantize_state)(optax.sgd(0.1), "int9")  # as without run-time type checks
    with pytest.raises(UserError, match="'acc_grads' must stay float32, because it holds a sum of gradients"):
        StatePolicy(signed=("acc_grads",))
    with pytest.raises(UserError, match="both signed and unsigned"):
        StatePolicy(unsigned=("mu",))
    with pytest.raises(UserError, match="is not a regular expression"):
        StatePolicy(skip="(")
    with pytest.raises(UserError, match="expected a number of elements"):
        StatePolicy(block=0)
    plain = quantize_state(optax.adamw(1e-3), "float32")
    assert not any(is_quantized(x) for x in jax.tree.leaves(jax.eval_shape(plain.init, large), is_leaf=is_quantized))


@pytest.mark.parametrize("states", variants(["int8", "int4"], default=1))
def test_the_optimizer_of_flax_keeps_quantized_moments(states):
    model = nnx.Linear(64, 256, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, quantize_state(optax.adamw(1e-2), states), wrt=nnx.Param)
    x = jnp.ones((2, 64))

    @nnx.jit
    def step(model, optimizer):
        loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(3)]  # the second update reads what the first one stored
    assert losses[2] < losses[1] < losses[0]
    moments = jax.tree.leaves(nnx.as_pure(optimizer.opt_state), is_leaf=is_quantized)
    assert [moment.shape for moment in moments if is_quantized(moment)] == [(64, 256), (64, 256)]
