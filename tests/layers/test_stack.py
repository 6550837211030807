import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import blocks
from jaxscale.blocks import Context, Treatment
from jaxscale.errors import UserError
from jaxscale.layers.conv import BatchNorm
from jaxscale.layers.dropout import Dropout
from jaxscale.layers.layer_group import restack, unstack
from jaxscale.layers.linear import Linear
from jaxscale.layers.mlp import MLP
from jaxscale.layers.norm import RMSNorm
from jaxscale.layers.stack import Chain, Stack
from tests.tiers import variants


class Block(nnx.Module):
    def __init__(self, size, *, dropout=0.0, rngs):
        self.norm = RMSNorm(size, rngs=rngs)
        self.mlp = MLP(size, 2 * size, dropout=dropout, rngs=rngs)

    def __call__(self, x, *, context=Context(), shift=0.0, scale=1.0, extra=None):
        x = x + scale * self.mlp(self.norm(x), context=context) + shift
        return x if extra is None else (x, extra + jnp.mean(x))


class Counted(nnx.Module):
    """Holds a statistic that every call changes, as batch norm does."""

    def __init__(self, *, rngs):
        self.linear = Linear(4, 4, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(4))

    def __call__(self, x, *, context=Context()):
        self.mean[...] = jnp.mean(x, (0, 1))
        return self.linear(x)


def _stack(layers=3, *, scan=True, dropout=0.0, size=4):
    return Stack(lambda rngs: Block(size, dropout=dropout, rngs=rngs), layers, rngs=nnx.Rngs(0), scan=scan)


def _x(batch=2, length=3, size=4):
    return jax.random.normal(jax.random.key(9), (batch, length, size))


def _by_hand(stack, x, settings=({},)):
    """The blocks one after the other, each an ordinary module."""
    graphdef, state = nnx.split(stack.layers)
    for layer, params in enumerate(unstack(nnx.to_pure_dict(state), stack.count)):
        x = nnx.merge(graphdef, params)(x, **settings[layer % len(settings)])
    return x


def _gradient(stack, x, **call):
    """As the train step takes it: plain nested dict in, structure closed over."""
    graphdef, state = nnx.split(stack)

    def loss(params):
        return jnp.sum(jnp.square(nnx.merge(graphdef, params, copy=True)(x, **call)))

    return jax.jit(jax.grad(loss))(nnx.to_pure_dict(state))


def _close(one, other, tolerance=1e-5):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), one, other)


def test_parameters_are_stacked_named_and_independent_of_the_number_of_layers():
    stack = _stack(3)
    assert stack.layers.mlp.up.weight.shape == (3, 4, 8)
    assert stack.layers.mlp.up.weight.out_sharding == ("layers", "embed", "mlp")
    assert stack.layers.norm.weight.out_sharding == ("layers", "norm")
    np.testing.assert_array_equal(stack.layers.mlp.up.weight[:2], _stack(2).layers.mlp.up.weight[...])
    assert not np.allclose(stack.layers.mlp.up.weight[0], stack.layers.mlp.up.weight[1])
    state = nnx.to_pure_dict(nnx.state(stack.layers))
    _close(restack(unstack(state, 3)), state, 0)


@pytest.mark.parametrize("scan", [True, False])
def test_a_stack_is_its_blocks_in_sequence(scan):
    stack, x = _stack(scan=scan), _x()
    _close(stack(x), _by_hand(stack, x))


def test_scanned_and_unrolled_have_the_same_gradients_with_dropout():
    x, context = _x(), Context(key=jax.random.key(3))
    scanned = _gradient(_stack(dropout=0.5), x, context=context)
    _close(scanned, _gradient(_stack(dropout=0.5, scan=False), x, context=context))
    without = _gradient(_stack(), x)
    assert not np.allclose(scanned["layers"]["mlp"]["up"]["weight"], without["layers"]["mlp"]["up"]["weight"])


