"""Modules with none of our layers: against plain Flax loops, and under rematerialization of repeated submodules."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxscale import blocks
from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.models.foreign import CrossEntropy, ForeignModel, classification, language_model, linen_model
from jaxscale.models.foreign_blocks import repeated_blocks

nnx.use_eager_sharding(False)


class Calls(nnx.Variable):
    """A variable type of the user's own."""


class Block(nnx.Module):
    def __init__(self, width, rate, rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.calls = Calls(jnp.zeros((), jnp.int32))

    def __call__(self, x, scale, flag):
        assert flag == "static"
        self.calls[...] += 1
        return x + scale * self.dropout(jax.nn.relu(self.norm(self.linear(x))))


class Net(nnx.Module):
    def __init__(self, rngs, rate=0.0, depth=3, width=8):
        self.stem = nnx.Linear(4, width, rngs=rngs)
        self.layers = nnx.List([Block(width, rate, rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, 5, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, jnp.float32(0.5).astype(x.dtype), flag="static")
        return self.head(x)


class LinenNet(linen.Module):
    rate: float = 0.0

    @linen.compact
    def __call__(self, x, train: bool):
        for _ in range(2):
            x = linen.Dense(8)(x)
            x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = linen.Dropout(self.rate, deterministic=not train)(jax.nn.relu(x))
        return linen.Dense(5)(x)


def data(rows=16, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "images": rng.normal(size=(rows, 4)).astype(np.float32),
        "labels": rng.integers(0, 5, rows).astype(np.int32),
    }


def rngs():
    return nnx.Rngs(params=0, dropout=1)


def pure(model):
    """(params, rest, f) with f(params, rest, batch, key) -> (mean loss, rest after), as a train step uses a model."""
    graphdef, params, rest = nnx.split(model.build(rngs()), nnx.Param, ...)

    def f(params, rest, batch, key):
        module = nnx.merge(graphdef, params, rest, copy=True)
        loss = model.loss(module, batch, Context(key=key, examples=jnp.arange(len(batch["labels"]))))
        return loss.total / loss.weight, nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))

    return nnx.to_pure_dict(params), nnx.to_pure_dict(rest), f


def sgd_step(f):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, rest, batch, key):
        (loss, rest), grads = jax.value_and_grad(f, has_aux=True)(params, rest, batch, key)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), rest, loss

    return step


def assert_close(a, b, tolerance):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def numbers(tree):
    """Without rng keys, which numpy cannot compare."""
    return {k: numbers(v) if isinstance(v, dict) else v for k, v in tree.items() if k != "rngs"}


def test_nnx_training_equals_a_plain_nnx_loop():
    batches = [data(seed=seed) for seed in range(4)]
    params, rest, f = pure(ForeignModel(lambda rngs: Net(rngs), classification()))
    step = sgd_step(f)
    losses = []
    for batch in batches:
        params, rest, loss = step(params, rest, batch, jax.random.key(9))
        losses.append(float(loss))

    module = Net(rngs())
    module.train()

    @nnx.jit
    def plain(module, images, labels):
        def mean(module):
            log_p = jax.nn.log_softmax(module(images))
            return -log_p[jnp.arange(len(labels)), labels].mean()

        loss, grads = nnx.value_and_grad(mean)(module)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(module, nnx.Param), grads)
        nnx.update(module, new)
        return loss

    expected = [float(plain(module, batch["images"], batch["labels"])) for batch in batches]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    _, plain_params, plain_rest = nnx.split(module, nnx.Param, ...)
    assert_close(params, nnx.to_pure_dict(plain_params), 1e-5)
    assert_close(numbers(rest), numbers(nnx.to_pure_dict(plain_rest)), 1e-5)
    assert int(rest["layers"][0]["calls"]) == 4


