"""Groups of parameters: each is updated by its own rule, as by `optax.partition`, and bad groups are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.errors import UserError
from jaxscale.optim.groups import describe_groups, group_indices, mask_other_groups
from jaxscale.optim.leaves import leaf_of, leaves_of
from jaxscale.optim.optimizer import Optimizer
from tests.tiers import variants

PARAMS = {
    "embedding": jnp.ones((8, 4)),
    "mlp": {"up": jnp.ones((2, 4, 4)), "bias": jnp.ones((4,))},
    "head": jnp.ones(4),
}
LEAVES = {
    "embedding": leaf_of("embedding", ("vocab", "embed"), (8, 4)),
    "mlp": {
        "up": leaf_of("mlp/up", ("layers", "embed", "mlp"), (2, 4, 4), variable="LoRAParam"),
        "bias": leaf_of("mlp/bias", ("mlp",), (4,)),
    },
    "head": leaf_of("head", ("vocab",), (4,)),
}
GRADS = jax.tree.map(lambda p: jnp.linspace(-0.1, 0.3, p.size).reshape(p.shape), PARAMS)
LABELS = {"embedding": "a", "mlp": {"up": "rest", "bias": "b"}, "head": "a"}


def updates_of(rule, count=3):
    """Parameters after some updates."""
    params, state = PARAMS, rule.init(PARAMS)
    for number in range(count):
        grads = jax.tree.map(lambda g, scale=number + 1: g * scale, GRADS)
        updates, state = rule.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_updates_are_those_of_optax_partition_to_the_bit():
    """Each group has its own rule, schedule, warm-up and decay; clipping is by the norm of all gradients."""
    flat = {"schedule": "constant"}
    optimizer = Optimizer(
        learning_rate=0.1,
        warmup=2,
        clip=0.05,
        groups={"embed|head": Optimizer("lion", 0.01, weight_decay=0.0, **flat), "bias": Optimizer("sgd", 0.5, **flat)},
    )
    rest = optax.adamw(Optimizer(learning_rate=0.1, warmup=2).schedule_fn(10), 0.9, 0.95, weight_decay=0.1)
    rules = {"a": optax.lion(0.01, 0.9, 0.95, weight_decay=0.0), "b": optax.sgd(0.5), "rest": rest}
    twin = optax.chain(optax.clip_by_global_norm(0.05), optax.partition(rules, LABELS))
    ours, theirs = updates_of(optimizer.build(10, LEAVES)), updates_of(twin)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("name", variants(["muon", "lamb", "galore", "adafactor", "schedule_free"], default=2))
def test_a_rule_of_tensors_updates_its_group_as_if_there_were_no_other_parameters(name):
    optimizer = Optimizer(groups={"mlp/up|embed": Optimizer(name, 0.01, rank=2 if name == "galore" else None)})
    alone = Optimizer(name, 0.01, rank=2 if name == "galore" else None).rule(
        10, {"embedding": LEAVES["embedding"], "mlp": {"up": LEAVES["mlp"]["up"]}}
    )
    params = {"embedding": PARAMS["embedding"], "mlp": {"up": PARAMS["mlp"]["up"]}}
    grads = {"embedding": GRADS["embedding"], "mlp": {"up": GRADS["mlp"]["up"]}}
    expected, _ = alone.update(grads, alone.init(params), params)
    rule = optimizer.rule(10, LEAVES)
    found, _ = rule.update(GRADS, rule.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(found["mlp"]["up"], expected["mlp"]["up"])
    np.testing.assert_array_equal(found["embedding"], expected["embedding"])


def test_the_first_pattern_wins_and_a_type_of_variable_is_a_pattern():
    assert group_indices(["mlp", "LoRAParam|head"], LEAVES) == {
        "embedding": -1,
        "mlp": {"up": 0, "bias": 0},
        "head": 1,
    }
    assert group_indices(["LoRAParam", "mlp"], LEAVES)["mlp"] == {"up": 0, "bias": 1}
    indices = group_indices(["LoRAParam"], LEAVES)
    assert jax.tree.leaves(mask_other_groups(PARAMS, indices, 0)) == [PARAMS["mlp"]["up"]]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["haed"], r"optimizer\.groups: 'haed' is found in no name of a trained parameter.*; did you mean 'head'\?"),
        (["LoRAparam"], "the parameters are embedding, head, mlp/bias, mlp/up; did you mean 'LoRAParam'"),
        (["mlp", "bias"], "every parameter that 'bias' matches, such as mlp/bias, belongs to a group before it"),
        (["embed", "."], "the groups have all parameters, .* leave out the group '.', and give its settings to the"),
    ],
)
def test_groups_without_an_effect_are_refused(patterns, message):
    with pytest.raises(UserError, match=message):
        group_indices(patterns, LEAVES)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groups": {"(": Optimizer()}}, r"optimizer\.groups: got '\(', expected a regular expression"),
        ({"groups": {"": Optimizer()}}, "optimizer.groups: got an empty text, expected a part of names"),
        ({"groups": {"a": "lion"}}, "groups.a: got 'lion', expected a"),
        ({"groups": {3: Optimizer()}}, "groups key: got 3, expected text"),
        ({"groups": ["a"]}, "groups: got .* expected a dict"),
        ({"groups": {"a": Optimizer(groups={"b": Optimizer()})}}, r"groups\.a\.groups: got groups inside of a group"),
        ({"groups": {"a": Optimizer(clip=None)}}, r"groups\.a\.clip: got None, .* set optimizer\.clip instead"),
        ({"groups": {"a": Optimizer(ema=0.9)}}, r"groups\.a\.ema: got 0\.9, but the average is of all weights"),
        ({"groups": {"a": Optimizer(train="b")}}, r"groups\.a\.train: got 'b', .* set optimizer\.train instead"),
        ({"groups": {"a": Optimizer("one_bit_adam")}}, r"groups\.a\.name: got one_bit_adam together with"),
        ({"name": "one_bit_lamb", "groups": {"a": Optimizer()}}, r"optimizer\.name: got one_bit_lamb together with"),
        ({"moments": "int8"}, "moments: got 'int8', expected plan or float32"),
    ],
)
def test_bad_groups_are_refused_by_name(fields, message):
    with pytest.raises(UserError, match=message):
        Optimizer(**fields)


def test_groups_are_copied_and_an_optimizer_with_groups_is_hashable():
    groups = {"head": Optimizer("lion")}
    optimizer = Optimizer(groups=groups)
    groups["("] = Optimizer()
    assert list(optimizer.groups) == ["head"]
    assert hash(optimizer) == hash(Optimizer(groups={"head": Optimizer("lion")}))


def test_the_lines_for_the_user_show_which_parameters_belong_to_which_group():
    optimizer = Optimizer(groups={"embed|head": Optimizer("lion", 3e-4), "bias": Optimizer(custom=optax.sgd)})
    assert describe_groups(optimizer, LEAVES) == [
        "the others: adamw, learning rate 0.001, weight decay 0.1 for mlp/up",
        "group embed|head: lion, learning rate 0.0003, weight decay 0.1 for embedding, head",
        "group bias: the custom rule, learning rate 0.001 for mlp/bias",
    ]
    assert describe_groups(Optimizer(), LEAVES) == []


def test_a_group_of_a_model_without_named_axes():
    leaves = leaves_of(PARAMS)
    rule = Optimizer(groups={"head": Optimizer("sgd", 1.0, schedule="constant")}, clip=None).build(10, leaves)
    updates, _ = rule.update(GRADS, rule.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(updates["head"], -GRADS["head"])