@pytest.mark.parametrize("layers", variants([5, 1, 4], default=2))
def test_a_cycle_of_settings_stays_static_and_reaches_its_layers(layers):
    seen = []

    class Watching(Block):
        def __call__(self, x, *, window, **settings):
            seen.append(window)
            return super().__call__(x, scale=window, **settings)

    stack = Stack(lambda rngs: Watching(4, rngs=rngs), layers, rngs=nnx.Rngs(0))
    cycle = ({"window": 2}, {"window": 5})
    y = jax.jit(lambda x: stack(x, cycle=cycle))(_x())
    assert set(seen) == ({2, 5} if layers > 1 else {2})
    assert len(seen) <= 3 + layers % 2
    _close(y, _by_hand(stack, _x(), cycle), 1e-4)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    "cycle",
    variants([pytest.param(({"scale": 1.0}, {"scale": 2.0}), id="two"), pytest.param(({},), id="one")], default=1),
)
def test_per_layer_inputs_and_outputs(scan, cycle):
    stack, x = _stack(scan=scan), _x()
    shifts, extras = jnp.arange(3.0), 10 * jnp.arange(3.0)
    y, found = stack(x, per_layer={"shift": shifts, "extra": extras}, cycle=cycle, outputs=True)
    graphdef, state = nnx.split(stack.layers)
    expected = []
    for layer, params in enumerate(unstack(nnx.to_pure_dict(state), 3)):
        settings = cycle[layer % len(cycle)]
        x, out = nnx.merge(graphdef, params)(x, shift=shifts[layer], extra=extras[layer], **settings)
        expected.append(out)
    _close(y, x, 1e-4)
    _close(found, jnp.stack(expected), 1e-4)


@pytest.mark.parametrize("scan", [True, False])
def test_what_blocks_mutate_is_kept(scan):
    stack = Stack(lambda rngs: Counted(rngs=rngs), 2, rngs=nnx.Rngs(0), scan=scan)
    chain = Chain([Counted(rngs=nnx.Rngs(seed)) for seed in (1, 2)])
    x = _x()
    stack(x)
    chain(x)
    _close(stack.layers.mean[0], jnp.mean(x, (0, 1)))
    _close(stack.layers.mean[1], jnp.mean(x @ stack.layers.linear.weight[0], (0, 1)))
    _close(chain.layers[0].mean[...], jnp.mean(x, (0, 1)))
    _close(chain.layers[1].mean[...], jnp.mean(x @ chain.layers[0].linear.weight[...], (0, 1)))


@pytest.mark.parametrize("scan", [True, False])
def test_every_block_goes_through_wrap_with_its_parameters_as_arguments(scan):
    calls = []

    def wrapper(block, rolled):
        def run(*arguments):
            calls.append((rolled, sum(leaf.size for leaf in jax.tree.leaves(arguments[0]))))
            return jax.checkpoint(block, prevent_cse=not rolled)(*arguments)

        return run

    stack, x = _stack(scan=scan), _x()
    with blocks.wrapping(wrapper):
        wrapped = _gradient(stack, x)
    per_block = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(stack.layers))) // 3
    assert set(calls) == {(scan, per_block)}
    assert len(calls) == (1 if scan else 3)
    _close(wrapped, _gradient(stack, x))


def test_a_chain_is_its_blocks_in_sequence_each_with_its_own_masks():
    chain = Chain([Block(4, rngs=nnx.Rngs(1)), MLP(4, 8, kind="relu", rngs=nnx.Rngs(2)), Linearly()])
    x = _x()
    _close(chain(x), chain.layers[2](chain.layers[1](chain.layers[0](x))))

    twice = Chain([Dropping(), Dropping()])
    kept = twice(jnp.ones((4, 64)), context=Context(key=jax.random.key(0)))
    assert 0.15 < np.mean(np.asarray(kept) == 4.0) < 0.35


