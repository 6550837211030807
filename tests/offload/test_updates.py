"""Every way to apply a rule gives the same weights and state, on one device and sharded, good steps and bad.

And the wrapper of a rule whose state lies on the host: the same updates, and where each array is.
"""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxscale.compiler.compile import compile_report
from jaxscale.compiler.described import abstract_device, lower_for
from jaxscale.errors import UserError
from jaxscale.lowbit.quantize import is_quantized
from jaxscale.lowbit.quantized import quantized_shardings
from jaxscale.lowbit.split_weights import split_weights
from jaxscale.offload.slices import SliceCut, cut
from jaxscale.offload.updates import (
    cuts_of,
    global_norm,
    run_on_host_cpu,
    update_in_slices,
    update_on_device,
    update_on_host,
)
from jaxscale.optim import offload_state, quantize_state
from jaxscale.optim.leaves import leaf_of
from jaxscale.optim.optimizer import Optimizer
from jaxscale.programs.elementwise import first_mixing_primitive
from tests.kernels.aot import gpu_compiler, tpu_compiler
from tests.tiers import variants

SHAPES = {"blocks": {"w": (6, 8, 16), "norm": (6, 8)}, "table": (24, 8), "bias": (8,)}
MASK = jax.tree.map(lambda shape: len(shape) > 2, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
RATE = optax.join_schedules([optax.linear_schedule(0.01, 0.1, 2), optax.cosine_decay_schedule(0.1, 5)], [2])
RULES = {
    "adamw": optax.adamw(RATE, 0.9, 0.95, weight_decay=0.1, mask=MASK),
    "lion": optax.lion(RATE, mask=MASK),
    "momentum": optax.sgd(RATE, momentum=0.9),
    "sgd": optax.sgd(RATE),
    "amsgrad": optax.amsgrad(RATE),
    "by label": optax.partition(
        {"a": optax.adam(RATE), "b": optax.sgd(RATE)}, {"blocks": "a", "table": "b", "bias": "b"}
    ),
}


def trees(places):
    rng = np.random.default_rng(0)

    def tree():
        return jax.tree.map(
            lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
            SHAPES,
            is_leaf=lambda x: isinstance(x, tuple),
        )

    return jax.device_put(tree(), places), [jax.device_put(tree(), places) for _ in range(3)]


def sharded(kind=None):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    specs = {"blocks": {"w": (None, None, "fsdp"), "norm": ()}, "table": ("fsdp",), "bias": ()}
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec(*spec), memory_kind=kind),
        specs,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def run(advance, optimizer, places, *, hosted, weights, clip=None):
    """Three steps, the second of them bad, with the state (and the weights) in host memory where asked."""
    params, gradients = trees(places)
    state = optimizer.init(params)
    host = jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), places)
    whole = jax.tree.leaves(places)[0].mesh
    scalar = NamedSharding(whole, PartitionSpec())
    put = optax.tree.map_params(
        optimizer,
        lambda leaf, s: leaf if isinstance(leaf, optax.MaskedNode) else s,
        state,
        host if hosted else places,
        transform_non_params=lambda _: scalar,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    state = jax.device_put(state, put)
    masters = host if weights else places
    params = jax.device_put(params, masters)
    step = jax.jit(advance, donate_argnums=(1, 2), out_shardings=(masters, put))
    for number, gradient in enumerate(gradients):
        norm = global_norm(gradient)
        params, state = step(gradient, state, params, norm, jnp.array(number != 1))
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(params)}
    assert kinds == ({"pinned_host"} if weights else {"device"})
    return jax.tree.map(np.asarray, (params, state))


def clipped(name):
    return optax.chain(optax.clip_by_global_norm(1.0), RULES[name])


@functools.cache
def on_the_device(name):
    """Weights and state of a clipped rule that is on the device altogether."""
    return run(update_on_device(clipped(name)), clipped(name), sharded(), hosted=False, weights=False)


# whether the weights are on the host; by default a rule with moments, one without a state, and two in parts
WAYS = variants(
    itertools.product(RULES, [False, True]),
    default=[("adamw", False), ("adamw", True), ("sgd", True), ("by label", False)],
)


@pytest.mark.parametrize(("name", "weights"), WAYS)
def test_every_way_gives_the_same(name, weights):
    optimizer, expected = clipped(name), on_the_device(name)
    shapes = jax.tree.map(
        lambda shape, s: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=s),
        SHAPES,
        sharded(),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    for advance in (
        update_in_slices(RULES[name], shapes, clip=1.0, slice_bytes=64),
        update_on_host(RULES[name], clip=1.0),
    ):
        found = run(advance, optimizer, sharded(), hosted=True, weights=weights)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), found, expected)


