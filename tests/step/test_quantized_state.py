"""Optimizer state in a few bits, from a plan to a checkpoint: placed, streamed, saved, moved, converted, checked."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.errors import UserError
from jaxscale.lowbit.quantize import Quantized, decode, encode, is_quantized, zeros
from jaxscale.lowbit.quantized import quantized_bytes_and_size
from jaxscale.lowbit.split_weights import split
from jaxscale.models.decoder import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.planning.program import described_step
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment, Guard
from jaxscale.recipe.plan import OffloadPlan, Plan, StatePlan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.state.conversion import conversion, forms_of
from jaxscale.state.naming import CODES, SCALE
from jaxscale.step.build import build
from jaxscale.step.compiled_checks import NoEffect, check_state_bits
from tests.plans import plan_of
from tests.step.residual import Residual, random_batch

ROWS, LENGTH, VOCAB = 8, 8, 13
MODEL = Decoder(vocab=VOCAB, context=LENGTH, layers=2, embed=32, heads=4, mlp=64)
BATCH = random_batch(ROWS)
STATE = "optimizer/1/0/mu/blocks/layers/1/mlp/down/weight"


GUARD = Guard(spike=10, warmup=1)


def make(mesh="1", optimizer=Optimizer(learning_rate=0.01, warmup=2), model=MODEL, **fields):
    experiment = Experiment("bits", model, None, optimizer=optimizer, steps=10, batch=ROWS, guard=GUARD)
    return build(experiment, plan_of(mesh=mesh, **fields))


def quantized(tree):
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_quantized) if is_quantized(leaf)]


LAYOUTS = [
    {"mesh": "fsdp:4", "zero": 1},
    {"mesh": "fsdp:2,tensor:2", "zero": 3},
    {"mesh": "tensor:4", "state": "int4"},
    {"mesh": "fsdp:2", "zero": 2, "optimizer_state": "streamed", "state": "fp8"},
    {"mesh": "fsdp:2", "pipeline": PipelinePlan.parse("1f1b:2x2"), "zero": 1},
]


@pytest.mark.parametrize("fields", LAYOUTS, ids=lambda fields: " ".join(map(str, fields.values())))
def test_codes_and_scales_lie_as_their_parameter_does(fields):
    """Blocks divide every shard, so that no number is decoded by another device's scale."""
    layout = make(**{"state": "int8", **fields}).layout
    owners = jax.tree.unflatten(jax.tree.structure(layout.abstract.optimizer), layout.owner_names(make_whole(fields)))
    found = quantized(layout.abstract.optimizer)
    assert len(found) == 2 * 3
    for array, owner in zip(found, quantized(owners), strict=True):
        assert owner.codes == owner.scale != ""
        spec = layout.placements[owner.codes].state
        assert array.codes.sharding.spec == array.scale.sharding.spec == spec
        rows = array.codes.sharding.shard_shape(array.shape)[-2]
        assert rows == array.block * array.scale.sharding.shard_shape(array.scale.shape)[-2]
        kind = "pinned_host" if "optimizer_state" in fields else "device"
        assert {array.codes.sharding.memory_kind, array.scale.sharding.memory_kind} <= {kind, None}


def make_whole(fields):
    return make(**{"state": "int8", **fields}).optimizer


def test_a_plan_names_the_state_and_the_names_in_a_checkpoint_tell_all():
    step = make(state="int4", mesh="fsdp:2", zero=2)
    shapes = {name: leaf.shape for name, leaf in step.canonical_abstract().items()}
    assert shapes[f"{STATE}/{CODES}dynamic4"] == (64, 32)
    assert step.canonical_abstract()[f"{STATE}/{CODES}dynamic4"].dtype == jnp.uint8, "a byte each on the disk"
    forms = forms_of(shapes)
    assert len(forms) == 2 * 2 * 3, "two moments, two layers, three matrices"
    assert forms[STATE].map == "dynamic4"
    assert forms[STATE.replace("/mu/", "/nu/")].map == "linear4_unsigned"
    assert str(forms[STATE]) == f"dynamic4 in blocks of {forms[STATE].block}"
    assert shapes["optimizer/1/0/mu/head/weight"] == (VOCAB, 32), "the head's stays float32"


def factored(rate):
    return optax.adafactor(rate, min_dim_size_to_factor=8)


REFUSED = [
    ({"optimizer": Optimizer(custom=factored)}, "plan.state.moments int8 would quantize no leaf .*Adafactor's factors"),
    ({"optimizer": Optimizer(name="sgd")}, "would quantize no leaf"),
    ({"master": "split"}, "master split: split weights are bfloat16"),
    ({"master": "split", "precision": "bfloat16", "reduce": "float32"}, "master split with reduce float32"),
    (
        {"master": "split", "precision": "bfloat16", "optimizer_state": "host"},
        "split with offload.optimizer_state host",
    ),
    (
        {"optimizer": Optimizer(custom=optax.lamb), "optimizer_state": "streamed"},
        "optimizer_state streamed: this optimizer's update mixes",
    ),
]