class Linearly(nnx.Module):
    def __call__(self, x, *, context=Context()):
        return 2 * x


class Dropping(nnx.Module):
    def __init__(self):
        self.dropout = Dropout(0.5, site="here")

    def __call__(self, x, *, context=Context()):
        return self.dropout(x, context)


def test_remat_in_a_chain_keeps_gradients():
    chain, x = Chain([Block(4, rngs=nnx.Rngs(1)), Block(4, rngs=nnx.Rngs(2))]), _x()
    plain = _gradient(chain, x)
    with blocks.wrapping(lambda block, rolled: jax.checkpoint(block, prevent_cse=not rolled)):
        _close(_gradient(chain, x), plain)


@pytest.mark.parametrize("remat", variants([True, False], default=1))
def test_compiled_cost_is_at_most_that_of_a_scan_written_by_hand(remat):
    size, x = 32, _x(4, 16, 32)
    stack = _stack(4, size=size)
    graphdef, state = nnx.split(stack)
    params = nnx.to_pure_dict(state)

    def ours(params):
        return jnp.sum(jnp.square(nnx.merge(graphdef, params, copy=True)(x)))

    def by_hand(params):
        def body(x, p):
            wide = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
            h = wide * p["norm"]["weight"].reshape(1, 1, -1)
            gate, up = h @ p["mlp"]["gate"]["weight"], h @ p["mlp"]["up"]["weight"]
            return x + (jax.nn.silu(gate) * up) @ p["mlp"]["down"]["weight"], None

        body = jax.checkpoint(body, prevent_cse=False) if remat else body
        return jnp.sum(jnp.square(jax.lax.scan(body, x, params["layers"])[0]))

    def facts(loss):
        compiled = jax.jit(jax.value_and_grad(loss)).lower(params).compile()
        return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes

    wrapper = (lambda block, rolled: jax.checkpoint(block, prevent_cse=not rolled)) if remat else lambda b, _: b
    with blocks.wrapping(wrapper):
        found = facts(ours)
    flop, temp_bytes = facts(by_hand)
    assert 0.98 * flop < found[0] <= 1.005 * flop
    assert found[1] <= 1.005 * temp_bytes


def test_unrolled_iterations_keep_the_result():
    stack, x = _stack(4), _x()
    with blocks.wrapping(lambda block, rolled: block, unroll=2):
        _close(stack(x), _by_hand(stack, x))


class Running(Block):
    """Drops out, and holds running statistics."""

    def __init__(self, rngs):
        super().__init__(4, dropout=0.3, rngs=rngs)
        self.batch = BatchNorm(4, momentum=0.5)

    def __call__(self, x, *, context=Context(), **settings):
        result = super().__call__(x, context=context, **settings)
        y, *extra = result if isinstance(result, tuple) else (result,)
        y = self.batch(y, context=context)
        return (y, *extra) if extra else y


PLAIN = Treatment()


def _everything(stack, treatment=PLAIN):
    """Gradients, outputs and what the blocks left, with dropout, inputs per layer, a cycle, and statistics."""
    graphdef, params, rest = nnx.split(stack, nnx.Param, ...)
    layers = stack.count
    per_layer = {"shift": jnp.linspace(0, 1, layers), "extra": jnp.arange(float(layers))}
    cycle = ({"scale": 1.0}, {"scale": 0.5})

    def loss(params, rest, x):
        inside = nnx.merge(graphdef, params, rest, copy=True)
        context = Context(key=jax.random.key(3))
        with blocks.treating(treatment):
            y, found = inside(x, context=context, per_layer=per_layer, cycle=cycle, outputs=True)
        left = nnx.to_pure_dict(nnx.state(inside, nnx.Not(nnx.Param)))
        return jnp.sum(jnp.square(y)) + jnp.sum(found), (found, left)

    gradients = jax.jit(jax.grad(loss, argnums=(0, 2), has_aux=True))
    (params, x), (found, left) = gradients(nnx.to_pure_dict(params), nnx.to_pure_dict(rest), _x())
    return {"params": _one_stack(params), "x": x, "outputs": found, "left": _one_stack(left)}


