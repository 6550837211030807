"""Groups of an optimizer through the train step: on every layout they train as on one device, or as one rule does.

By default rules of elements, under ZeRO 3, and groups of one rule on one device; `test_optimizer_battery.py` has rules
of whole matrices on layouts by default.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.errors import UserError
from jaxscale.lowbit.quantize import is_quantized
from jaxscale.models.decoder import Decoder
from jaxscale.models.lora import LoRA
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Experiment, Guard
from jaxscale.state.pure_model import PureModel
from jaxscale.step.build import build
from tests.plans import plan_of
from tests.step.residual import Residual, Vectors, random_batch
from tests.tiers import variants

VOCAB, ROWS, LENGTH, STEPS = 16, 8, 8, 3
MODEL = Decoder(vocab=VOCAB, context=LENGTH, layers=4, embed=32, heads=4, mlp=64)
BATCH = {
    name: np.random.default_rng(seed).integers(0, VOCAB, (ROWS, LENGTH), dtype=np.int32)
    for seed, name in enumerate(("tokens", "targets"))
}


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Data with shapes and nothing else."""

    def shapes(self, batch):
        return dict.fromkeys(("tokens", "targets"), ((batch, LENGTH), "int32"))


TOKENS, SMALL, VECTORS = Tokens(), Residual(), Vectors()
FLAT = Optimizer("sgd", 0.1, momentum=0.9, schedule="constant")
ELEMENTWISE = Optimizer(
    learning_rate=0.01,
    groups={"embed|head": Optimizer("lion", 0.003, weight_decay=0.0), "mlp/up": FLAT},
)
BY_LAYER = Optimizer(
    learning_rate=0.01,
    groups={"attention": Optimizer("lamb", 0.01), "mlp": Optimizer("muon", 0.01, precision="float32")},
)
ALIKE = Optimizer(learning_rate=0.01, groups={"mlp/up": Optimizer(learning_rate=0.01)})
PLAIN = Optimizer(learning_rate=0.01)


def make(optimizer, model=MODEL, data=TOKENS, **plan):
    return build(Experiment("groups", model, data, optimizer=optimizer, steps=20, batch=ROWS), plan_of(**plan))


def trained(step, count=STEPS, batch=BATCH):
    """State, losses and metrics after some steps."""
    state, losses, metrics = step.init(), [], {}
    for _ in range(count):
        state, metrics = step(state, step.place(batch))
        losses.append(float(metrics["loss"]))
    return state, losses, metrics


@functools.cache
def alone(name):
    """Losses and arrays of the canonical form, on one device."""
    step = make({"elementwise": ELEMENTWISE, "by layer": BY_LAYER}[name], mesh="1")
    state, losses, _ = trained(step)
    return losses, {key: np.array(array) for key, array in step.to_canonical(state).items()}


VARIANT, SLOW = [pytest.mark.variant], [pytest.mark.slow]
CASES = [
    ("elementwise", {"mesh": "fsdp:4", "zero": 3}, []),
    ("elementwise", {"mesh": "fsdp:2", "zero": 3, "weights": "host"}, VARIANT),
    ("elementwise", {"mesh": "fsdp:2,tensor:2", "zero": 2, "microbatches": 2}, SLOW),
    ("elementwise", {"mesh": "fsdp:2", "zero": 1, "optimizer_state": "streamed"}, SLOW),
    ("elementwise", {"mesh": "1", "optimizer_state": "host"}, SLOW),
    ("elementwise", {"pipeline": "1f1b:2x4"}, SLOW),
    ("by layer", {"mesh": "fsdp:2", "zero": 3, "optimizer_state": "host"}, VARIANT),
    ("by layer", {"mesh": "tensor:2", "microbatches": 2}, SLOW),
    ("by layer", {"pipeline": "gpipe:2x2"}, SLOW),
]