@pytest.mark.parametrize(("fields", "says"), REFUSED)
def test_what_would_mean_nothing_is_refused_by_name(fields, says):
    with pytest.raises(UserError, match=says):
        make(**{"mesh": "1", "state": "int8", **fields})


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_the_host_of_a_tpu_updates_no_state_in_few_bits(bits):
    """Its compiler would die; what is asked in its place is taken, and on other devices so is the plan itself."""
    experiment = Experiment("bits", MODEL, None, steps=10, batch=ROWS)
    plan, slices = (
        Plan(state=StatePlan(bits), offload=OffloadPlan(optimizer_state="host"), zero=1),
        Platform.parse("tpu v5e:2x2"),
    )
    says = (
        f"state {bits} with optimizer_state host: the compiler for TPU crashes .* take offload.optimizer_state streamed"
    )
    with pytest.raises(UserError, match=says):
        described_step(experiment, slices, plan)
    for other in ({"optimizer_state": "streamed"}, {"state": "float32"}):
        assert described_step(experiment, slices, plan_of(plan, **other)).layout
    assert described_step(experiment, Platform.parse("gpu h100 x 2"), plan).layout


class TestConversion:
    """Arrays of one form become those of another, from names and shapes alone."""

    @staticmethod
    def places(shapes, mesh="fsdp:2", spec=("fsdp",)):
        sharding = NamedSharding(MeshSpec.parse(mesh).build(), PartitionSpec(*spec))
        return {n: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for n, (shape, dtype) in shapes.items()}

    @staticmethod
    def held(array, name="w"):
        if not is_quantized(array):
            return {name: array}
        wide = array.codes.astype(jnp.uint8) if array.codes.dtype == jnp.uint4 else array.codes
        return {f"{name}/{CODES}{array.map}": wide, f"{name}/{SCALE}": array.scale}

    def converted(self, old, new):
        given = self.held(old)
        wanted = self.places({n: (x.shape, x.dtype) for n, x in self.held(new).items()})
        change = conversion({n: (x.shape, str(x.dtype), 0, 0) for n, x in given.items()}, wanted)
        assert {n: (s.shape, s.dtype) for n, s in change.abstract.items()} == {
            n: (x.shape, x.dtype) for n, x in given.items()
        }
        read = {n: jax.device_put(x, change.abstract[n].sharding) for n, x in given.items()}
        made = change.convert(read)
        assert {n: (x.shape, x.dtype) for n, x in made.items()} == {n: (s.shape, s.dtype) for n, s in wanted.items()}
        assert all(x.sharding.is_equivalent_to(wanted[n].sharding, x.ndim) for n, x in made.items())
        return made, change.lines

    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)

    def test_shorter_blocks_keep_every_bit_and_nothing_is_said(self):
        old = encode(self.x, "soft8", 8)
        made, said = self.converted(old, zeros((16, 4), "soft8", 4))
        assert said == ()
        np.testing.assert_array_equal(made[f"w/{CODES}soft8"], old.codes)
        np.testing.assert_array_equal(decode(Quantized(*made.values(), "soft8", 4)), decode(old))

    @pytest.mark.parametrize(
        ("old", "new"),
        [(None, ("soft8", 8)), (("soft8", 4), ("soft8", 8)), (("dynamic4", 8), ("soft8", 8)), (("e4m3", 8), None)],
    )
    def test_all_else_is_decoded_and_encoded_anew_and_said_once(self, old, new):
        given = self.x if old is None else encode(self.x, *old)
        whole = self.x if old is None else decode(given)
        wanted = whole if new is None else encode(whole, *new)
        made, said = self.converted(given, wanted)
        jax.tree.map(np.testing.assert_array_equal, made, self.held(wanted))
        assert len(said) == 1
        assert said[0].startswith("1 array of optimizer state was ")

    def test_split_weights_are_joined_and_the_other_way_round_to_the_bit(self):
        weight, correction = split(self.x)
        apart = {"params/w": weight, "optimizer/1/correction/w": correction}
        split_places = self.places({n: (x.shape, x.dtype) for n, x in apart.items()})
        joined_places = self.places({"params/w": ((16, 4), jnp.float32)})
        entries = {n: (x.shape, str(x.dtype)) for n, x in apart.items()}
        change = conversion(entries, joined_places)
        assert change.lines == ("weights were split and are now float32",)
        whole = change.convert({n: jax.device_put(x, change.abstract[n].sharding) for n, x in apart.items()})
        np.testing.assert_allclose(whole["params/w"], self.x, rtol=1.6e-5)
        back = conversion({"params/w": ((16, 4), "float32")}, split_places)
        assert back.lines == ("weights were float32 and are now split",)
        jax.tree.map(np.testing.assert_array_equal, back.convert(whole), apart)

    def test_what_neither_side_has_is_left_alone(self):
        wanted = self.places({"params/w": ((16, 4), jnp.float32), "x/codes.soft8": ((16, 4), jnp.int8)})
        change = conversion({"params/w": ((16, 4), "float32")}, wanted)
        assert change.abstract == wanted
        arrays = {"params/w": jnp.ones((16, 4))}
        assert change.convert(arrays) == arrays