def _one_stack(tree):
    """The tree of a stack that was built in groups, as that of one."""
    groups = [tree[name] for name in sorted(tree, key=lambda name: int("0" + "".join(filter(str.isdigit, name))))]
    return groups[0] if len(groups) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *groups)


def _same(found, expected):
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * largest), found, expected)


@pytest.fixture(scope="module")
def untreated():
    return {layers: _everything(Stack(Running, layers, rngs=nnx.Rngs(0))) for layers in (7,)}


def _remat(block, rolled):
    return jax.checkpoint(block, prevent_cse=not rolled)


TREATMENTS = {
    "segments that divide not": Treatment(segment=4),
    "segments of one cycle": Treatment(_remat, segment=1),
    "one segment": Treatment(segment=9),
    "segments, unrolled": Treatment(_remat, unroll=2, segment=4),
    "groups": Treatment(groups=((5, _remat), (2, blocks.identity))),
    "three groups, one of a layer": Treatment(groups=((3, blocks.identity), (1, _remat), (3, _remat))),
    "groups in segments": Treatment(groups=((5, _remat), (2, blocks.identity)), segment=2),
}


LONG = ("segments of one cycle", "segments, unrolled", "three groups, one of a layer", "groups in segments")
"""Treatments whose parts the others have."""


@pytest.mark.parametrize(
    "name",
    variants(
        [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in TREATMENTS],
        default=["segments that divide not", "groups"],
    ),
)
def test_a_treatment_changes_nothing_but_memory(untreated, name):
    _same(_everything(Stack(Running, 7, rngs=nnx.Rngs(0)), TREATMENTS[name]), untreated[7])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in ("segments that divide not", "groups in segments")]
)
def test_a_treatment_of_blocks_that_are_not_scanned(untreated, name):
    _same(_everything(Stack(Running, 7, rngs=nnx.Rngs(0), scan=False), TREATMENTS[name]), untreated[7])


@pytest.mark.parametrize(
    "name", [None, *(pytest.param(name, marks=pytest.mark.slow) for name in ("segments that divide not", "groups"))]
)
def test_groups_with_their_own_parameters_are_the_same_model(untreated, name):
    with blocks.grouping((5, 2)):
        stack = Stack(Running, 7, rngs=nnx.Rngs(0))
    assert stack.layers.mlp.up.weight.shape == (5, 4, 8)
    assert stack.layers_from_5.mlp.up.weight.shape == (2, 4, 8)
    assert stack.layers_from_5.mlp.up.weight.out_sharding == ("layers", "embed", "mlp")
    one = Stack(Running, 7, rngs=nnx.Rngs(0))
    params = _one_stack(nnx.to_pure_dict(nnx.state(stack, nnx.Param)))
    jax.tree.map(np.testing.assert_array_equal, params, nnx.to_pure_dict(nnx.state(one, nnx.Param))["layers"])
    _same(_everything(stack, Treatment() if name is None else TREATMENTS[name]), untreated[7])


def test_a_grouping_is_for_stacks_of_its_depth_alone():
    with blocks.grouping((5, 2)):
        assert _stack(3).groups == (3,)
        with blocks.grouping(()):
            assert _stack(7).groups == (7,)
    assert _stack(7).groups == (7,)


def _inner(eqn):
    """The jaxprs in an equation."""
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                yield one


def _scans(jaxpr):
    """Length of every scan, with those inside it."""
    found = []
    for eqn in jaxpr.eqns:
        inside = [scan for inner in _inner(eqn) for scan in _scans(inner)]
        found += [(eqn.params["length"], inside)] if eqn.primitive.name == "scan" else inside
    return found