def test_linen_training_equals_a_plain_linen_loop():
    batches = [data(seed=seed) for seed in range(4)]
    net = LinenNet()
    model = linen_model(net, np.ones((1, 4), np.float32), score=classification())
    params, rest, f = pure(model)
    variables = {"params": jax.tree.map(jnp.copy, params), "batch_stats": {}}
    for name, collection in rest.items():
        if name.startswith("BatchNorm"):
            variables["batch_stats"][name] = jax.tree.map(jnp.copy, collection)
    step = sgd_step(f)

    @jax.jit
    def plain(variables, images, labels):
        def mean(params):
            logits, updates = net.apply(variables | {"params": params}, images, train=True, mutable=["batch_stats"])
            return -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels].mean(), updates

        (loss, updates), grads = jax.value_and_grad(mean, has_aux=True)(variables["params"])
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads)} | updates, loss

    for batch in batches:
        params, rest, loss = step(params, rest, batch, jax.random.key(9))
        variables, expected = plain(variables, batch["images"], batch["labels"])
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert_close(params, variables["params"], 1e-5)
    assert_close({k: v for k, v in rest.items() if k in variables["batch_stats"]}, variables["batch_stats"], 1e-5)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_dropout_follows_key_and_microbatch_and_is_off_in_evaluation(kind):
    if kind == "nnx":
        model = ForeignModel(lambda rngs: Net(rngs, rate=0.5), classification())
    else:
        model = linen_model(LinenNet(rate=0.5), jax.ShapeDtypeStruct((1, 4), jnp.float32), score=classification())
    module = model.build(rngs())
    batch = data()

    @jax.jit
    def total(state, key, examples):
        copy = nnx.merge(nnx.graphdef(module), state, copy=True)
        return model.loss(copy, batch, Context(key=key, examples=examples)).total

    state = nnx.state(module)
    first, again = (total(state, jax.random.key(0), jnp.arange(16)) for _ in range(2))
    other_step = total(state, jax.random.key(1), jnp.arange(16))
    other_microbatch = total(state, jax.random.key(0), 16 + jnp.arange(16))
    assert first == again
    assert len({float(first), float(other_step), float(other_microbatch)}) == 3
    evaluated = {float(total(state, None, jnp.arange(16))), float(total(state, None, 16 + jnp.arange(16)))}
    assert len(evaluated) == 1


def test_dropped_share_is_the_rate_and_stacked_generators_get_keys_of_their_own():
    class Masks(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones(()))
            self.rngs = rngs.dropout.split(2)

        def __call__(self, x):
            keys = nnx.vmap(lambda stream: stream())(self.rngs)
            return self.w[...] * jax.vmap(lambda key: jax.random.bernoulli(key, 0.25, x.shape).astype(x.dtype))(keys)

    model = ForeignModel(lambda rngs: Masks(rngs), lambda module, batch: module(batch["x"]).transpose(1, 0, 2))
    module = model.build(rngs())
    masks = model._run(model.score, module, {"x": jnp.ones((100, 50))}, Context(key=jax.random.key(0)))
    assert masks.shape == (100, 2, 50)
    assert abs(float(masks.mean()) - 0.25) < 0.02
    assert not np.array_equal(masks[:, 0], masks[:, 1])


def test_evaluation_uses_running_statistics_and_changes_nothing():
    model = ForeignModel(lambda rngs: Net(rngs, rate=0.5), classification())
    module = model.build(rngs())
    for layer in module.layers:
        layer.norm.mean[...] += 0.3
    before = nnx.to_pure_dict(nnx.state(module))
    loss = model.loss(module, data(), Context())
    after = nnx.to_pure_dict(nnx.state(module))
    assert_close(numbers(before), numbers(after), 0)
    module.eval()
    log_p = jax.nn.log_softmax(module(data()["images"]))
    np.testing.assert_allclose(loss.total, -log_p[jnp.arange(16), data()["labels"]].sum(), rtol=1e-6)


def test_the_callers_module_keeps_mode_types_generators_and_gains_no_variables():
    class Sowing(Net):
        def __call__(self, x):
            self.features = nnx.Intermediate(x)
            return super().__call__(x)

    model = ForeignModel(lambda rngs: Sowing(rngs, rate=0.5), classification())
    module = model.build(rngs())
    graphdef = nnx.graphdef(module)

    def values():
        key_data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
        return {path: np.array(key_data(v[...])) for path, v in nnx.to_flat_state(nnx.state(module))}

    before = values()
    model.loss(module, data(), Context(key=jax.random.key(0), dtype="bfloat16"))
    after = values()
    assert nnx.graphdef(module) == graphdef
    assert before.keys() == after.keys()
    for path, old in before.items():
        assert (old.shape, old.dtype) == (after[path].shape, after[path].dtype)
        assert np.array_equal(old, after[path]) == (path[-1] not in ("mean", "var", "calls")), path


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_remat_per_block_keeps_the_result_and_is_per_block(rate):
    params, rest, f = pure(ForeignModel(lambda rngs: Net(rngs, rate=rate, depth=4), classification()))
    batch, key = data(), jax.random.key(3)
    assert remats(f, params, rest, batch, key) == 0
    (loss, after), grads = value_and_grad(f, params, rest, batch, key)
    with rematerialized():
        assert remats(f, params, rest, batch, key) == 4
        (loss_treated, after_treated), grads_treated = value_and_grad(f, params, rest, batch, key)
    np.testing.assert_allclose(loss, loss_treated, rtol=1e-6)
    assert_close(grads, grads_treated, 1e-6)
    assert_close(numbers(after["layers"][0]), numbers(after_treated["layers"][0]), 1e-6)
    assert int(after_treated["layers"][3]["calls"]) == 1