@pytest.mark.parametrize(
    ("name", "plan"), [pytest.param(name, plan, marks=marks, id=f"{name} {plan}") for name, plan, marks in CASES]
)
def test_every_layout_trains_as_one_device_does(name, plan):
    losses, arrays = alone(name)
    step = make({"elementwise": ELEMENTWISE, "by layer": BY_LAYER}[name], **plan)
    state, found, _ = trained(step)
    np.testing.assert_allclose(found, losses, rtol=2e-5)
    saved = {key: np.array(array) for key, array in step.to_canonical(state).items()}
    assert saved.keys() == arrays.keys()  # a checkpoint of one is that of the other
    weights = [key for key in arrays if key.startswith("params/")]
    if name == "elementwise":  # the sign of lion's update may turn on the last bit
        weights = [key for key in weights if "embed" not in key and "head" not in key]
    for key in weights:
        np.testing.assert_allclose(saved[key], arrays[key], atol=2e-4)


@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": "1"},
        pytest.param({"pipeline": "pipedream:2"}, marks=pytest.mark.variant),
        pytest.param({"mesh": "replica:2", "diloco": "every=2"}, marks=pytest.mark.slow),
        pytest.param({"mesh": "fsdp:2", "zero": 2, "state": "int8"}, marks=pytest.mark.slow),
        pytest.param({"mesh": "replica:2", "reduce": "int8"}, marks=pytest.mark.slow),
        pytest.param(
            {"mesh": "1", "precision": "bfloat16", "master": "split", "state": "int8"}, marks=pytest.mark.slow
        ),
        pytest.param({"pipeline": "2bw:2x4"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_groups_of_one_rule_are_that_rule(plan):
    (_, losses, _), (_, found, _) = (
        trained(make(rule, SMALL, VECTORS, **plan), batch=random_batch(ROWS)) for rule in (PLAIN, ALIKE)
    )
    np.testing.assert_allclose(found, losses, atol=5e-7)


def test_metrics_have_the_rate_of_each_group_and_the_lines_name_its_parameters():
    step = make(ELEMENTWISE, mesh="1")
    _, _, metrics = trained(step, 1)
    rates = {name: round(float(rate), 4) for name, rate in metrics.items() if name.startswith("learning_rate")}
    assert rates == {"learning_rate": 0.01, "learning_rate/embed|head": 0.003, "learning_rate/mlp/up": 0.1}
    assert (
        "group embed|head: lion, learning rate 0.003, weight decay 0 for embedding/weight, head/weight"
        in step.describe()
    )


def test_a_pattern_means_all_layers_of_a_stack_in_groups_also_for_train():
    """A memory rule may divide a stack, whose later layers then have other names of their own."""
    pattern = "layers/mlp"
    pure_model = PureModel.of(MODEL, 0, 1, (3, 1), train=pattern)
    assert {name.split("/")[1] for name in pure_model.axis_names if name not in pure_model.frozen} == {
        "layers",
        "layers_from_3",
    }


@pytest.mark.variant  # `test_memory_plans.py` has values that a rule keeps, and the case above groups, by default
def test_a_pattern_trains_all_layers_of_a_stack_in_groups():
    pattern = "layers/mlp"
    grouped = Optimizer(learning_rate=0.01, groups={pattern: FLAT})
    whole = trained(make(grouped, mesh="1"))
    rotor = trained(make(grouped, mesh="1", memory="chain:40KiB"))
    np.testing.assert_allclose(rotor[1], whole[1], rtol=2e-5)


def test_a_group_may_keep_its_moments_in_float32():
    wide = dataclasses.replace(MODEL, mlp=128)
    exact = Optimizer(learning_rate=0.01, groups={"mlp": Optimizer(learning_rate=0.01, moments="float32")})
    wider = dataclasses.replace(wide, embed=64)
    step = make(exact, wider, mesh="1", state="int8")
    leaves, _ = jax.tree_util.tree_flatten_with_path(step.layout.abstract.optimizer, is_leaf=is_quantized)
    quantized = {jax.tree_util.keystr(path) for path, leaf in leaves if is_quantized(leaf)}
    assert quantized
    assert not any("mlp" in path for path in quantized)
    with pytest.raises(UserError, match="would quantize no leaf"):
        make(Optimizer(moments="float32"), wider, mesh="1", state="int8")


def test_adapters_and_a_head_have_rules_of_their_own():
    optimizer = Optimizer(train="lora|head", groups={"LoRAParam": Optimizer("lion", 1e-3)})
    step = make(optimizer, LoRA(MODEL, rank=2), mesh="fsdp:2", zero=3)
    lines = "\n".join(step.describe())
    assert "the others: adamw, learning rate 0.001, weight decay 0.1 for head/weight" in lines
    assert "group LoRAParam: lion, learning rate 0.001, weight decay 0.1 for blocks/layers/attention/k/lora/a" in lines


@pytest.mark.variant  # `test_frozen.py` trains adapters by default, and the first test here groups
def test_adapters_and_a_head_train_by_rules_of_their_own():
    optimizer = Optimizer(train="lora|head", groups={"LoRAParam": Optimizer("lion", 1e-3)})
    _, losses, _ = trained(make(optimizer, LoRA(MODEL, rank=2), mesh="fsdp:2", zero=3))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("optimizer", "plan", "message"),
    [
        (Optimizer(groups={"haed": FLAT}), {"mesh": "1"}, "'haed' is found in no name .*; did you mean 'head'"),
        (Optimizer(train="head", groups={"mlp": FLAT}), {"mesh": "1"}, "'mlp' is found in no name of a trained"),
        (
            Optimizer(groups={"mlp": Optimizer("soap", every=2)}),
            {"mesh": "1", "optimizer_state": "streamed"},
            r"mixes elements of a tensor .* offload\.optimizer_state host",
        ),
        (
            Optimizer("sgd", groups={"mlp": Optimizer("sgd")}),
            {"mesh": "1", "optimizer_state": "streamed"},
            "optimizer_state streamed: sgd keeps no array that could lie on the host",
        ),
        (
            Optimizer(groups={"mlp": Optimizer("adafactor")}),
            {"pipeline": "pipedream:2"},
            "keeps arrays of other shapes than its parameters|mixes elements of a tensor",
        ),
        (
            Optimizer(groups={"mlp": Optimizer(custom=lambda rate: None)}),
            {"mesh": "1"},
            r"optimizer\.custom returned a NoneType",
        ),
    ],
)
def test_what_cannot_work_is_refused(optimizer, plan, message):
    with pytest.raises(UserError, match=message):
        make(optimizer, dataclasses.replace(MODEL, tied=False), **plan)


@pytest.mark.parametrize("place", variants(["streamed", "device"], 1))
def test_the_guard_sees_the_rate_of_every_group(place):
    """An update that is not judged whole is judged by the rates of all groups."""
    wild = Optimizer(learning_rate=1e-3, groups={"mlp/up": Optimizer(learning_rate=1e6, schedule="constant")})
    experiment = Experiment("guard", SMALL, VECTORS, optimizer=wild, steps=20, batch=ROWS, guard=Guard())
    step = build(experiment, plan_of(mesh="1", optimizer_state=place))
    state = step.init()
    before = [np.array(leaf) for leaf in jax.tree.leaves(state.params)]
    state, metrics = step(state, step.place(random_batch(ROWS)))
    assert int(metrics["skipped"]) == 1
    for old, new in zip(before, jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(old, np.array(new))


def test_a_rule_of_ones_own_in_a_group_gets_the_loss():
    seen = optax.GradientTransformationExtraArgs(
        lambda params: jnp.zeros(()),
        lambda updates, state, params=None, *, value, **extra: (
            jax.tree.map(jnp.zeros_like, updates),
            jnp.asarray(value),
        ),
    )
    step = make(Optimizer(groups={"mlp/up": Optimizer(custom=lambda rate: seen)}), SMALL, VECTORS, mesh="1")
    state, losses, _ = trained(step, 1, random_batch(ROWS))
    assert losses[0] in [float(leaf) for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim == 0]
