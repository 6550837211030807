"""Rules that see layers: the same update for layers stacked in one array as for arrays of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.optim.leaves import leaf_of, leaves_of, param_infos_of
from jaxscale.optim.optimizer import Optimizer
from jaxscale.optim.per_layer import by_kind, per_layer

LAYERS = 2
AXES = {
    "mlp": ("layers", "embed", "mlp"),
    "conv": ("layers", None, None, None, "channels"),
    "bias": ("layers", "mlp"),
    "embedding": ("vocab", "embed"),
}
SHAPES = {"mlp": (LAYERS, 4, 6), "conv": (LAYERS, 2, 2, 2, 6), "bias": (LAYERS, 6), "embedding": (5, 4)}
NAMES = {
    "lars": {},
    "lamb": {},
    "muon": {"precision": "float32"},
    "soap": {"every": 2},
    "galore": {"rank": 2, "every": 2},
}


def values(seed=0):
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    # layers of very different norms
    return {
        name: jax.random.normal(key, shape) * jnp.logspace(-1, 1, shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def apart(tree):
    """Each layer an array of its own, kernels as matrices."""
    parts = {}
    for name, leaf in tree.items():
        for layer, part in enumerate(leaf) if AXES[name][0] == "layers" else [("all", leaf)]:
            parts[f"{name}/{layer}"] = part.reshape(-1, part.shape[-1]) if name == "conv" else part
    return parts


def leaves(params):
    return {name: leaf_of(name, AXES[name], leaf.shape) for name, leaf in params.items()}


def leaves_apart(params):
    axes = {"mlp": ("embed", "mlp"), "conv": (None, "channels"), "bias": ("mlp",), "embedding": ("vocab", "embed")}
    return {name: leaf_of(name, axes[name.split("/")[0]], leaf.shape) for name, leaf in params.items()}


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_some_of_the_layers_move_as_they_do_among_all(name):
    """As a stage of a pipeline has them, or a slice that the host sends."""
    rule = Optimizer(name=name, learning_rate=0.1, clip=None).rule(10, leaves(values()))
    params, gradients = values(), values(1)
    update = jax.jit(lambda gradients, params: rule.update(gradients, rule.init(params), params)[0])
    updates = update(gradients, params)
    for layer in range(LAYERS):
        here = [{n: leaf[layer : layer + 1] for n, leaf in tree.items()} for tree in (params, gradients)]
        alone = [{**part, "embedding": tree["embedding"]} for part, tree in zip(here, (params, gradients), strict=True)]
        update_alone = update(alone[1], alone[0])
        for key in ("mlp", "conv", "bias"):
            np.testing.assert_allclose(update_alone[key][0], updates[key][layer], rtol=1e-6)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in ("lamb", "soap") else n for n in NAMES]
)
def test_stacked_layers_and_kernels_move_as_matrices_apart(name):
    rules = Optimizer(name=name, learning_rate=0.1, clip=None, **NAMES[name])
    one, other = rules.rule(10, leaves(values())), rules.rule(10, leaves_apart(apart(values())))
    given = [values(seed) for seed in (1, 2, 3)]

    @jax.jit
    def run(params, given):
        pairs = []
        for rule, form in ((one, lambda tree: tree), (other, apart)):
            weights = form(params)
            state = rule.init(weights)
            for gradients in given:
                updates, state = rule.update(form(gradients), state, weights)
                weights = optax.apply_updates(weights, updates)
            pairs.append((updates, state))
        return pairs

    (stacked, state), (alone, _) = run(values(), given)
    for path, leaf in apart(stacked).items():
        np.testing.assert_allclose(leaf, alone[path], rtol=1e-5, atol=1e-6, err_msg=path)
        assert np.any(np.asarray(leaf)), path
    seen = optax.tree.map_params(one, lambda leaf, param: leaf.shape == param.shape, state, values())
    assert jax.tree.leaves(seen).count(True) >= (1 if name == "lars" else 2)


def test_optax_alone_does_not_see_layers():
    """What `per_layer` is for: were optax to see them, it could go."""
    params, gradients = values(), values(1)
    one = optax.lamb(0.1, weight_decay=0.0)
    ours = Optimizer(name="lamb", learning_rate=0.1, weight_decay=0.0, clip=None, schedule="constant").build(
        1, leaves(params)
    )
    found, expected = jax.jit(
        lambda: [rule.update(gradients, rule.init(params), params)[0]["mlp"] for rule in (one, ours)]
    )()
    ratio = np.asarray(jnp.linalg.norm(found, axis=(1, 2)) / jnp.linalg.norm(expected, axis=(1, 2)))
    assert ratio.max() > 3, ratio


def test_a_state_that_layers_would_share_but_gradients_change_is_refused():
    def update(updates, state, params=None):
        return updates, optax.tree.norm(updates)

    mixing = optax.GradientTransformation(lambda params: jnp.zeros(()), update)
    params = {"mlp": values()["mlp"]}
    rule = per_layer(mixing, leaves(params))
    with pytest.raises(ValueError, match="vmap"):
        rule.update(params, rule.init(params), params)


def test_each_kind_has_its_rule_and_a_state_like_the_parameters():
    rules = {"matrix": optax.scale_by_adam(), "rest": optax.sgd(1.0, momentum=0.9)}
    rule = by_kind(rules, lambda leaf: "matrix" if leaf.kind == "matrix" else "rest", leaves(values()))
    state = rule.init(values())
    adam, (trace, _) = state.states["matrix"], state.states["rest"]
    matrices = {"mlp", "conv"}
    assert {name for name, leaf in adam.mu.items() if leaf.size > 1} == matrices
    assert {name for name, leaf in trace.trace.items() if leaf.size > 1} == set(SHAPES) - matrices
    updates, _ = rule.update(values(1), state, values())
    np.testing.assert_array_equal(updates["bias"], -values(1)["bias"])
    np.testing.assert_allclose(abs(updates["mlp"]), 1.0, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "axes", "shape", "kind", "stack", "parts"),
    [
        ("blocks/layers/attention/q/weight", ("layers", "embed", "heads"), (2, 8, 8), "matrix", 1, 1),
        ("moe/up", ("layers", "expert", "embed", "mlp"), (2, 4, 8, 8), "matrix", 2, 1),
        ("moe/bias", ("layers", "expert", "mlp"), (2, 4, 8), "vector", 2, 1),
        ("blocks/layers/q_norm/weight", ("layers", "heads", "norm"), (2, 4, 8), "vector", 1, 1),
        ("embedding/weight", ("vocab", "embed"), (16, 8), "table", 0, 1),
        ("positions/weight", ("position", "embed"), (16, 8), "table", 0, 1),
        ("head/weight", ("embed", None), (8, 10), "table", 0, 1),
        ("stem/weight", (None, None, None, "channels"), (3, 3, 1, 8), "matrix", 0, 1),
        ("scale", ("embed",), (8,), "vector", 0, 1),
        ("scale", (), (), "vector", 0, 1),
        ("transformer/wte/embedding", None, (16, 8), "table", 0, 1),
        ("lm_head/kernel", None, (8, 16), "table", 0, 1),
        ("attn/c_attn/kernel", None, (8, 24), "matrix", 0, 3),
        ("attn/out/kernel", None, (2, 4, 8), "matrix", 0, 1),
        ("attn/out/bias", None, (8,), "vector", 0, 1),
    ],
)
def test_what_is_known_of_a_parameter(name, axes, shape, kind, stack, parts):
    leaf = leaf_of(name, axes, shape)
    assert (leaf.kind, leaf.stack, leaf.parts) == (kind, stack, parts)
    assert leaf.tensors * leaf.rows * leaf.columns == np.prod(shape)


def test_an_array_of_another_shape_than_its_leaf_stands_for_nothing():
    params = {"w": jnp.ones((4, 4))}
    [found] = param_infos_of(leaves_of(params), {"w": jnp.zeros(1)})
    assert found.kind == "vector"
    assert not found.decays