def rematerialized():
    return blocks.wrapping(lambda block, rolled: jax.checkpoint(block))


def value_and_grad(f, *args):
    """Traced anew: a treatment of blocks is no part of jit's key."""
    return jax.jit(jax.value_and_grad(lambda *args: f(*args), has_aux=True))(*args)


def remats(f, *args):
    jaxpr = jax.make_jaxpr(lambda *args: f(*args))(*args)
    return sum(eqn.primitive.name in ("remat", "remat2", "checkpoint") for eqn in jaxpr.eqns)


def residual_bytes(f, params, *args):
    """Bytes that the backward pass keeps, arguments apart: the leaves of the transposed function."""
    vjp = jax.eval_shape(lambda params: jax.vjp(lambda p: f(p, *args)[0], params)[1], params)
    kept = sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(vjp) if leaf.dtype == jnp.float32)
    return kept - sum(4 * leaf.size for leaf in jax.tree.leaves(params))


def test_remat_per_block_keeps_block_inputs_alone_and_recomputes_each_block_once():
    rows, width, depth = 256, 8, 6
    executed = []

    class Counting(Block):
        def __call__(self, x, scale, flag):
            jax.debug.callback(lambda: executed.append(1))
            return super().__call__(x, scale, flag)

    class CountingNet(Net):
        def __init__(self, rngs):
            super().__init__(rngs, depth=depth)
            self.layers = nnx.List([Counting(width, 0.0, rngs) for _ in range(depth)])

    params, rest, f = pure(ForeignModel(lambda rngs: CountingNet(rngs), classification()))
    batch, key = data(rows), jax.random.key(3)

    def treatments():
        executed.clear()
        jax.block_until_ready(value_and_grad(f, params, rest, batch, key))
        jax.effects_barrier()
        return len(executed), residual_bytes(f, params, rest, batch, key)

    runs, kept = treatments()
    with rematerialized():
        runs_treated, kept_treated = treatments()
    assert (runs, runs_treated) == (depth, 2 * depth)
    inputs = depth * rows * width * 4
    assert inputs <= kept_treated < 1.5 * inputs
    assert kept > 3 * kept_treated


def test_linen_is_one_block():
    model = linen_model(LinenNet(rate=0.5), np.ones((1, 4), np.float32), score=classification())
    params, rest, f = pure(model)
    assert repeated_blocks(model.build(rngs())) == ()
    batch, key = data(), jax.random.key(3)
    (loss, after), grads = value_and_grad(f, params, rest, batch, key)
    with rematerialized():
        assert remats(f, params, rest, batch, key) == 1
        (loss_treated, after_treated), grads_treated = value_and_grad(f, params, rest, batch, key)
    np.testing.assert_allclose(loss, loss_treated, rtol=1e-6)
    assert_close(grads, grads_treated, 1e-6)
    assert_close(after["BatchNorm_1"], after_treated["BatchNorm_1"], 1e-6)


def test_losses_from_variables_that_a_block_creates_survive_remat():
    class Sower(Block):
        def __call__(self, x, scale, flag):
            x = super().__call__(x, scale, flag)
            self.penalty = nnx.Intermediate((x * x).mean())
            return x

    class SowerNet(Net):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.layers = nnx.List([Sower(8, 0.0, rngs) for _ in range(3)])

    def score(module, batch):
        losses = classification()(module, batch)
        return losses + sum(jax.tree.leaves(nnx.pop(module, nnx.Intermediate))).reshape(1)

    params, rest, f = pure(ForeignModel(lambda rngs: SowerNet(rngs), score))
    args = (params, rest, data(), jax.random.key(0))
    (loss, _), grads = value_and_grad(f, *args)
    with rematerialized():
        assert remats(f, *args) == 3
        (loss_treated, _), grads_treated = value_and_grad(f, *args)
    np.testing.assert_allclose(loss, loss_treated, rtol=1e-6)
    assert_close(grads, grads_treated, 1e-6)
    without = pure(ForeignModel(lambda rngs: SowerNet(rngs), classification()))[2]
    assert float(loss) > float(without(*args)[0]) + 0.01


