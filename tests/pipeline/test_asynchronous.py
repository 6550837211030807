"""Asynchronous pipelines against references that know no table: one loop, one device, the weights of some updates ago.

The stage is a residual layer whose backward is written out by hand, so that a backward may use other weights than its
forward.
"""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxscale.errors import UserError
from jaxscale.pipeline.run.asynchronous import AdvanceResult, Asynchronous
from jaxscale.pipeline.run.pipemare import Remedies
from jaxscale.pipeline.run.stream import stream
from jaxscale.pipeline.schedules import METHODS

RANKS, D, ROWS, GROUP = 4, 4, 3, 4
RATE, MOMENTUM = 0.004, 0.9
MESSAGE = jax.ShapeDtypeStruct((ROWS, D), jnp.float32)


def stage(ranks, weights, shared, x, microbatch, at, key):
    """Embedding, a residual layer, head: the first and the last are there for the first and the last stage alone."""
    x = jnp.where(at.stage == 0, microbatch["inputs"] @ shared["embedding"], x)
    noise = 1 + 0.1 * jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, at.stage), at.microbatch), (ROWS, D))
    y = x + (jnp.tanh(x @ weights["up"]) * noise.astype(x.dtype)) @ weights["down"]
    last = at.stage == ranks - 1
    error = (y @ shared["head"]).astype(jnp.float32) - microbatch["targets"]
    loss = jnp.where(last, 0.5 * jnp.square(error).sum(), 0.0)
    return y, loss, {"loss": loss, "count": jnp.where(last, 1.0, 0.0)}


def parameters(ranks):
    rng = np.random.default_rng(1)

    def normal():
        return rng.normal(size=(D, D)).astype(np.float32) / np.float32(D**0.5)

    return [({"up": normal(), "down": normal()}, {"embedding": normal(), "head": normal()}) for _ in range(ranks)]


def microbatches(count, replicas=1):
    shape, names = (count, replicas * ROWS, D), {"inputs": 2, "targets": 3}
    return {name: np.random.default_rng(seed).normal(size=shape).astype(np.float32) for name, seed in names.items()}


def update(weights, gradients, momentum, at, group=1, rate=RATE):
    """Of the mean over a group."""
    del at
    gradients = jax.tree.map(lambda g: g / group, gradients)
    momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, gradients)
    return jax.tree.map(lambda w, m: w - rate * m, weights, momentum), momentum


def rate_of(ranks):
    """So small that rounding does not grow, with delays of ranks - 1 updates."""
    return RATE * min(1.0, RANKS / ranks) ** 4


def executor(name, ranks=RANKS, *, stash="input", **settings):
    group = GROUP if name == "2bw" else 1
    settings = {
        "update": functools.partial(update, group=group, rate=rate_of(ranks)),
        "message_shapes": MESSAGE,
        **settings,
    }
    return Asynchronous(stream(METHODS[name], ranks, group, stash), functools.partial(stage, ranks), **settings)


class Run:
    """An executor on virtual devices; `state` is (parameters, momentum, in flight)."""

    def __init__(self, pipe, entering, *, replicas=1, seed=5):
        self.pipe, self.key, self.sums, self.calls, self.states = pipe, jax.random.key(seed), [], 0, []
        ranks = pipe.stream.ranks
        devices = np.array(jax.devices()[: ranks * replicas]).reshape(ranks, replicas)
        mesh = Mesh(devices, ("pipe", "data"), axis_types=(AxisType.Auto,) * 2)
        each, rows = P("pipe"), P(None, *pipe.manual_axes[1:])
        own = P(pipe.manual_axes)
        mapped = functools.partial(jax.shard_map, mesh=mesh, axis_names=set(pipe.manual_axes))

        def reduced(found):
            # over the data axis the parameters are the same, which the type does not tell
            same = functools.partial(lax.pmean, axis_name=pipe.manual_axes[1:]) if replicas > 1 else lambda tree: tree
            parameters, momentum = same((found.parameters, found.optimizer))
            return AdvanceResult(parameters, momentum, found.in_flight, lax.psum(found.sums, pipe.manual_axes))

        def advance(*given):
            return reduced(pipe.advance(*given))

        def drain(*given):
            return reduced(pipe.drain(*given))

        specs = each, each, own
        out = AdvanceResult(*specs, P())
        fill = mapped(pipe.empty_pipe, in_specs=(each, rows, P()), out_specs=own)
        self.advance = jax.jit(mapped(advance, in_specs=(*specs, rows, P()), out_specs=out))
        self.drain = jax.jit(mapped(drain, in_specs=specs, out_specs=out))
        start = jax.tree.map(lambda *leaves: np.stack(leaves), *parameters(ranks))
        momentum = jax.tree.map(np.zeros_like, start)
        self.state = start, momentum, jax.jit(fill)(start, microbatches(entering, replicas), self.key)

    def feed(self, batch):
        self.states.append(self.state)
        key = jax.random.fold_in(self.key, self.calls)
        *self.state, sums = jax.block_until_ready(self.advance(*self.state, batch, key))
        self.sums.append(sums)
        self.calls += 1

    def empty(self):
        *self.state, sums = jax.block_until_ready(self.drain(*self.state))
        self.sums.append(sums)
        return [jax.tree.map(lambda leaf, s=s: leaf[s], self.state[0]) for s in range(self.pipe.stream.ranks)]


