"""QLoRA: adapters over a base in few bits have the numbers of those over the dequantized base, and fewer bytes.

By default over a base in nf4, on one device and under ZeRO 3.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale import Experiment, Optimizer, build
from jaxscale.errors import UserError
from jaxscale.lowbit.few_bit_weight import FORMATS, FewBitWeight
from jaxscale.models import Decoder, LoRA
from jaxscale.trees import named_leaves
from tests.plans import plan_of
from tests.tiers import variants

ROWS, STEPS = 8, 3
DECODER = Decoder(vocab=16, context=8, layers=4, embed=16, heads=2, tied=False)
NF4 = LoRA(DECODER, rank=2, on="attention/(q|v)|mlp/up", base="nf4", base_block=8)


@dataclasses.dataclass(frozen=True)
class Dequantized(LoRA):
    """The twin: float weights that are what the codes of a `LoRA` over few bits encode."""

    few_bits = None

    def build(self, rngs, *, vocab_multiple=1):
        module = super().build(rngs, vocab_multiple=vocab_multiple)
        for _, layer in list(nnx.iter_modules(module)):
            weight = getattr(layer, "weight", None)
            if isinstance(weight, FewBitWeight):
                layer.weight = nnx.Param(weight[...], out_sharding=weight.scale.get_metadata()["out_sharding"])
        return module


class Tokens:
    """Batches of which only the shapes are asked for."""

    def shapes(self, rows):
        return dict.fromkeys(("tokens", "targets"), ((rows, 8), "int32"))

    def open(self, *_):
        raise NotImplementedError


def batches():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 16, (STEPS, ROWS, 9)).astype(np.int32)
    return [{"tokens": rows[:, :-1], "targets": rows[:, 1:]} for rows in tokens]


def step_of(model=NF4, train=None, mesh="1", **fields):
    optimizer = Optimizer(learning_rate=1e-2, train=train, custom=lambda rate: optax.adam(rate), clip=None)
    return build(Experiment("few", model, Tokens(), optimizer, steps=STEPS, batch=ROWS), plan_of(mesh=mesh, **fields))


def twin_of(model):
    return Dequantized(**{field.name: getattr(model, field.name) for field in dataclasses.fields(LoRA)})


def trajectory(step):
    state, losses = step.init(), []
    for batch in batches():
        state, metrics = step(state, step.place(batch))
        losses.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return np.array(losses), state


PLANS = {
    "microbatches": {"microbatches": 2, "memory": "full"},
    "ZeRO 3": {"mesh": "fsdp:4", "zero": 3, "memory": "full"},
    "tensor": {"mesh": "fsdp:2,tensor:2", "zero": 3, "memory": "chain:64KiB"},
    "bfloat16": {"precision": "bfloat16", "mesh": "sequence:2"},
    "a codec": {"mesh": "replica:2,fsdp:2", "zero": 3, "reduce": "int8"},
    "host state": {"optimizer_state": "host", "memory": "revolve:1"},
}


@functools.cache
def alone(base):
    """A step over a base on one device, its losses and its last state."""
    step = step_of(dataclasses.replace(NF4, base=base))
    return step, *trajectory(step)


@functools.cache
def dequantized(base):
    """Losses of the twin on one device."""
    return trajectory(step_of(twin_of(dataclasses.replace(NF4, base=base))))[0]


@functools.cache
def unquantized():
    """Losses over a base in float32."""
    return trajectory(step_of(dataclasses.replace(NF4, base=None, base_block=64)))[0]


@pytest.mark.parametrize("base", variants(FORMATS, {"nf4"}))
def test_one_device_trains_as_over_the_dequantized_base(base):
    step, losses, state = alone(base)
    np.testing.assert_allclose(losses, dequantized(base), rtol=1e-5)
    assert 0 < np.abs(losses - unquantized()).max() < 0.01
    before = named_leaves(step.init().rest)
    for path, leaf in named_leaves(state.rest).items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(before[path]))


TIERS = {"ZeRO 3": (), "microbatches": pytest.mark.variant, "tensor": pytest.mark.variant}
ROUNDED = ("bfloat16", "a codec")
"""Plans that change the numbers by design: their twin is trained under the same plan, that of the others alone."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=TIERS.get(name, pytest.mark.slow)) for name in PLANS])
def test_every_plan_trains_as_over_the_dequantized_base(name):
    losses, state = trajectory(step := step_of(**PLANS[name]))
    twin = trajectory(step_of(twin_of(NF4), **PLANS[name]))[0] if name in ROUNDED else dequantized("nf4")
    np.testing.assert_allclose(losses, twin, rtol=1e-5)
    if step.plan.zero == 3 and "tensor" not in PLANS[name]["mesh"]:
        codes = named_leaves(state.rest)["blocks/layers/mlp/up/weight/codes"]
        assert codes.addressable_shards[0].data.size * step.plan.mesh.sizes["fsdp"] == codes.size


