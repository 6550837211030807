import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.errors import UserError
from jaxscale.layers.loss import cross_entropy, logits
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.sharding.place import layout
from jaxscale.sharding.rules import AxisRules
from tests.tiers import variants

VOCAB = 13


def _draw(batch=2, length=10, width=8, rows=16, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (batch, length, width)).astype(dtype)
    head = jax.random.normal(keys[1], (rows, width))
    targets = jax.random.randint(keys[2], (batch, length), 0, VOCAB)
    weights = jax.random.uniform(keys[3], (batch, length)).round(1)
    return hidden, head, targets, weights


def _by_hand(hidden, head, targets, weights, *, z_loss=0.0, soft_cap=None):
    hidden, head = np.asarray(hidden, np.float64), np.asarray(head, np.float64)[:VOCAB]
    weights = np.ones(targets.shape) if weights is None else np.asarray(weights, np.float64)
    total = penalty = 0.0
    for index in np.ndindex(targets.shape):
        scores = head @ hidden[index]
        scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
        norm = np.log(np.exp(scores - scores.max()).sum()) + scores.max()
        total += weights[index] * (norm - scores[targets[index]])
        penalty += weights[index] * z_loss * norm**2
    return total, weights.sum(), penalty


def _gradients_by_hand(hidden, head, targets, weights, *, z_loss):
    """Gradients of three times the loss, in float64, and beside each the sum of its terms' magnitudes."""
    hidden, head, weights = (np.asarray(x, np.float64) for x in (hidden, head, weights))
    scores = hidden @ head[:VOCAB].T
    norm = np.log(np.exp(scores).sum(-1))
    chosen = np.eye(VOCAB)[targets]
    probabilities = np.exp(scores - norm[..., None]) * (1 + 2 * z_loss * norm[..., None])
    weight = 3 * weights[..., None]
    padding = ((0, len(head) - VOCAB), (0, 0))

    def sums(d_scores, hidden, head, scores):
        d_head = np.einsum("btv,btd->vd", d_scores, hidden)
        return d_scores @ head, np.pad(d_head, padding), 3 * (norm + scores + z_loss * norm**2)

    picked = (scores * chosen).sum(-1)
    values = sums(weight * (probabilities - chosen), hidden, head[:VOCAB], -picked)
    magnitudes = sums(weight * (probabilities + chosen), abs(hidden), abs(head[:VOCAB]), abs(picked))
    return values, magnitudes


def _gradients(arguments, **settings):
    def trained(hidden, head, weights):
        loss = cross_entropy(hidden, head, arguments[2], weights, vocab=VOCAB, **settings)
        return 3.0 * (loss.total + loss.penalty), loss

    which = (0, 1) if arguments[3] is None else (0, 1, 2)
    return jax.jit(jax.value_and_grad(trained, which, has_aux=True))(arguments[0], arguments[1], arguments[3])


SETTINGS = {"plain": {}, "z": {"z_loss": 0.1}, "cap": {"soft_cap": 2.0, "z_loss": 0.01}}


@pytest.mark.parametrize(
    ("case", "chunk", "weighted"),
    variants(
        [("cap", None, False), ("z", 5, True), ("plain", None, True), ("plain", 4, False), ("cap", 3, True)], default=2
    ),
)
def test_sums_are_the_formulas(case, chunk, weighted):
    hidden, head, targets, weights = _draw()
    weights = weights if weighted else None
    found = jax.jit(lambda *x: cross_entropy(*x, vocab=VOCAB, chunk=chunk, **SETTINGS[case]))(
        hidden, head, targets, weights
    )
    np.testing.assert_allclose(found, _by_hand(hidden, head, targets, weights, **SETTINGS[case]), rtol=1e-6)


@pytest.mark.parametrize(
    ("case", "chunk", "weighted"),
    variants([("plain", 5, False), ("cap", 3, True), ("z", 1, True)], default=2),
)
def test_chunked_gradients_are_the_plain_ones(case, chunk, weighted):
    arguments = _draw() if weighted else (*_draw()[:3], None)
    plain = _gradients(arguments, **SETTINGS[case])
    found = _gradients(arguments, chunk=chunk, **SETTINGS[case])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=3e-6), found, plain)


@pytest.mark.parametrize("chunk", [None, 3])
def test_the_sum_over_words_of_a_tpu_gives_what_a_gather_gives(chunk, monkeypatch):
    hidden, head, targets, weights = _draw()
    arguments = (hidden, head, targets.at[0, 3].set(-100).at[1, 2].set(VOCAB), weights)  # both targets do not count
    gathered = _gradients(arguments, chunk=chunk, **SETTINGS["cap"])
    monkeypatch.setattr("jaxscale.layers.loss.gathers_label_logits", lambda: False)
    summed = _gradients(arguments, chunk=chunk, **SETTINGS["cap"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), summed, gathered)


