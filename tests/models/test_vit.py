"""The ViT against Hugging Face's, and its parts against their definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx

from jaxscale import blocks
from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.models.vit import ViT
from tests.models.goldens import GOLDEN, golden

SMALL = ViT(classes=5, image=8, patch=4, channels=2, layers=3, embed=16, heads=2, mlp=24)


def batch_for(config=SMALL, rows=4, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(rows, config.image, config.image, config.channels)).astype(np.float32)
    return {"images": jnp.asarray(images), "labels": rng.integers(0, config.classes, rows).astype(np.int32)}


@functools.cache
def parts_of(config):
    @nnx.jit
    def build():
        module = config.build(nnx.Rngs(0))
        module.head.weight[...] += 0.1 * jax.random.normal(jax.random.key(1), module.head.weight.shape)
        return module

    return nnx.split(build())


def module_of(config=SMALL):
    """With a head that is not zeros, so that every parameter matters."""
    return nnx.merge(*parts_of(config), copy=True)


def run(module, images, **context):
    return jax.jit(lambda images: module(images, context=Context(**context)))(images)


def pure(config, module):
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def total(params, batch, context):
        return config.loss(nnx.merge(graphdef, params, rest, copy=True), batch, context).total

    return params, total


@pytest.fixture(scope="module")
def hugging_face():
    """The golden's weights in our module: the map of names, written out."""
    config = ViT(classes=10, image=32, patch=8, layers=2, embed=64, heads=4, mlp=128, norm_eps=1e-12)
    module = nnx.jit(lambda: config.build(nnx.Rngs(0)))()
    given = safetensors.numpy.load_file(GOLDEN / "vit" / "model.safetensors")
    taken = set()

    def get(name):
        taken.add(name)
        return given[name]

    def linear(target, *names):
        """From (out, in) to (in, out), stacked over layers where several are named."""
        for part, array in (("weight", lambda a: a.T), ("bias", lambda a: a)):
            arrays = [array(get(f"{name}.{part}")) for name in names]
            getattr(target, part)[...] = jnp.asarray(np.stack(arrays) if names[0].count("layer.") else arrays[0])

    def norm(target, *names):
        for part in ("weight", "bias"):
            arrays = [get(f"{name}.{part}") for name in names]
            getattr(target, part)[...] = jnp.asarray(np.stack(arrays) if names[0].count("layer.") else arrays[0])

    def layers(name):
        return [f"vit.encoder.layer.{layer}.{name}" for layer in range(2)]

    embeddings = "vit.embeddings."
    kernel = get(embeddings + "patch_embeddings.projection.weight")  # (D, C, height, width)
    module.patches.weight[...] = jnp.asarray(kernel.transpose(2, 3, 1, 0).reshape(-1, 64))
    module.patches.bias[...] = jnp.asarray(get(embeddings + "patch_embeddings.projection.bias"))
    module.token[...] = jnp.asarray(get(embeddings + "cls_token")[0, 0])
    module.positions.weight[...] = jnp.asarray(get(embeddings + "position_embeddings")[0])
    block = module.blocks.layers
    norm(block.attention_norm, *layers("layernorm_before"))
    norm(block.mlp_norm, *layers("layernorm_after"))
    for ours, theirs in (("q", "query"), ("k", "key"), ("v", "value")):
        linear(getattr(block.attention, ours), *layers(f"attention.attention.{theirs}"))
    linear(block.attention.out, *layers("attention.output.dense"))
    linear(block.mlp.up, *layers("intermediate.dense"))
    linear(block.mlp.down, *layers("output.dense"))
    norm(module.norm, "vit.layernorm")
    linear(module.head, "classifier")
    assert taken == set(given)
    arrays, figures = golden("vit")
    images = jnp.asarray(arrays["pixel_values"].transpose(0, 2, 3, 1))
    batch = {"images": images, "labels": arrays["labels"].astype(np.int32)}
    return config, module, batch, arrays, figures


def test_logits_are_hugging_faces(hugging_face):
    _, module, batch, arrays, _ = hugging_face
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(jax.jit(module.embed)(batch["images"]), arrays["hidden_states/0"], atol=1e-5)
        np.testing.assert_allclose(run(module, batch["images"]), arrays["logits"], atol=1e-5)


def test_ten_steps_of_adamw_are_hugging_faces(hugging_face):
    config, module, batch, _, figures = hugging_face
    params, total = pure(config, module)
    transformation = optax.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)

    @jax.jit
    def step(params, state):
        with jax.default_matmul_precision("highest"):
            loss, grads = jax.value_and_grad(lambda p: total(p, batch, Context(key=jax.random.key(0))) / 2)(params)
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.tree.norm(grads)

    state = jax.jit(transformation.init)(params)
    losses, norms = [], []
    for _ in range(10):
        params, state, loss, norm = step(params, state)
        losses.append(float(loss))
        norms.append(float(norm))
    np.testing.assert_allclose(losses, figures["train"]["adamw"]["losses"], atol=1e-5)
    np.testing.assert_allclose(norms, figures["train"]["adamw"]["grad_norms"], rtol=1e-4)