@pytest.mark.slow
def test_a_state_in_8_bits_trains_as_over_the_dequantized_base():
    wide = dataclasses.replace(NF4, rank=64, model=dataclasses.replace(DECODER, embed=64, layers=2))
    optimizer = Optimizer(name="adamw", learning_rate=1e-2)
    steps = [
        build(Experiment("few", model, Tokens(), optimizer, steps=STEPS, batch=ROWS), plan_of(state="int8", mesh="1"))
        for model in (wide, twin_of(wide))
    ]
    ours, expected = (trajectory(step)[0] for step in steps)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_zero_3_gathers_codes_and_not_numbers():
    step = step_of(**PLANS["ZeRO 3"])
    text = step.step_fn.lower(step.layout.abstract, step.abstract_batch(batches()[0])).compile().as_text()
    gathered = {kind.replace("[1,", "[") for kind in re.findall(r"= (\w+\[[\d,]*\])\S* all-gather\(", text)}
    # layers of 16 x 64 and 64 x 16 numbers, in blocks of 8: four bytes each
    assert {"u8[2,4,64]", "u8[8,4,16]"} <= gathered
    assert not {"f32[16,64]", "f32[64,16]", "f32[2,8,64]", "f32[8,8,16]"} & gathered


def test_bytes_counts_and_lines():
    step = step_of(dataclasses.replace(NF4, base_block=16))
    assert step.parameters == step_of(dataclasses.replace(NF4, base=None, base_block=64)).parameters
    memory, quantized = step.memory(batches()[0]), 4 * (4 * 16 * 16 + 3 * 16 * 64)
    assert step.pure_model.frozen_parameters == quantized + 2 * 16 * 16 + 9 * 16
    assert memory["frozen parameters"] == quantized // 2 + 4 * quantized // 16 + 4 * (2 * 16 * 16 + 9 * 16)
    (line,) = [line for line in step.describe() if line.startswith("base nf4")]
    assert line.startswith(f"base nf4: {quantized:,} parameters that are not trained are in few bits, at 0.75 bytes")
    assert f"train lora: {step.parameters:,} of {step.parameters + step.pure_model.frozen_parameters:,}" in str(
        step.describe()
    )


def test_a_checkpoint_has_codes_in_bytes_and_opens_on_another_mesh():
    step, _, state = alone("nf4")
    other = step_of(mesh="fsdp:2,tensor:2", zero=3, precision="bfloat16")
    arrays = step.to_canonical(state)
    name = "params/blocks/layers/3/mlp/up"
    assert (arrays[f"{name}/weight/codes"].shape, arrays[f"{name}/weight/codes"].dtype) == ((2, 4, 64), jnp.uint8)
    assert arrays[f"{name}/weight/scale"].dtype == jnp.float32
    params = {name.partition("/")[2].replace("/", "."): value for name, value in arrays.items() if "params/" in name}
    merged = NF4.merged(params)
    assert merged.keys() == {name for name in twin_params() if ".lora." not in name}
    layer = "blocks.layers.3.mlp.up"
    expected = step.module(state).blocks.layers.mlp.up.weight[...][3]
    expected += 2.0 * params[f"{layer}.lora.a"] @ params[f"{layer}.lora.b"]
    np.testing.assert_allclose(merged[f"{layer}.weight"], expected, rtol=1e-6)
    moved = {name: jax.device_put(arrays[name], leaf.sharding) for name, leaf in other.canonical_abstract().items()}
    weights = other.module(other.from_canonical(moved)).blocks.layers.mlp.up.weight
    np.testing.assert_array_equal(weights[...], step.module(state).blocks.layers.mlp.up.weight[...])
    assert weights.scale.dtype == jnp.float32, "precision bfloat16 casts no scale"