def test_a_stack_built_in_groups_is_never_cut():
    """Cutting would copy the parameters: every scan takes a group's own leaves."""
    with blocks.grouping((5, 2)):
        stack = _stack(7)
    graphdef, state = nnx.split(stack)
    treatment = Treatment(groups=((5, _remat), (2, blocks.identity)))

    def run(params, x):
        with blocks.treating(treatment):
            return nnx.merge(graphdef, params, copy=True)(x)

    jaxpr = jax.make_jaxpr(run)(nnx.to_pure_dict(state), _x()).jaxpr
    assert [length for length, _ in _scans(jaxpr)] == [5, 2]
    assert not any(eqn.primitive.name in ("slice", "concatenate", "dynamic_slice") for eqn in jaxpr.eqns)


@pytest.mark.parametrize(("segment", "expected"), [(3, [(2, [(3, [])]), (1, [])]), (7, [(1, [(7, [])])])])
def test_segments_are_a_scan_of_scans(segment, expected):
    stack = _stack(7)
    with blocks.treating(Treatment(segment=segment)):
        jaxpr = jax.make_jaxpr(lambda x: stack(x))(_x()).jaxpr
    assert _scans(jaxpr) == expected


def test_blocks_say_whether_xla_could_merge_their_second_run():
    """In a loop of several iterations it cannot; in a loop of one, or beside the first run, it would."""

    def rolled(treatment, layers=6):
        seen = []

        def wrapper(block, rolled):
            seen.append(rolled)
            return block

        replaced = dataclasses.replace(treatment, wrapper=wrapper)
        if treatment.groups:
            replaced = dataclasses.replace(treatment, groups=tuple((n, wrapper) for n, _ in treatment.groups))
        stack = _stack(layers)
        with blocks.treating(replaced):
            jax.eval_shape(stack, _x())
        return seen

    assert rolled(Treatment()) == [True]
    assert rolled(Treatment(), layers=1) == [False]
    assert rolled(Treatment(unroll=2)) == [False]
    assert rolled(Treatment(segment=3)) == [True]
    assert rolled(Treatment(segment=1)) == [True]
    assert rolled(Treatment(segment=5)) == [True, False]
    assert rolled(Treatment(groups=((5, _remat), (1, _remat)))) == [True, False]


def test_segments_keep_what_enters_them():
    """Bytes of a compiled gradient: ceil(L / K) inputs, and K within a segment, less than one level's L."""
    size, layers, rows = 8, 64, 512

    def temp(treatment):
        stack = Stack(lambda rngs: Block(size, rngs=rngs), layers, rngs=nnx.Rngs(0))
        graphdef, state = nnx.split(stack)

        def loss(params, x):
            with blocks.treating(treatment):
                return jnp.sum(jnp.square(nnx.merge(graphdef, params, copy=True)(x)))

        x = jax.ShapeDtypeStruct((rows, 3, size), jnp.float32)
        memory = jax.jit(jax.grad(loss)).lower(nnx.to_pure_dict(state), x).compile().memory_analysis()
        return memory.temp_size_in_bytes / (rows * 3 * size * 4)

    one, eight = temp(Treatment(_remat)), temp(Treatment(_remat, segment=8))
    assert 64 - 16 - 2 < one - eight < 64 - 16 + 2
    assert abs(temp(Treatment(_remat, segment=16)) - eight - 4) < 1


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Treatment(segment=0), "segment: got 0"),
        (lambda: Treatment(groups=((0, _remat), (7, _remat))), "groups: got 0, 7 layers"),
        (lambda: Treatment(groups=((5, _remat), (1, _remat))).wrapped_ranges(7), r"5 \+ 1 layers, but the stack has 7"),
    ],
)
def test_treatments_check_themselves(make, match):
    with pytest.raises(UserError, match=match):
        make()


def test_no_layers_is_refused():
    with pytest.raises(UserError, match="at least 1"):
        _stack(0)