def test_a_patch_meets_its_position_alone():
    """What enters the blocks at a position depends on the pixels of its patch, and on no others."""
    module = module_of()
    image = batch_for()["images"][:1]
    touched = jax.jit(jax.jacobian(lambda image: module.embed(image)[0].sum(-1)))(image)[:, 0]  # (positions, 8, 8, 2)
    assert not np.any(touched[0])  # the class token
    for position in range(4):
        row, column = divmod(position, 2)
        own = np.zeros((8, 8), bool)
        own[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = True
        np.testing.assert_array_equal(np.abs(touched[1 + position]).max(-1) > 0, own)


def test_mean_pooling_reads_the_mean_of_the_normed_patches():
    config = ViT(classes=5, image=8, patch=4, channels=2, layers=1, embed=16, heads=2, pooling="mean")
    module = module_of(config)
    assert module.token is None
    assert module.positions.weight.shape == (4, 16)
    images = batch_for(config)["images"]
    expected = jax.jit(lambda images: module.head(module.norm(module.blocks(module.embed(images))).mean(1)))(images)
    np.testing.assert_allclose(run(module, images), expected, atol=1e-6)
    # without a token, every patch looks alike to the rest: with equal positions, their order does not matter
    module.positions.weight[...] = jnp.zeros((4, 16))
    swapped = jnp.concatenate([images[:, 4:], images[:, :4]], axis=1)
    np.testing.assert_allclose(run(module, images), run(module, swapped), atol=1e-5)


def test_the_first_loss_is_that_of_a_uniform_guess_and_weights_count():
    module = SMALL.build(nnx.Rngs(0))
    batch = batch_for()
    loss = jax.jit(lambda batch: SMALL.loss(module, batch, Context()))(batch)
    np.testing.assert_allclose(loss.total / loss.weight, np.log(5), rtol=1e-6)
    module = module_of()
    weights = np.array([1, 0, 2, 0], np.float32)

    @jax.jit
    def everything(batch):
        loss = SMALL.loss(module, batch, Context())
        return loss, SMALL.accuracy(module, batch, Context()), module(batch["images"])

    loss, (right, weight), logits = everything(batch | {"weights": weights})
    each = -np.asarray(jax.nn.log_softmax(logits))[np.arange(4), batch["labels"]]
    np.testing.assert_allclose(loss.total, (each * weights).sum(), rtol=1e-5)
    assert float(loss.weight) == float(weight) == 3
    assert float(right) == ((np.argmax(logits, 1) == batch["labels"]) * weights).sum()


def test_dropout_and_smoothing_act_in_their_places():
    config = ViT(classes=5, image=8, patch=4, channels=2, layers=1, embed=16, heads=2, dropout=0.5, smoothing=0.3)
    module, batch = module_of(config), batch_for(config)
    total = jax.jit(lambda config, batch, context: config.loss(module, batch, context).total, static_argnums=0)
    key = jax.random.key(0)
    quiet, trained = total(config, batch, Context()), total(config, batch, Context(key=key))
    assert quiet == total(config, batch, Context())
    assert not np.isclose(quiet, trained)
    # a row's masks are its own: alone in a microbatch, it gives what it gave among the others
    each = [
        total(config, {n: a[i : i + 1] for n, a in batch.items()}, Context(key=key, examples=jnp.array([i])))
        for i in range(4)
    ]
    np.testing.assert_allclose(sum(each), trained, rtol=1e-5)
    alone = {name: array[2:3] for name, array in batch.items()}
    plain = total(ViT(**{**vars(config), "smoothing": 0.0}), alone, Context())
    uniform = -jax.nn.log_softmax(run(module, alone["images"])).mean()
    np.testing.assert_allclose(total(config, alone, Context()), 0.7 * plain + 0.3 * uniform, rtol=1e-5)


@pytest.mark.variant  # by default: the gradients of a stack under remat, in `tests/layers/test_stack.py`
def test_remat_of_the_blocks_keeps_the_gradients():
    module, batch = module_of(), batch_for()
    params, total = pure(SMALL, module)
    context = Context(key=jax.random.key(0))
    plain = jax.jit(lambda p: jax.grad(total)(p, batch, context))(params)
    with blocks.wrapping(lambda block, rolled: jax.checkpoint(block, prevent_cse=not rolled)):
        treated = jax.jit(lambda p: jax.grad(total)(p, batch, context))(params)
        text = str(jax.make_jaxpr(lambda p: total(p, batch, context))(params))
    assert text.count("checkpoint[") + text.count("remat2[") + text.count("remat[") == 1  # one block, scanned
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), plain, treated)


def test_bfloat16_stays_near_and_gives_float32_gradients():
    module, batch = module_of(), batch_for()
    params, total = pure(SMALL, module)
    exact = jax.jit(total)(params, batch, Context(key=jax.random.key(0)))
    narrow = Context(key=jax.random.key(0), dtype="bfloat16")
    loss, grads = jax.jit(lambda p: jax.value_and_grad(total)(p, batch, narrow))(params)
    assert jax.eval_shape(lambda: module(batch["images"], context=narrow)).dtype == jnp.bfloat16
    assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}
    np.testing.assert_allclose(loss, exact, rtol=0.02)


def test_every_parameter_names_its_axes():
    for pooling in ("token", "mean"):
        module = module_of(ViT(**{**vars(SMALL), "pooling": pooling}))
        for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
            assert len(variable.get_metadata()["out_sharding"]) == variable.ndim, path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patch": 3}, "patch: got 3, expected a divisor of image 8"),
        ({"heads": 3}, "heads: got 3, expected a divisor of embed 16"),
        ({"layers": 0}, "layers: got 0"),
        ({"mlp": 2.5}, "mlp: got 2.5"),
        ({"mlp_kind": "gellu"}, "did you mean 'gelu'"),
        ({"pooling": "cls"}, "got 'cls', expected token or mean"),
        ({"dropout": 1.0}, "dropout: got 1.0"),
        ({"norm_eps": 0.0}, "norm_eps: got 0.0"),
    ],
)
def test_fields_that_cannot_be(fields, message):
    with pytest.raises(UserError, match=message):
        ViT(**{**vars(SMALL), **fields})


def test_images_of_another_size_are_refused():
    with pytest.raises(UserError, match=r"got shape \(1, 8, 8, 3\), expected \(B, 8, 8, 2\)"):
        module_of()(jnp.ones((1, 8, 8, 3)))