def test_the_class_is_as_before_after_tracing_also_after_an_error():
    class Inherits(Block):
        pass

    class Bad(Block):
        def __call__(self, x, scale, flag):
            raise KeyError("the user's own")

    def net(kind):
        def make(rngs):
            module = Net(rngs)
            module.layers = nnx.List([kind(8, 0.0, rngs) for _ in range(2)])
            return module

        return ForeignModel(make, classification())

    with rematerialized():
        before = Inherits.__call__
        model = net(Inherits)
        model.loss(model.build(rngs()), data(), Context())
        assert Inherits.__call__ is before
        assert "__call__" not in vars(Inherits)
        before = Bad.__call__
        model = net(Bad)
        with pytest.raises(KeyError, match="the user's own"):
            model.loss(model.build(rngs()), data(), Context())
        assert Bad.__call__ is before


def test_which_submodules_repeat():
    class Numbered(nnx.Module):
        def __init__(self, rngs):
            self.block0, self.block1, self.block10 = (Block(8, 0.0, rngs) for _ in range(3))
            self.query1, self.query2 = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))
            self.alone = Block(8, 0.0, rngs)

    class Stages(nnx.Module):  # unlike stages of blocks, of which the first differs: a ResNet's shape
        def __init__(self, rngs):
            self.stages = nnx.List([nnx.List([Block(w, 0.0, rngs) for w in (2, n, n)]) for n in (4, 8)])

    class Sequences(nnx.Module):
        def __init__(self, rngs):
            layer = lambda: nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), jax.nn.relu)  # noqa: E731
            self.body = nnx.Sequential(*(layer() for _ in range(3)), nnx.Linear(8, 2, rngs=rngs))

    class Nested(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Net(rngs, depth=2) for _ in range(2)])

    assert repeated_blocks(Numbered(rngs())) == ("block0", "block1", "block10")
    assert repeated_blocks(Stages(rngs())) == tuple(f"stages/{i}/{j}" for i in range(2) for j in range(3))
    assert repeated_blocks(Sequences(rngs())) == ("body/layers/0", "body/layers/1", "body/layers/2")
    assert repeated_blocks(Nested(rngs())) == ("layers/0", "layers/1")


def test_statistics_are_of_the_global_batch_on_eight_devices():
    params, rest, f = pure(ForeignModel(lambda rngs: Net(rngs), classification()))
    batch = data(32)
    step = jax.jit(jax.value_and_grad(f, has_aux=True))
    (loss, after), grads = step(params, rest, batch, jax.random.key(0))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    (loss8, after8), grads8 = step(
        jax.device_put(params, whole), jax.device_put(rest, whole), jax.device_put(batch, rows), jax.random.key(0)
    )
    np.testing.assert_allclose(loss, loss8, rtol=1e-6)
    assert_close(numbers(after["layers"][0]), numbers(after8["layers"][0]), 1e-5)
    assert_close(grads, grads8, 1e-5)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_bfloat16_reaches_every_matrix_product_and_spares_the_statistics(kind):
    if kind == "nnx":
        model = ForeignModel(lambda rngs: Net(rngs), classification())
    else:
        model = linen_model(LinenNet(), np.ones((1, 4), np.float32), score=classification())
    module = model.build(rngs())

    def f(state, key):
        copy = nnx.merge(nnx.graphdef(module), state, copy=True)
        return model.loss(copy, data(), Context(key=key, dtype="bfloat16")), nnx.state(copy)

    jaxpr = jax.make_jaxpr(f)(nnx.state(module), jax.random.key(0))
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert len(products) == (5 if kind == "nnx" else 3)
    assert {str(eqn.outvars[0].aval.dtype) for eqn in products} == {"bfloat16"}
    loss, state = f(nnx.state(module), jax.random.key(0))
    exact = model.loss(module, data(), Context(key=jax.random.key(0)))
    assert loss.total.dtype == jnp.float32
    np.testing.assert_allclose(loss.total, exact.total, rtol=0.05)
    carried = [v for _, v in nnx.to_flat_state(state) if isinstance(v, nnx.Param | nnx.BatchStat)]
    assert {str(v.dtype) for v in carried} == {"float32"}