def twin_params():
    step = step_of(twin_of(NF4))
    return {name.partition("/")[2].replace("/", ".") for name in step.canonical_abstract() if "params/" in name}


def sequences(factor):
    """A batch of rows in which each token follows from the one before."""
    tokens = [np.arange(ROWS) * 2 % 16]
    for _ in range(8):
        tokens.append((tokens[-1] * factor + 3) % 16)
    rows = np.stack(tokens, 1).astype(np.int32)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def trained(model, factor, steps=80):
    """Losses of training on the sequences of a factor, and the parameters at the end."""
    optimizer = Optimizer(learning_rate=1e-2, custom=lambda rate: optax.adam(rate), clip=None)
    step = build(Experiment("few", model, Tokens(), optimizer, steps=steps, batch=ROWS), plan_of(mesh="1"))
    state, losses, batch = step.init(), [], step.place(sequences(factor))
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state


@functools.cache
def trained_base():
    """Parameters of a trained decoder, the decoder that starts from them, and losses of adapters over its floats."""
    base_losses, base_state = trained(DECODER, 5)
    assert base_losses[-1] < 0.3 * base_losses[0]
    base_params = jax.tree.map(np.asarray, base_state.params)

    @dataclasses.dataclass(frozen=True)
    class TrainedDecoder(Decoder):
        def initial_params(self):
            return base_params

    model = TrainedDecoder(**{field.name: getattr(DECODER, field.name) for field in dataclasses.fields(Decoder)})
    return base_params, model, trained(LoRA(model, rank=8), 7)[0]


@pytest.mark.variant  # by default, steps are compared with those over the dequantized base
@pytest.mark.parametrize("base", ["nf4", "int4"])
def test_adapters_learn_over_four_bits_of_a_trained_base_as_over_its_floats(base):
    """The loss on another task falls from the same value within 5 %, and as far as over floats within 5 %."""
    base_params, model, float_losses = trained_base()
    losses, state = trained(LoRA(model, rank=8, base=base), 7)
    up = base_params["blocks"]["layers"]["mlp"]["up"]["weight"]
    codes, _ = FORMATS[base].encode(jnp.asarray(up), 16)
    np.testing.assert_array_equal(state.rest["blocks"]["layers"]["mlp"]["up"]["weight"]["codes"], codes)
    assert losses[0] == pytest.approx(float_losses[0], rel=0.05)
    assert losses[0] - losses[-1] == pytest.approx(float_losses[0] - float_losses[-1], rel=0.05)
    assert float_losses[-1] < 0.3 * float_losses[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": "nf5"}, "base: unknown format 'nf5': expected one of int4, int8, nf4; did you mean 'nf4'"),
        ({"base": "nf4", "base_block": 4}, "base_block: got 4, expected a whole number >= 8"),
        ({"base": "nf4", "base_on": "("}, r"base_on: got '\(', expected a regular expression"),
        ({"base_block": 32}, "base_on and base_block are for a base in few bits: give base as well"),
    ],
)
def test_a_base_is_checked(options, message):
    with pytest.raises(UserError, match=message):
        LoRA(DECODER, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_on": "mpl"}, "base_on: 'mpl' is found in no path of a Linear layer; the paths are blocks/layers"),
        (
            {"model": dataclasses.replace(DECODER, mlp=66)},
            "base nf4: the 66 inputs of blocks/layers/mlp/down cannot be split into equal blocks of an even",
        ),
    ],
)
def test_a_base_that_does_not_fit_the_layers_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(NF4, **options).build(nnx.Rngs(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": "lora|attention"}, r"optimizer\.train: the pattern is found in .*attention.*, but a weight in few"),
        ({"model": dataclasses.replace(NF4, base_block=64), "mesh": "tensor:2"}, "take base_block 8, or fewer"),
        ({"matmul": "int8"}, "matmul int8 with a base in nf4: .*; leave matmul out"),
        ({"mesh": "pipe:2", "pipeline": "1f1b:2x2"}, "train lora with pipeline"),
        ({"weights": "host"}, "train lora with offload.weights host"),
    ],
)
def test_what_does_not_go_with_a_base_in_few_bits_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        step_of(**changes)