def test_padding_rows_take_no_part():
    hidden, head, targets, weights = _draw()
    for chunk in (None, 3):
        (_, loss), gradients = _gradients((hidden, head.at[VOCAB:].set(1e4), targets, weights), chunk=chunk)
        np.testing.assert_allclose(loss.total, _by_hand(hidden, head, targets, weights)[0], rtol=1e-6)
        assert not np.asarray(gradients[1][VOCAB:]).any()
        assert np.asarray(gradients[1][:VOCAB]).all()
    assert bool(jnp.all(jnp.isneginf(logits(hidden, head, vocab=VOCAB)[..., VOCAB:])))


def test_a_target_that_does_not_count_may_be_any_number():
    hidden, head, targets, weights = _draw()
    weights = weights.at[0, 3].set(0.0)
    for chunk in (None, 3):
        score = jax.jit(
            lambda targets, chunk=chunk: cross_entropy(hidden, head, targets, weights, vocab=VOCAB, chunk=chunk)
        )
        np.testing.assert_array_equal(score(targets.at[0, 3].set(1)), score(targets.at[0, 3].set(-100)))


def test_mixed_precision_scores_in_float32_and_keeps_the_head_gradient_unrounded():
    hidden, head, targets, weights = _draw(length=64, dtype=jnp.bfloat16)
    rounded = head.astype(jnp.bfloat16).astype(jnp.float32)
    _, (_, wide, _) = _gradients((hidden.astype(jnp.float32), rounded, targets, weights))
    expected = _by_hand(hidden.astype(jnp.float32), rounded, targets, weights)[0]
    for chunk in (None, 16):
        (_, loss), (d_hidden, d_head, _) = _gradients((hidden, head, targets, weights), chunk=chunk)
        np.testing.assert_allclose(loss.total, expected, rtol=1e-6)
        assert d_hidden.dtype == jnp.bfloat16
        assert d_head.dtype == jnp.float32
        np.testing.assert_allclose(d_head, wide, rtol=2e-2, atol=5e-2)


def test_chunks_hold_no_whole_logits_and_cost_no_more_products():
    def facts(chunk):
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.eval_shape(lambda: _draw(4, 256, 32, 1024))]

        def trained(hidden, head, targets, weights):
            loss = cross_entropy(hidden, head, targets, weights, vocab=1000, chunk=chunk)
            return loss.total + loss.penalty

        lowered = jax.jit(jax.grad(trained, (0, 1))).lower(*shapes)
        return lowered.as_text().count("dot_general"), lowered.compile().memory_analysis().temp_size_in_bytes

    (plain_products, plain), (products, chunked) = facts(None), facts(8)
    logits_bytes = 4 * 256 * 1024 * 4
    assert plain > logits_bytes
    assert chunked < min(logits_bytes / 2, plain / 4)
    assert products == plain_products == 3


@pytest.mark.parametrize(
    ("mesh", "chunk"),
    variants(
        [("data:4,tensor:2", None), ("fsdp:2,sequence:2,tensor:2", 3), ("data:4,tensor:2", 3)],
        default=2,
    ),
)
def test_a_mesh_gives_the_same(mesh, chunk):
    arguments = _draw(batch=4)
    expected, magnitudes = _gradients_by_hand(*arguments, z_loss=0.1)
    total, weight, penalty = _by_hand(*arguments, z_loss=0.1)
    spec = MeshSpec.parse(mesh)
    devices, rules = spec.build(), AxisRules()
    with layout(devices, rules):
        rows = NamedSharding(devices, PartitionSpec(("replica", "data", "fsdp"), "sequence"))
        vocab = NamedSharding(devices, PartitionSpec("tensor"))
        placed = [jax.device_put(x, vocab if i == 1 else rows) for i, x in enumerate(arguments)]
        (objective, loss), gradients = _gradients(placed, chunk=chunk, z_loss=0.1)
    np.testing.assert_allclose([objective, *loss], [3 * (total + penalty), total, weight, penalty], rtol=1e-6)
    rounding = 8 * np.finfo(np.float32).eps
    for value, exact, magnitude in zip(gradients, expected, magnitudes, strict=True):
        assert (abs(value - exact) <= rounding * magnitude).all()


def test_the_head_gradient_crosses_devices_once_outside_the_scan():
    hidden, head, targets, weights = _draw(batch=8, length=16)
    devices, rules = MeshSpec.parse("data:8").build(), AxisRules()
    with layout(devices, rules):
        rows = NamedSharding(devices, PartitionSpec("data"))
        whole = NamedSharding(devices, PartitionSpec())

        def trained(hidden, head):
            return cross_entropy(hidden, head, targets, weights, vocab=VOCAB, chunk=4).total

        step = jax.jit(jax.grad(trained, (0, 1)), in_shardings=(rows, whole), out_shardings=(rows, whole))
        text = step.lower(hidden, head).compile().as_text()
    computation, found = "", []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line
        if " all-reduce(" in line and "16,8]" in line:
            found.append(computation)
    assert len(found) == 1
    assert found[0].startswith("ENTRY")


@pytest.mark.parametrize(
    ("settings", "message"), [({"vocab": 20}, "16 rows"), ({"vocab": 13, "chunk": 0}, "at least 1")]
)
def test_refused(settings, message):
    with pytest.raises(UserError, match=message):
        cross_entropy(*_draw(), **settings)
