"""Modules with none of our layers, against plain Flax loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxscale import Experiment, Optimizer, build
from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.models.classify import correct_indicators, cross_entropy
from jaxscale.models.foreign import CrossEntropy, ForeignModel, classification, language_model, linen_model
from jaxscale.state.pure_model import PureModel
from tests.models.foreign_nets import LinenNet, Net, assert_close, data, numbers, pure, rngs, sgd_step
from tests.plans import plan_of


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


class Named(nnx.Module):
    """Axis names of its own: one that is mapped, one that is known, one that is neither, and fewer than dims."""

    def __init__(self, rngs, odd="odd", dtype=None):
        glorot = nnx.initializers.glorot_normal()
        self.hidden = nnx.Linear(4, 8, rngs=rngs, kernel_init=nnx.with_partitioning(glorot, (odd, "tp")))
        self.head = nnx.Linear(8, 4, rngs=rngs, kernel_init=nnx.with_partitioning(glorot, ("mlp",)))
        if dtype is not None:
            self.extra = nnx.Param(jnp.ones(3, dtype))

    def __call__(self, images):
        return self.head(jax.nn.relu(self.hidden(images)))


def test_axis_names_that_are_not_ours_are_mapped_or_ignored():
    model = ForeignModel(lambda rngs: Named(rngs), classification(), axes={"tp": "mlp"})
    pure_model = PureModel.of(model, 0)
    assert pure_model.axis_names == {"hidden/kernel": (None, "mlp"), "head/kernel": ("mlp", None)}
    assert pure_model.ignored_axes == ("odd",)
    with pytest.raises(UserError, match=r"unknown logical axis 'mpl'.*mlp"):
        ForeignModel(lambda rngs: Named(rngs), classification(), axes={"tp": "mpl"})
    assert hash(model) == hash(model)


@pytest.mark.parametrize(("dtype", "advice"), [("complex64", "real and imaginary"), ("int32", "no gradient")])
def test_parameters_that_cannot_be_trained_are_named(dtype, advice):
    with pytest.raises(UserError, match=rf"parameter extra: got type {dtype}.*{advice}"):
        PureModel.of(ForeignModel(lambda rngs: Named(rngs, dtype=dtype), classification()), 0)


def test_variables_of_one_name_are_refused():
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Dict({"b": nnx.Param(jnp.ones(2))})
            setattr(self, "a/b", nnx.Param(jnp.ones(2)))

    with pytest.raises(UserError, match="have one name, a/b"):
        PureModel.of(ForeignModel(lambda rngs: Twice(rngs), classification()), 0)


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
    masks = model._run_score(model.score, module, {"x": jnp.ones((100, 50))}, Context(key=jax.random.key(0)))
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
        def key_data(x):
            return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

        return {path: np.array(key_data(v[...])) for path, v in nnx.to_flat_state(nnx.state(module))}

    before = values()
    model.loss(module, data(), Context(key=jax.random.key(0), dtype="bfloat16"))
    after = values()
    assert nnx.graphdef(module) == graphdef
    assert before.keys() == after.keys()
    for path, old in before.items():
        assert (old.shape, old.dtype) == (after[path].shape, after[path].dtype)
        assert np.array_equal(old, after[path]) == (path[-1] not in ("mean", "var", "calls")), path


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


@pytest.mark.parametrize("gathers", [True, False])
def test_labels_of_an_unsigned_type_are_those_of_a_signed_one(gathers, monkeypatch):
    logits = jax.random.normal(jax.random.key(0), (4, 300))
    labels = np.array([0, 9, 3, 200], np.uint8)
    expected = -np.asarray(jax.nn.log_softmax(logits))[np.arange(4), labels]
    monkeypatch.setattr("jaxscale.models.classify.gathers_label_logits", lambda: gathers)  # a TPU sums over all classes
    losses = jax.jit(lambda labels: cross_entropy(logits, labels))
    np.testing.assert_allclose(losses(labels), expected, rtol=1e-6)
    np.testing.assert_array_equal(losses(labels), losses(labels.astype(np.int32)))
    logits = logits[:, :10]
    assert cross_entropy(logits, jnp.asarray(labels))[3] == 0
    assert correct_indicators(logits, jnp.asarray(labels)).shape == (4,)


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


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda module, batch: module(batch["images"]).mean(), "Do not take the mean"),
        (lambda module, batch: module(batch["images"])[:3], "16 rows"),
        (CrossEntropy("image", "labels"), "the batch contains images, labels"),
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


def test_bfloat16_casts_what_the_module_multiplies_and_not_targets_or_time_steps():
    seen = {}

    class Denoiser(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x, times):
            seen.update(x=x.dtype, times=times.dtype)
            return self.linear(x) * jnp.cos(times)[:, None]

    def score(module, batch):
        seen["noise"] = batch["noise"].dtype
        return ((module(batch["x"], times=batch["times"]) - batch["noise"]) ** 2).mean(1)

    model = ForeignModel(Denoiser, score)
    batch = {"x": np.ones((2, 4), np.float32), "times": np.float32([999, 1001]), "noise": np.ones((2, 4), np.float32)}
    for blocks in (None, ("linear",)):
        loss = dataclasses.replace(model, blocks=blocks).loss(model.build(rngs()), batch, Context(dtype="bfloat16"))
        assert {name: str(dtype) for name, dtype in seen.items()} == {
            "x": "bfloat16",
            "times": "float32",
            "noise": "float32",
        }
        exact = model.loss(model.build(rngs()), batch, Context())
        np.testing.assert_allclose(loss.total, exact.total, rtol=0.02)
    assert Denoiser.__call__.__qualname__.endswith("Denoiser.__call__")


def test_a_call_with_rngs_gets_streams_that_follow_from_the_step():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.dropout = nnx.Linear(4, 5, rngs=rngs), nnx.Dropout(0.5)

        def __call__(self, x, *, rngs):
            return self.linear(self.dropout(x, rngs=rngs))

    model = ForeignModel(Noisy, classification())
    module = model.build(rngs())

    def total(key=None, examples=None):
        context = Context(key=None if key is None else jax.random.key(key), examples=examples)
        return float(model.loss(module, data(), context).total)

    rows = jnp.arange(8)
    assert total(1) == total(1) != total(2)
    assert total(1, rows) != total(1, rows + 8)
    assert total() == pytest.approx(
        float(
            -jax.nn.log_softmax(module.linear(data()["images"]))[
                jnp.arange(len(data()["labels"])), data()["labels"]
            ].sum()
        ),
        rel=1e-5,
    )


class Denoiser(nnx.Module):
    def __init__(self, rngs, depth=2):
        self.stem = nnx.Linear(4, 8, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(depth)])
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.head(x)


def noise_error(module, batch, key):
    noise = jax.random.normal(key, batch["images"].shape)
    return ((module(batch["images"] + noise) - noise) ** 2).mean(-1)


def test_a_random_score_gets_a_key_that_follows_from_the_step():
    model = ForeignModel(Denoiser, noise_error)
    module = model.build(rngs())

    def total(key=None):
        return float(model.loss(module, data(), Context(key=None if key is None else jax.random.key(key))).total)

    def metric(key=None):
        key = None if key is None else jax.random.key(key)
        return float(model.metric(noise_error, module, data(), Context(key=key))[0])

    assert total(1) == total(1) != total(2)
    assert total() == total() == pytest.approx(metric())
    plain = dataclasses.replace(model, score=lambda module, batch, scale=2.0: scale * module(batch["images"])[:, 0])
    assert np.isfinite(float(plain.loss(module, data(), Context()).total)), "other defaults stay"
    with pytest.raises(UserError, match=r"\(module, batch, rng\), expected .* 2 arguments and, if it is random, a key"):
        ForeignModel(Denoiser, lambda module, batch, rng: module(batch["images"])[:, 0])


@pytest.mark.parametrize(
    ("plan", "twin"),
    [
        ({"mesh": "fsdp:2", "zero": "3", "memory": "full"}, {"mesh": "1"}),
        ({"mesh": "1", "pipeline": "1f1b:2x2", "stash": "input"}, {"mesh": "1", "microbatches": "2"}),
        *(
            pytest.param(
                {"mesh": "1", "pipeline": pipeline, "stash": "input"},
                {"mesh": "1", "microbatches": "4"},
                marks=pytest.mark.slow,
            )
            for pipeline in ("zb-h1:2x4", "chimera:2x4", "interleaved:2x4,v=2")
        ),
        pytest.param(
            {"mesh": "data:2", "memory": "sqrt", "microbatches": "2"}, {"microbatches": "2"}, marks=pytest.mark.variant
        ),
    ],
)
def test_a_random_score_has_the_noise_of_one_device(plan, twin):
    def figures(fields):
        optimizer = Optimizer("sgd", learning_rate=0.1)
        make = functools.partial(Denoiser, depth=4 if "v=2" in plan.get("pipeline", "") else 2)
        model = ForeignModel(make, noise_error, blocks="layers")
        experiment = Experiment("noise", model, data(), optimizer, steps=2, batch=16)
        step = build(experiment, plan_of(**fields))
        state, metrics = step(step.init(), step.place(data()))
        _, later = step(state, step.place(data()))
        return [float(row[name]) for row in (metrics, later) for name in ("loss", "grad_norm")]

    np.testing.assert_allclose(figures(plan), figures(twin), rtol=2e-5)


def test_the_stages_of_a_pipeline_have_the_same_noise_on_each_device():
    class Unchanged(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, kernel_init=nnx.initializers.zeros, rngs=rngs)

        def __call__(self, x):
            return x + self.linear(x)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Unchanged(rngs) for _ in range(4)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def score(module, batch, key):  # 0 if the noise of the first stage is that of the last one
        noisy = batch["images"] + jax.random.normal(key, batch["images"].shape)
        return ((module(noisy) - noisy) ** 2).mean(-1)

    experiment = Experiment("noise", ForeignModel(Net, score), data(), Optimizer("sgd"), steps=1, batch=16)
    step = build(experiment, plan_of(mesh="data:2", pipeline="1f1b:2x4", stash="input"))
    assert float(step(step.init(), step.place(data()))[1]["loss"]) == 0