@pytest.mark.parametrize(
    ("name", "weights"),
    variants([("lamb", False), ("lars", True), ("lamb", True), ("lars", False)], default=2),
)
def test_a_rule_that_treats_layers_one_by_one_is_cut_between_layers(name, weights):
    shapes = jax.tree.map(
        lambda shape, s: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=s),
        SHAPES,
        sharded(),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    axes = {"blocks": {"w": ("layers", "embed", "mlp"), "norm": ("layers", "norm")}, "table": None, "bias": None}
    leaves = jax.tree.map(
        lambda leaf, names: leaf_of("", names, leaf.shape, leaf.sharding),
        shapes,
        axes,
    )
    layers = jax.tree.map(lambda leaf: leaf.stack > 0, leaves)
    assert layers == {"blocks": {"w": True, "norm": True}, "table": False, "bias": False}
    rule = Optimizer(name, learning_rate=0.1).rule(5, leaves)
    places = [leaf.sharding for leaf in jax.tree.leaves(shapes)]
    pieces = [c.pieces for c in cuts_of(rule, shapes, places, 64, layers)]
    assert pieces == [1, 3, 6, 1]  # bias, norm, w, table
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), rule)
    expected = run(update_on_device(optimizer), optimizer, sharded(), hosted=False, weights=False)
    advance = update_in_slices(rule, shapes, clip=1.0, slice_bytes=64, layers=layers)
    after = run(advance, optimizer, sharded(), hosted=True, weights=weights)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), after, expected)


def noisy(x):
    return x + jax.random.normal(jax.random.key(0), x.shape)


@pytest.mark.parametrize(
    ("rule", "culprit"),
    [
        (optax.adamw(1e-3), None),
        (optax.chain(optax.clip(1.0), optax.nadam(1e-3)), None),
        (optax.lamb(1e-3), "reduce_sum"),
        (optax.clip_by_global_norm(1.0), "reduce_sum"),
        (optax.adafactor(1e-3, min_dim_size_to_factor=4), "reduce_sum"),
        (optax.centralize(), "reduce_sum"),
        (optax.stateless(lambda u, p: jax.tree.map(noisy, u)), "random_bits"),
        (optax.GradientTransformation(lambda p: (), lambda u, s, p: (jax.tree.map(jnp.sort, u), s)), "sort"),
        (optax.GradientTransformation(lambda p: (), lambda u, s, p: (jax.tree.map(jnp.cumsum, u), s)), "cumsum"),
    ],
)
def test_a_rule_that_mixes_elements_is_known_by_its_program(rule, culprit):
    params = {"w": jnp.ones((8, 8))}
    mixing_primitive = first_mixing_primitive(rule, params)
    assert (mixing_primitive is None) == (culprit is None), mixing_primitive
    if culprit is not None:
        with pytest.raises(UserError, match="mixes elements"):
            update_in_slices(rule, params)


def test_slices_are_cut_along_a_dim_that_is_whole_on_each_device():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    first, last = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("fsdp",), (None, "fsdp")))
    assert cut((64, 32), 4, None, 1024) == SliceCut(0, 8)
    assert cut((64, 32), 4, last, 256) == SliceCut(0, 4)
    assert cut((64, 32), 4, first, 256) == SliceCut(1, 4)
    assert cut((7, 1024), 4, None, 4096) == SliceCut(0, 7)
    assert cut((64,), 4, first, 4) == SliceCut()  # nothing is whole, so nothing is cut
    assert cut((3, 1024), 4, None, 64) == SliceCut(1, 256), "the dim that gives slices so small"


def test_the_norm_of_gradients_on_the_host_is_that_on_the_device():
    params, _ = trees(sharded())
    hosted = jax.device_put(params, sharded("pinned_host"))
    found = jax.jit(functools.partial(global_norm, shardings=sharded()))(hosted)
    np.testing.assert_allclose(found, optax.tree.norm(params), rtol=1e-6)


WIDE = {"blocks": (4, 256, 16), "bias": (8,)}
LONG = {"blocks": (None, "fsdp"), "bias": ()}