def test_a_planted_fault_in_the_bits_of_a_state_is_found():
    plan, four = Plan(state=StatePlan("int8")), Plan(state=StatePlan("int4"))
    good = {"mu": jax.eval_shape(lambda: zeros((256, 4), "soft8", 256)), "count": jnp.zeros(())}
    check_state_bits(plan, good)
    wide = {"mu": dataclasses.replace(good["mu"], codes=jax.ShapeDtypeStruct((256, 4), jnp.float32))}
    for asked, state, says in (
        (plan, {"mu": jnp.zeros((256, 4))}, "state int8: the compiled step keeps no moment in 8 bits"),
        (plan, wide, "in 4.02 bytes a number, but the plan requires 1.02"),
        (four, good, "in 1.02 bytes a number, but the plan requires 0.52"),
    ):
        with pytest.raises(NoEffect, match=says):
            check_state_bits(asked, state)
    check_state_bits(Plan(), {"mu": jnp.zeros((256, 4))})


@functools.cache
def trained():
    """A step with int8 state over four devices, compiled, after three updates, and what each told."""
    step = make(mesh="fsdp:4", zero=2, state="int8", model=Residual())
    compiled = step.compile(BATCH)
    state, told = step.init(), []
    for _ in range(3):
        state, metrics = step(state, step.place(BATCH))
        told.append(float(metrics["loss"]))
    return types.SimpleNamespace(step=step, compiled=compiled, state=state, losses=told)


def copied(step, arrays):
    abstract = step.canonical_abstract()
    return {n: jax.device_put(np.array(x), abstract[n].sharding) for n, x in arrays.items()}


def test_it_learns_takes_the_bytes_it_says_and_a_skipped_step_leaves_every_bit():
    found = trained()
    assert found.losses[2] < found.losses[1] < found.losses[0]
    taken, numbers = quantized_bytes_and_size(found.state.optimizer)
    blocks = {q.block for q in quantized(found.state.optimizer)}
    assert taken / numbers == pytest.approx(
        1 + 4 * sum(1 / q.block * q.size for q in quantized(found.state.optimizer)) / numbers
    )
    assert min(blocks) >= 8
    sizes = found.step.memory(BATCH)
    given = sum(sizes.values())
    assert found.compiled.argument_bytes == pytest.approx(given, rel=0.01)
    kept = [np.array(leaf) for leaf in jax.tree.leaves(found.state.optimizer)]
    bad = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), found.state.params)
    state = dataclasses.replace(found.state, params=bad)
    state = jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), state)
    after, metrics = found.step(state, found.step.place(BATCH))
    assert int(metrics["skipped"]) == 1
    for old, new in zip(kept, jax.tree.leaves(after.optimizer), strict=True):
        np.testing.assert_array_equal(old, np.array(new))


def test_a_state_moves_to_another_layout_bit_by_bit_where_its_blocks_fit_there():
    """From 4-way fsdp to 8-way fsdp x tensor: blocks get shorter, and every number stays what it is."""
    one, other = trained().step, make(mesh="fsdp:2,tensor:4", zero=3, state="int8", model=Residual())
    saved = one.to_canonical(trained().state)
    entries = {n: (x.shape, str(x.dtype)) for n, x in saved.items()}
    change = conversion(entries, other.canonical_abstract())
    read = {n: jax.device_put(np.array(saved[n]), s.sharding) for n, s in change.abstract.items()}
    moved = other.from_canonical(change.convert(read))
    for old, new in zip(quantized(trained().state.optimizer), quantized(moved.optimizer), strict=True):
        if old.block % new.block == 0:
            np.testing.assert_array_equal(np.array(old.codes), np.array(new.codes))
            np.testing.assert_array_equal(np.array(decode(old)), np.array(decode(new)))
    again = one.from_canonical(copied(one, saved))
    for old, new in zip(jax.tree.leaves(trained().state), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.array(old), np.array(new))


@pytest.mark.slow
def test_split_weights_train_as_float32_masters_do_at_three_bytes_each():
    fields = {"mesh": "fsdp:2", "zero": 2, "precision": "bfloat16"}
    told = []
    for more in ({}, {"master": "split", "state": "int8"}):
        step = make(model=Residual(), **fields, **more)
        step.compile(BATCH)
        state, losses = step.init(), []
        for _ in range(6):
            state, metrics = step(state, step.place(BATCH))
            losses.append(float(metrics["loss"]))
        told.append(losses)
    np.testing.assert_allclose(told[1], told[0], atol=0.02)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    bits = {n: np.array(x) for n, x in step.to_canonical(state).items()}
    again = step.from_canonical({n: jax.device_put(x, step.canonical_abstract()[n].sharding) for n, x in bits.items()})
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.array(old), np.array(new))