def test_weights_and_accuracy():
    model = ForeignModel(lambda rngs: Net(rngs), classification())
    module = model.build(rngs())
    batch = data(8)
    weights = np.array([1, 1, 0, 2, 0, 0, 1, 1], np.float32)
    loss = model.loss(module, batch | {"weights": weights}, Context())
    right, weight = model.accuracy(module, batch | {"weights": weights}, Context())
    module.eval()
    logits = np.asarray(module(batch["images"]))
    each = -np.asarray(jax.nn.log_softmax(logits))[np.arange(8), batch["labels"]]
    np.testing.assert_allclose(loss.total, (each * weights).sum(), rtol=1e-6)
    assert float(loss.weight) == float(weight) == 6
    assert float(right) == ((logits.argmax(1) == batch["labels"]) * weights).sum()
    assert ForeignModel(lambda rngs: Net(rngs), lambda module, batch: module(batch["images"])).accuracy is None


def test_label_smoothing_is_cross_entropy_with_the_smoothed_target():
    module = Net(rngs())
    batch = data()
    losses = classification(smoothing=0.2)(module, batch)
    target = 0.8 * np.eye(5)[batch["labels"]] + 0.2 / 5
    expected = -(target * np.asarray(jax.nn.log_softmax(module(batch["images"])))).sum(-1)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_a_language_model_is_scored_per_token():
    class Bigram(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(11, 11, rngs=rngs)

        def __call__(self, tokens):
            return self.table(tokens)

    model = ForeignModel(lambda rngs: Bigram(rngs), language_model())
    module = model.build(rngs())
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6) % 11
    weights = np.ones((2, 6), np.float32)
    weights[0, :2] = 0
    loss = model.loss(module, {"tokens": tokens, "targets": tokens, "weights": weights}, Context())
    log_p = np.asarray(jax.nn.log_softmax(module.table.embedding[...]))
    assert float(loss.weight) == 10
    np.testing.assert_allclose(loss.total, -(log_p[tokens, tokens] * weights).sum(), rtol=1e-6)


class Silent(Net):
    """Runs its blocks by another name than `__call__`."""

    def __call__(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer.linear(x)
        return self.head(x)


def test_blocks_that_are_never_called_are_refused_only_where_a_plan_needs_them():
    model = ForeignModel(lambda rngs: Silent(rngs), classification())
    module = model.build(rngs())
    model.loss(module, data(), Context())
    with rematerialized():
        with pytest.raises(UserError, match="calls none of them"):
            model.loss(module, data(), Context())
        whole = ForeignModel(model.make, model.score, blocks=())
        assert remats(lambda x: whole.loss(module, data() | {"images": x}, Context()), data()["images"]) == 1
        wrong = ForeignModel(model.make, model.score, blocks=("layer/0",))
        with pytest.raises(UserError, match="did you mean 'layers/0'"):
            wrong.loss(module, data(), Context())


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda module, batch: module(batch["images"]).mean(), "do not take the mean"),
        (lambda module, batch: module(batch["images"])[:3], "16 rows"),
        (CrossEntropy("image", "labels"), "the batch has images, labels"),
        (CrossEntropy("labels", "images"), "expected logits of shape"),
    ],
)
def test_scores_that_cannot_be(score, message):
    class Identity(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones(()))

        def __call__(self, x):
            return self.w[...] * x

    model = ForeignModel(lambda rngs: Identity(rngs), score)
    with pytest.raises(UserError, match=message):
        model.loss(model.build(rngs()), data(), Context())


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda rngs: linen.Dense(3), "linen_model"), (lambda rngs: nnx.Dropout(0.5, rngs=rngs), "without any nnx.Param")],
)
def test_modules_that_cannot_be(make, message):
    with pytest.raises(UserError, match=message):
        ForeignModel(make, classification()).build(rngs())


def test_a_variable_that_changes_shape_is_refused():
    class Growing(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones((4, 5)))
            self.seen = nnx.BatchStat(jnp.zeros(1))

        def __call__(self, x):
            self.seen = nnx.BatchStat(jnp.concatenate([self.seen[...], jnp.ones(1)]))
            return x @ self.w[...]

    model = ForeignModel(lambda rngs: Growing(rngs), classification())
    with pytest.raises(UserError, match="must keep its shape"):
        model.loss(model.build(rngs()), data(), Context(key=jax.random.key(0)))