class Reference:
    """Float64, one microbatch after another: versions[s][n] are the parameters of stage s after n updates."""

    def __init__(self, ranks, entering, *, seed=5, recompute=True):
        start = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), parameters(ranks))
        self.ranks = ranks
        self.versions = [[one] for one in start]
        self.momentum = [jax.tree.map(np.zeros_like, one) for one in start]
        self.key, self.entering, self.recompute = jax.random.key(seed), entering, recompute
        self.losses = []

    def noise(self, s, i):
        key = jax.random.fold_in(self.key, i // self.entering)
        key = jax.random.fold_in(jax.random.fold_in(key, s), i % self.entering)
        return 1 + 0.1 * np.asarray(jax.random.normal(key, (ROWS, D)), np.float64)

    def forward(self, s, i, one, pair, x):
        weights, shared = pair
        x = one["inputs"] @ shared["embedding"] if s == 0 else x
        h = np.tanh(x @ weights["up"])
        y = x + h * self.noise(s, i) @ weights["down"]
        return y, (x, h, y, y @ shared["head"] - one["targets"])

    def backward(self, s, i, one, pair, kept, g):
        """By hand: weights may be other than the forward's."""
        (weights, shared), (x, h, y, error) = pair, kept
        last = s == self.ranks - 1
        dy = error @ shared["head"].T if last else g
        d_pre = (dy @ weights["down"].T) * self.noise(s, i) * (1 - h * h)
        dx = dy + d_pre @ weights["up"].T
        d_weights = {"up": x.T @ d_pre, "down": (h * self.noise(s, i)).T @ dy}
        zeros = np.zeros((D, D))
        d_shared = {"embedding": one["inputs"].T @ dx if s == 0 else zeros, "head": y.T @ error if last else zeros}
        return dx, (d_weights, d_shared)

    def gradients(self, i, batch, at_forward, at_backward):
        """Of microbatch i, with these parameters of each stage; the mean of those of every replica's rows."""
        one = {name: np.asarray(leaf[i], np.float64).reshape(-1, ROWS, D) for name, leaf in batch.items()}
        replicas = len(one["inputs"])
        parts = [
            self.of_rows(i, {name: leaf[r] for name, leaf in one.items()}, at_forward, at_backward)
            for r in range(replicas)
        ]
        return jax.tree.map(lambda *leaves: sum(leaves) / replicas, *parts)

    def of_rows(self, i, one, at_forward, at_backward):
        x, kept, inputs = np.zeros((ROWS, D)), [], []
        for s in range(self.ranks):
            inputs.append(x)
            x, own = self.forward(s, i, one, at_forward[s], x)
            kept.append(own)
        self.losses.append(0.5 * np.square(kept[-1][-1]).sum())
        g, found = None, {}
        for s in reversed(range(self.ranks)):
            own = kept[s] if not self.recompute else self.forward(s, i, one, at_backward[s], inputs[s])[1]
            g, found[s] = self.backward(s, i, one, at_backward[s], own, g)
        return [found[s] for s in range(self.ranks)]

    def apply(self, s, gradients, scale=1.0, group=1):
        new, self.momentum[s] = update(
            self.versions[s][-1], gradients, self.momentum[s], None, group, rate_of(self.ranks)
        )
        old = self.versions[s][-1]
        self.versions[s].append(jax.tree.map(lambda a, b: a + scale * (b - a), old, new))

    @property
    def newest(self):
        return [versions[-1] for versions in self.versions]


def reference(name, ranks, batch, entering, *, recompute=True, anneal=0, correction=None):
    """Each rule as its paper states it."""
    found = Reference(ranks, entering, recompute=recompute)
    count = len(batch["inputs"])
    if name == "2bw":  # W(t+1) = W(t) - update(gradient at W(t-1))
        for group in range(count // GROUP):
            used = [versions[max(0, group - 1)] for versions in found.versions]
            parts = [found.gradients(i, batch, used, used) for i in range(group * GROUP, (group + 1) * GROUP)]
            for s in range(ranks):
                found.apply(s, jax.tree.map(lambda *leaves: sum(leaves), *(part[s] for part in parts)), group=GROUP)
        return found
    change = [jax.tree.map(np.zeros_like, one) for one in found.newest]
    delays = [ranks - 1 - s for s in range(ranks)]
    for i in range(count):
        read = [versions[max(0, i - delay)] for versions, delay in zip(found.versions, delays, strict=True)]
        linear = read if name == "pipedream" else found.newest
        if correction is not None:
            linear = [
                jax.tree.map(lambda w, c, d=d: w - d * c, w, c) for w, c, d in zip(linear, change, delays, strict=True)
            ]
        for s, gradients in enumerate(found.gradients(i, batch, read, linear)):
            found.apply(s, gradients, (1 + delays[s]) ** -(1 - min(i / anneal, 1.0)) if anneal else 1.0)
            if correction is not None and delays[s]:
                kept = correction ** (1 / delays[s])
                old, new = found.versions[s][-2:]
                change[s] = jax.tree.map(lambda c, a, b, k=kept: k * c + (1 - k) * (b - a), change[s], old, new)
    return found


def distance(one, other):
    return max(float(np.abs(a - b).max()) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def counted(parameters):
    """Those that mean something: the first stage's embedding, the last one's head."""
    return [weights for weights, _ in parameters], parameters[0][1]["embedding"], parameters[-1][1]["head"]


def batches(name, ranks, replicas=1):
    """Microbatches of 3p updates."""
    count = 3 * ranks * (GROUP if name == "2bw" else 1)
    return {key: leaf[:count] for key, leaf in microbatches(3 * ranks * GROUP, replicas).items()}


def check(name, ranks=RANKS, *, stash="input", entering=None, replicas=1, anneal=0, correction=None, **settings):
    """Weights and losses after 3p updates and what was left in the pipe."""
    batch, entering = batches(name, ranks, replicas), entering or (GROUP if name == "2bw" else 1)
    count = len(batch["inputs"])
    remedies = Remedies(anneal=anneal, correction=correction)
    run = Run(executor(name, ranks, stash=stash, remedies=remedies, **settings), entering, replicas=replicas)
    for start in range(0, count, entering):
        run.feed({key: leaf[start : start + entering] for key, leaf in batch.items()})
    newest = run.empty()
    told = {"recompute": stash == "input", "anneal": anneal, "correction": correction}
    expected = reference(name, ranks, batch, entering, **told)
    assert distance(counted(newest), counted(expected.newest)) < 1e-6
    assert sum(one["count"] for one in run.sums) == count * replicas
    np.testing.assert_allclose(sum(one["loss"] for one in run.sums), sum(expected.losses), rtol=1e-6)
    return run


def test_weights_of_2bw_equal_the_closed_form():
    """With a copy to compute with, as mixed precision has."""
    check("2bw", to_compute=lambda tree: jax.tree.map(lambda leaf: leaf * 1, tree))


def test_weights_of_pipemare_with_both_remedies_equal_the_closed_form():
    check("pipemare", stash="residuals", entering=3, anneal=8, correction=0.135)


@pytest.mark.slow
def test_weights_of_pipedream_equal_the_closed_form_and_a_restart_is_exact():
    run = check("pipedream", stash="residuals")
    again = copy.copy(run)
    again.calls, again.sums, again.state = 5, [], from_disk(run.states[5])
    for i in range(5, 3 * RANKS):
        again.feed({key: leaf[i : i + 1] for key, leaf in batches("pipedream", RANKS).items()})
    again.empty()
    jax.tree.map(np.testing.assert_array_equal, again.state[0], run.state[0])
    jax.tree.map(np.testing.assert_array_equal, again.sums, run.sums[5:])


def from_disk(state):
    """Every leaf through plain numbers on the host."""

    def through(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(np.array(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        return np.array(leaf)

    return jax.tree.map(through, state)


def test_the_rules_differ_from_each_other():
    """By far more than the executor from each: the tests above can tell them apart."""
    cases = [("pipedream", True), ("pipemare", True), ("pipemare", False), ("2bw", True)]
    newest = [
        counted(reference(name, RANKS, batches(name, RANKS), GROUP if name == "2bw" else 1, recompute=flag).newest)
        for name, flag in cases
    ]
    for i, one in enumerate(newest):
        for other in newest[:i]:
            assert distance(one, other) > 1e-3


def test_a_program_has_no_exchange_in_a_branch_and_few_versions():
    """Hazard 1; and PipeDream keeps p versions, PipeMare computing in one type none beside its weights."""
    for name, slots in (("pipedream", RANKS), ("2bw", 2), ("pipemare", 0)):
        run = Run(executor(name, stash="residuals"), GROUP)
        found = jax.make_jaxpr(run.advance)(*run.state, microbatches(GROUP), run.key)
        assert ("ppermute", False) in (inside := list(inside_branches(found.jaxpr)))
        assert not [one for one in inside if one[1]]
        assert {leaf.shape[1] for leaf in jax.tree.leaves(run.state[2]["versions"])} == ({slots} if slots else set())


def inside_branches(jaxpr, inside=False):
    """(collective, whether it stands in a branch) of a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("psum", "psum_invariant", "ppermute", "all_gather", "reduce_scatter", "all_to_all"):
            yield eqn.primitive.name, inside
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from inside_branches(inner, inside or eqn.primitive.name == "cond")


def test_mistakes_are_named():
    with pytest.raises(
        UserError, match=r"pipedream: got a correction .* expected none: .* Only pipemare takes a correction"
    ):
        executor("pipedream", remedies=Remedies(correction=0.1))
    with pytest.raises(UserError, match=r"correction: got 1\.5, expected more than 0 and less than 1"):
        Remedies(correction=1.5)
    with pytest.raises(UserError, match="anneal: got -1 updates"):
        Remedies(anneal=-1)
    run = Run(executor("2bw"), GROUP)
    with pytest.raises(UserError, match="got 2 microbatches, expected 4"):
        run.feed(microbatches(2))


def mean_over_replicas(parameters, gradients, momentum, at):
    return update(parameters, lax.pmean(gradients, "data"), momentum, at)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipedream", "pipemare"])
@pytest.mark.parametrize("stash", ["input", "residuals"])
def test_with_a_data_axis_whose_gradients_the_update_reduces(name, stash):
    settings = {"update": mean_over_replicas, "manual_axes": ("pipe", "data"), "replicas": 2}
    check(name, stash=stash, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, ranks) for name in ("pipedream", "pipemare") for ranks in (1, 2, 3, 4, 8)]
    + [("2bw", p) for p in range(1, 5)],
)
@pytest.mark.parametrize("stash", ["input", "residuals"])
def test_every_rule_on_other_numbers_of_devices(name, ranks, stash):
    check(name, ranks, stash=stash, entering=ranks * GROUP if name == "2bw" else {1: 1, 2: 3, 3: 9, 4: 1, 8: 4}[ranks])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"anneal": 8}, {"correction": 0.135}, {"correction": 0.5, "anneal": 40}])
@pytest.mark.parametrize("stash", ["input", "residuals"])
def test_each_remedy(settings, stash):
    check("pipemare", stash=stash, **settings)
    if "correction" not in settings:
        check("pipedream", stash=stash, **settings)