def wide(kind=None):
    """Parameters over eight devices, and three gradients."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    places = {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, spec in LONG.items()}
    rng = np.random.default_rng(0)
    found = [{name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in WIDE.items()} for _ in range(4)]
    params, *gradients = jax.device_put(found, [places] * 4)
    return places, params, gradients


def int8(places):
    return quantize_state(optax.adamw(RATE), "int8", local=places, platform="cpu")


HOSTED = {
    "adamw": (lambda places: optax.adamw(RATE), {}),
    "adamw in int8": (int8, {}),
    "lion": (lambda places: optax.lion(RATE), {}),
    "momentum, half of it": (lambda places: optax.sgd(RATE, momentum=0.9), {"pattern": "blocks"}),
    "lamb by the host": (lambda places: optax.lamb(RATE), {"run": "host"}),
    "adamw in int8 by the host": (int8, {"run": "host"}),
    "clipped outside": (lambda places: optax.adam(RATE), {}),
}
SELDOM = ("adamw in int8 by the host", "clipped outside")


@pytest.mark.parametrize(
    "name",
    variants(
        [pytest.param(n, marks=pytest.mark.slow) if n in SELDOM else n for n in HOSTED],
        default=["adamw", "adamw in int8", "momentum, half of it", "lamb by the host"],
    ),
)
def test_a_wrapped_rule_is_the_rule_with_its_state_on_the_host(name):
    make, options = HOSTED[name]
    places, params, gradients = wide()
    if name == "adamw":
        gradients = jax.tree.map(lambda g: g.astype(jnp.bfloat16), gradients)
    plain = make(places)
    hosted = offload_state(plain, shardings=places, slice_bytes=512, **options)
    if name == "clipped outside":
        plain, hosted = (optax.chain(optax.clip_by_global_norm(1.0), rule) for rule in (plain, hosted))

    def run(rule, donate):
        def step(params, state, gradient):
            updates, state = rule.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        weights, jitted = jax.tree.map(jnp.copy, params), jax.jit(step, donate_argnums=donate)
        seen = [jax.jit(rule.init)(weights) if rule is plain else rule.init(weights)]
        for gradient in gradients:
            weights, state = jitted(weights, seen[-1], gradient)
            seen.append(state)
        return weights, seen

    expected, plain_states = run(plain, ())
    found, states = run(hosted, (0, 1))
    near = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(near, found, expected)
    jax.tree.map(near, states[-1], plain_states[-1])
    for leaf in jax.tree.leaves(states[:-1]):
        assert leaf.is_deleted() or leaf.sharding.memory_kind == "device", "donated"
    for leaf in jax.tree.leaves(found):
        assert leaf.sharding.memory_kind == "device"
    for path, leaf in jax.tree_util.tree_flatten_with_path(states[-1])[0]:
        where = "device" if leaf.ndim == 0 or ("pattern" in options and "bias" in str(path)) else "pinned_host"
        assert leaf.sharding.memory_kind == where, path
        if leaf.ndim > 1:
            assert not leaf.sharding.is_fully_replicated, path


def test_a_state_is_made_beside_its_parameters():
    places, params, _ = wide()
    state = offload_state(int8(places), "nu", shardings=places).init(params)
    for leaf in jax.tree.leaves(state[0].nu):
        assert leaf.sharding.memory_kind == "pinned_host"
    assert state[0].nu["blocks"].scale.sharding.spec == state[0].nu["blocks"].codes.sharding.spec
    assert state[0].nu["blocks"].codes.sharding == places["blocks"].with_memory_kind("pinned_host")
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state[0].mu)} == {"device"}
    jitted = jax.jit(offload_state(optax.lion(0.1), shardings=places).init)(params)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(jitted) if leaf.ndim} == {"pinned_host"}


@pytest.mark.parametrize(
    ("rule", "options", "says"),
    [
        (optax.adam(0.1), {"pattern": "("}, r"pattern '\(' is not a regular expression"),
        (optax.adam(0.1), {"pattern": "trace"}, r"'trace' matches no path of the state's arrays \(0/mu/bias, "),
        (optax.sgd(0.1), {}, "state has no arrays that could lie on the host"),
        (optax.lamb(0.1), {}, r'mixes elements of a tensor \(reduce_sum\).* Use run="host"'),
        (optax.adam(0.1), {"shardings": None}, r"bias lies on a mesh \{'fsdp': 8\}.* Pass shardings="),
        (optax.adam(0.1), {"shardings": {"bias": None}}, "shardings lacks bias; expected a tree like the parameters"),
    ],
)
def test_what_a_wrapper_refuses(rule, options, says):
    places, params, _ = wide()
    with pytest.raises(UserError, match=says):
        offload_state(rule, **{"shardings": places, **options}).init(params)


def test_machines_that_a_wrapper_refuses(monkeypatch):
    places, params, _ = wide()
    with pytest.raises(UserError, match="unknown run 'device'"):
        inspect.unwrap(offload_state)(optax.adam(0.1), run="device")  # as without run-time type checks
    with pytest.raises(UserError, match=r"a CPU of one device.* Leave offload_state out"):
        offload_state(optax.adam(0.1)).init(jax.device_put(params, jax.devices()[0]))
    with pytest.raises(UserError, match=r"0/mu/bias of the state lies on the device. Put it back.* Under a plan"):
        offload_state(optax.adam(0.1), shardings=places).update(params, optax.adam(0.1).init(params), params)
    monkeypatch.setattr("jaxscale.sharding.memory_space.HOST_KIND", "attic")
    with pytest.raises(UserError, match=r"offload_state: cpu \(cpu\) has no memory of kind attic"):
        offload_state(optax.adam(0.1), shardings=places).init(params)


@pytest.mark.parametrize("few", ["int8", "split"])
def test_the_host_of_a_tpu_updates_no_state_in_few_bits(few):
    def shapes(platform):
        chip = jax.sharding.AbstractDevice(platform, None, platform)
        mesh = AbstractMesh((1,), ("fsdp",), axis_types=(AxisType.Auto,), abstract_device=chip)
        place = NamedSharding(mesh, PartitionSpec(), memory_kind="device")
        return {"w": jax.ShapeDtypeStruct((256, 128), jnp.bfloat16, sharding=place)}

    rule = split_weights(optax.adamw(0.1)) if few == "split" else quantize_state(optax.adamw(0.1), few)
    hosted = offload_state(rule, run="host")
    with pytest.raises(UserError, match=r'run="host" with a quantized state or split weights.* use run="streamed"'):
        jax.eval_shape(hosted.init, shapes("tpu"))
    assert jax.eval_shape(hosted.init, shapes("gpu"))


def test_split_weights_treat_each_number_by_itself():
    assert first_mixing_primitive(split_weights(optax.adamw(0.1)), {"w": jnp.ones((8, 8), jnp.bfloat16)}) is None


MATRICES = {"up": (8, 2048, 2048), "down": (16, 1024, 1024)}
NUMBERS = 48 * 2**20


def hosted_step(devices, quantized=False):
    """A step over 192 MiB of weights on one device, whose gradients are products."""
    mesh = AbstractMesh((1,), ("fsdp",), axis_types=(AxisType.Auto,), abstract_device=abstract_device(devices[0]))
    whole = NamedSharding(mesh, PartitionSpec(), memory_kind="device")
    plain = quantize_state(optax.adamw(1e-3), "int8") if quantized else optax.adamw(1e-3)
    rule = offload_state(plain)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole) for name, shape in MATRICES.items()}
    state = jax.eval_shape(rule.init, params)
    host = dict.fromkeys(params, whole.with_memory_kind("pinned_host"))
    spread = optax.tree.map_params(
        rule, lambda _, place: place, state, host, transform_non_params=lambda _: whole, is_leaf=is_quantized
    )
    state = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        state,
        quantized_shardings(state, spread),
    )

    def step(params, state):
        gradients = jax.tree.map(lambda p: jax.lax.map(lambda w: jnp.tanh(w @ w.T) @ w, p), params)
        updates, state = rule.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    out = jax.tree.map(lambda x: x.sharding, (params, state))
    return lower_for(devices, jax.jit(step, donate_argnums=(0, 1), out_shardings=out).trace(params, state))


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize(
    "platform", [pytest.param("tpu v5e:1x1", marks=tpu_compiler), pytest.param("gpu h100 x 1", marks=gpu_compiler)]
)
def test_compiled_the_device_holds_weights_gradients_and_slices(platform, quantized, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # this process's compiler works at its lowest level
    report = compile_report(functools.partial(hosted_step, quantized=quantized), platform, cache=False)
    assert report.crashed is None
    state = NUMBERS * (2 + 8 / 256 if quantized else 8)
    assert report.host_argument_bytes == report.host_alias_bytes == pytest.approx(state, rel=1e-3)
    assert report.host_temp_bytes == 0
    assert report.argument_bytes == pytest.approx(4 * NUMBERS, rel=1e-3)
    assert report.temp_bytes <= 4 * NUMBERS + 80 * 2**20, "gradients, and five slices at most"


def doubled_by_the_host(devices, dtype, shape):
    """Twice an array that lies on the host, by its CPU."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=devices[:1])
    place = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    return jax.jit(lambda x: run_on_host_cpu(lambda x: x + x, (x,), x), out_shardings=place).lower(x)


@tpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "shape", "dies"),
    [("int8", (256, 128), True), ("uint4", (256, 128), True), ("bfloat16", (256, 128), False), ("int8", (256,), False)],
)
def test_what_a_tpu_compiler_dies_of_in_what_the_host_runs(dtype, shape, dies, monkeypatch):
    """Why a state in few bits is refused there: should this fail, a new libtpu takes it, and so may we."""
    monkeypatch.delenv("XLA_FLAGS")  # this process's compiler works at its lowest level
    recipe = functools.partial(doubled_by_the_host, dtype=dtype, shape=shape)
    assert (compile_report(recipe, "tpu v5e:1x1", cache=False).crashed is not None) == dies
