import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax import contrib

from jaxscale.compiler.collectives import collectives
from jaxscale.optim.leaves import leaf_of
from jaxscale.optim.matrix.muon import COEFFICIENTS, muon, newton_schulz, scale_by_muon, scale_factor

AXES = ("layers", "embed", "mlp")


def gradients(shape, seed=0):
    return {"w": jax.random.normal(jax.random.key(seed), shape)}


def test_updates_equal_optax_layer_by_layer():
    shape = (2, 8, 24)
    numbers = {"w": contrib.MuonDimensionNumbers(1, 2)}
    params = gradients(shape, 9)
    theirs = contrib.muon(0.1, weight_decay=0.1, muon_weight_dimension_numbers=numbers)
    ours = muon(0.1, scale="keller", precision="float32", leaves={"w": leaf_of("w", AXES, shape)})

    @jax.jit
    def run(given):
        found = []
        for rule in (theirs, ours):
            state = rule.init(params)
            found.append([])
            for g in given:
                updates, state = rule.update(g, state, params)
                found[-1].append(updates["w"])
        return found

    for expected, found in zip(*run([gradients(shape, step) for step in range(3)]), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_iteration_is_the_polynomial_of_the_singular_values():
    x = gradients((2, 6, 10))["w"]
    u, s, v = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    s = s / np.linalg.norm(s, axis=1, keepdims=True)
    for _ in range(5):
        s = COEFFICIENTS[0] * s + COEFFICIENTS[1] * s**3 + COEFFICIENTS[2] * s**5
    np.testing.assert_allclose(newton_schulz(x), u @ (s[:, :, None] * v), atol=2e-5)
    np.testing.assert_allclose(newton_schulz(x.swapaxes(1, 2)), newton_schulz(x).swapaxes(1, 2), atol=2e-6)
    assert not jnp.any(newton_schulz(jnp.zeros((1, 3, 3))))


def test_bfloat16_is_near_and_moments_stay_float32():
    """6 % at the sizes of a model (`experiments/benchmarks/muon.py`), a little more at these."""
    shape = (2, 64, 256)
    leaves, found = {"w": leaf_of("w", AXES, shape)}, {}
    for precision in ("float32", "bfloat16"):
        rule = scale_by_muon(precision=precision, param_info_tree=leaves)
        updates, state = jax.jit(lambda g, rule=rule: rule.update(g, rule.init(g)))(gradients(shape))
        assert {leaf.dtype for leaf in (updates["w"], state.mu["w"])} == {jnp.dtype("float32")}
        found[precision] = updates["w"]
    apart = jnp.linalg.norm(found["bfloat16"] - found["float32"]) / jnp.linalg.norm(found["float32"])
    assert 1e-4 < apart < 0.1


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (64, 16)])
def test_a_moonshot_update_is_as_large_as_adams(rows, columns):
    """A root mean square of about 0.2, whatever the shape."""
    rule = scale_by_muon(scale="moonshot", precision="float32")
    g = gradients((rows, columns))
    updates = jax.jit(lambda g: rule.update(g, rule.init(g))[0])(g)
    assert 0.15 < float(jnp.sqrt(jnp.mean(jnp.square(updates["w"])))) < 0.25
    assert scale_factor(rows, columns, "keller") == max(1.0, columns / rows) ** 0.5


def test_fused_projections_are_matrices_of_their_own():
    parts = [gradients((8, 8), seed)["w"] for seed in range(3)]
    fused = {"attn": {"c_attn": {"kernel": jnp.concatenate(parts, 1)}}}
    rule = scale_by_muon(precision="float32")
    found, alone = jax.jit(lambda *given: [rule.update(tree, rule.init(tree))[0] for tree in given])(
        fused, {"w": parts[1]}
    )
    np.testing.assert_allclose(found["attn"]["c_attn"]["kernel"][:, 8:16], alone["w"], atol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "spec", "sent"),
    [
        pytest.param({"w": (4, 8, 24)}, PartitionSpec(None, None, "fsdp"), {"all-to-all"}, marks=pytest.mark.slow),
        ({"w": (3, 8, 24)}, PartitionSpec(None, "tensor", "fsdp"), {"all-to-all"}),
        # two of one and two of the other, alike: together they divide
        ({"v": (2, 8, 24), "w": (2, 8, 24), "x": (2, 24, 8)}, PartitionSpec(None, "fsdp"), None),
    ],
    ids=["divides", "padded", "joined"],
)
def test_devices_orthogonalise_whole_layers(shapes, spec, sent):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    place = NamedSharding(mesh, spec)
    params = {name: gradients(shape, i)["w"] for i, (name, shape) in enumerate(shapes.items())}
    placed = {n: jax.device_put(p, place) for n, p in params.items()}
    plain = scale_by_muon(
        precision="float32", param_info_tree={n: leaf_of(n, AXES, p.shape) for n, p in params.items()}
    )
    split = scale_by_muon(
        precision="float32", param_info_tree={n: leaf_of(n, AXES, p.shape, place) for n, p in params.items()}
    )
    expected = jax.jit(lambda g: plain.update(g, plain.init(g))[0])(params)
    state = jax.jit(split.init)(placed)
    compiled = jax.jit(lambda g, s: split.update(g, s)[0]).lower(placed, state).compile()
    found = compiled(placed, state)
    for name, leaf in found.items():
        np.testing.assert_allclose(leaf, expected[name], atol=1e-5)
        assert leaf.sharding.is_equivalent_to(place, 3), leaf.sharding
    kinds = {c.kind for c in collectives(compiled.as_text(), mesh) if c.bytes > 64}
    assert "all-reduce" not in kinds, kinds
    assert sent is None or kinds <= sent, kinds


def test_what_is_no_matrix_gets_adamw():
    params = {"embedding": jnp.ones((6, 4)), "mlp": jnp.ones((4, 4)), "bias": jnp.ones(4)}
    rule, adam = muon(0.1, weight_decay=0.0), optax.adamw(0.1, 0.9, 0.95, weight_decay=0.0)
    given = jax.tree.map(lambda p: jnp.cos(jnp.arange(p.size, dtype=jnp.float32)).reshape(p.shape), params)
    found, expected = jax.jit(lambda: [r.update(given, r.init(params), params)[0] for r in (rule, adam)])()
    np.testing.assert_allclose(found["embedding"], expected["embedding"], rtol=1e-6)
    np.testing.assert_allclose(found["bias"], expected["bias"], rtol=1e-6)
    assert float(abs(found["mlp"] - expected["mlp"]).max()) > 1e-3
