"""Tokens drawn through the cache: those of the model without a cache, under every form of the layers and on a mesh.

By default: layers one by one of one kind of model with samples, in one group and in two; one mesh with two axes.
"""

import jax
import numpy as np
import pytest
from flax import nnx

from jaxscale import blocks
from jaxscale.blocks import Context
from jaxscale.data.tokenizer import Bytes, Characters
from jaxscale.errors import UserError
from jaxscale.generation import generator as generators
from jaxscale.generation import memory, programs, unrolled
from jaxscale.generation.decode import Decoding
from jaxscale.generation.generator import Generator
from jaxscale.generation.sampling import Sampling
from jaxscale.generation.text_stream import TextStream, check_stop_texts
from jaxscale.layers.lora import add_adapters
from jaxscale.models.decoder import Decoder
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.sharding.rules import AxisRules
from jaxscale.training.generate import continuations, decode, stream_text
from tests.tiers import variants

FIELDS = {"vocab": 256, "context": 48, "layers": 3, "embed": 16, "heads": 4, "kv_heads": 2, "mlp": 16, "init_std": 0.3}
MODELS = {
    "rotary": {},
    "learned": {"positions": "learned"},
    "windows": {"windows": (3, None)},
    "soft caps": {"attention_soft_cap": 5.0, "final_soft_cap": 8.0, "post_norms": True},
}
GREEDY = Sampling(12, temperature=0.0)


def prompts_of(lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, length) for length in lengths]


def by_hand(module, prompt, count):
    """Greedy ids without a cache: the whole forward pass again for every token."""
    logits = jax.jit(lambda tokens: module(tokens)[0])
    ids = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, 48), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(np.argmax(logits(padded)[len(ids) - 1, :256])))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def generator():
    model = Decoder(**FIELDS)
    return Generator(model.build(nnx.Rngs(0)), model)


@pytest.mark.parametrize(
    "changes",
    variants([pytest.param(changes, id=name) for name, changes in MODELS.items()], default=["rotary", "windows"]),
)
def test_rows_of_several_lengths_are_those_of_the_model_without_a_cache(changes):
    model = Decoder(**FIELDS, **changes)
    module = model.build(nnx.Rngs(0))
    prompts = prompts_of((1, 9, 33))
    drawn_ids = decode(Generator(module, model), prompts, GREEDY)
    assert [ids.tolist() for ids in drawn_ids] == [by_hand(module, prompt, 12) for prompt in prompts]


def test_a_prompt_fed_in_chunks_gives_the_same_tokens(generator, monkeypatch):
    prompts = prompts_of((40, 7))
    whole = decode(generator, prompts, Sampling(6, temperature=0.0))
    monkeypatch.setattr(programs, "CHUNK", 16)
    chunked = decode(generator, prompts, Sampling(6, temperature=0.0))
    assert [ids.tolist() for ids in chunked] == [ids.tolist() for ids in whole]


SAMPLED = Sampling(9, samples=2, top_k=20, stop_ids=(7, 200))


@pytest.mark.parametrize(
    ("groups", "changes", "sampling"),
    variants(
        [
            pytest.param(groups, changes, sampling, id=f"{name} {kind} {groups}")
            for groups in ((3,), (2, 1))
            for name, changes in MODELS.items()
            for kind, sampling in (("greedy", GREEDY), ("2", SAMPLED))
        ],
        default=["windows 2 (3,)", "learned greedy (2, 1)"],
    ),
)
def test_layers_one_by_one_give_the_tokens_of_the_scan(groups, changes, sampling, monkeypatch):
    model = Decoder(**FIELDS, **changes)
    with blocks.grouping(groups):
        module = model.build(nnx.Rngs(0))
    monkeypatch.setattr(programs, "CHUNK", 16)
    prompts = prompts_of((5, 17))

    def drawn_ids():
        return [ids.tolist() for ids in decode(Generator(module, model), prompts, sampling)]

    unrolled_ids = drawn_ids()
    monkeypatch.setattr(unrolled, "MAX_LAYERS", 2)
    called_ids = drawn_ids()
    monkeypatch.setattr(generators, "layer_group_paths", lambda module: ())
    assert Generator(module, model).layered_module is None
    assert drawn_ids() == unrolled_ids == called_ids


def test_the_number_of_compiled_programs_does_not_depend_on_the_number_of_layers(monkeypatch):
    monkeypatch.setattr(unrolled, "MAX_LAYERS", 2)
    events = []
    counts = []

    def record(name, seconds, **settings):
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        for layers in (3, 4, 8):
            model = Decoder(**{**FIELDS, "layers": layers})
            generator = Generator(model.build(nnx.Rngs(0)), model)
            events.clear()
            decode(generator, prompts_of((5,)), GREEDY)
            counts.append(len(events))
    finally:
        jax.monitoring.unregister_event_duration_listener(record)
    assert counts[1] == counts[2] < 12


def step_text(generator):
    """The compiled steps after a prompt of 5 tokens."""
    session = generator.start([np.arange(5)], 1, 4, (GREEDY, 256))
    session.prefill([(0, 0)], np.zeros(1, np.int32))
    arguments = (generator.step_params, session.rows, session.row_keys, session.draw_settings, np.int32(3))
    return session.programs.advance.lower(*arguments).compile().as_text()


@pytest.mark.parametrize("is_split", [True, False])
def test_a_step_copies_no_weights_out_of_stacked_layers(generator, is_split, monkeypatch):
    if not is_split:
        monkeypatch.setattr(generators, "layer_group_paths", lambda module: ())
    module = nnx.merge(generator.graphdef, generator.params, copy=True)
    stacked_weights = f"f32[{FIELDS['layers']},{FIELDS['embed']},{FIELDS['mlp']}]"
    assert (stacked_weights in step_text(Generator(module, generator.model))) is not is_split


def test_a_step_copies_no_keys_and_values(generator):
    # (rows and heads, head_dim, slots) of a layer
    keys = "f32[2,4,16]{2,1,0}"
    lines = step_text(generator).splitlines()
    assert len([line for line in lines if f"{keys} dynamic-update-slice(" in line]) == 2 * FIELDS["layers"]
    assert not [line for line in lines if f"= {keys} copy(" in line or f"= {keys} transpose(" in line]


def test_lengths_are_rounded_up_by_at_most_64_or_an_eighth():
    for count in range(1, 5000):
        assert 0 <= programs.padded_length(count) - count <= max(64, count / 8)


def test_there_are_at_most_tokens_minus_one_steps_after_the_prefill(generator, monkeypatch):
    step_counts = []
    advance = generators.Session.advance
    monkeypatch.setattr(
        generators.Session, "advance", lambda self, count: step_counts.append(count) or advance(self, count)
    )
    decode(generator, prompts_of((5, 20)), GREEDY)
    assert sum(step_counts) == 11
    step_counts.clear()
    decode(generator, prompts_of((48,)), Sampling(1))
    assert step_counts == [], "a prompt as long as the context needs no step for one token"


def test_queries_keys_and_values_are_one_product(generator):
    layers = generator.params["blocks"]["layers"]["attention"]
    assert layers["q"]["weight"].shape == (FIELDS["layers"], FIELDS["embed"], 32)
    assert not layers.get("k")
    assert not layers.get("v")


def test_projections_with_adapters_or_in_a_narrow_type_stay_apart(generator):
    module = Decoder(**FIELDS).build(nnx.Rngs(0))
    narrow = Generator(module, generator.model, Context(matmul="fp8"))
    assert narrow.params["blocks"]["layers"]["attention"]["k"]["weight"].shape == (FIELDS["layers"], FIELDS["embed"], 8)
    add_adapters(module, 2, 1.0, "attention/v", jax.random.key(0))
    adapted = Generator(module, generator.model)
    assert "lora" in adapted.params["blocks"]["layers"]["attention"]["v"]


def test_a_stop_id_ends_its_row_alone(generator):
    prompts = prompts_of((4, 11))
    whole = decode(generator, prompts, GREEDY)
    stop_id = int(whole[0][3])
    ended = decode(generator, prompts, Sampling(12, temperature=0.0, stop_ids=(stop_id,)))
    for before, after in zip(whole, ended, strict=True):
        positions = np.flatnonzero(before == stop_id)
        assert after.tolist() == before[: positions[0] if len(positions) else None].tolist()
    assert len(ended[0]) < 12


def test_samples_differ_and_follow_from_the_seed(generator):
    settings = {"temperature": 1.5, "seed": 3}
    texts = continuations(generator, Bytes(), ["ab", "c"], Sampling(8, samples=3, **settings))
    assert [len(samples) for samples in texts] == [3, 3]
    assert len({text for samples in texts for text in samples}) == 6
    assert continuations(generator, Bytes(), ["ab", "c"], Sampling(8, samples=3, **settings)) == texts
    assert continuations(generator, Bytes(), "ab", Sampling(8, **settings)) == texts[0][0]


def test_a_stream_is_the_whole_text_in_pieces(generator):
    sampling = Sampling(60, temperature=1.0)
    pieces = list(stream_text(generator, Bytes(), "été", sampling))
    assert len(pieces) > 3
    assert "".join(pieces) == continuations(generator, Bytes(), "été", sampling)


def test_a_character_is_never_split():
    text_bytes = "aé中🙂b".encode()
    stream = TextStream(Bytes())
    assert [piece for byte in text_bytes if (piece := stream.push([byte]))] == list("aé中🙂b")


def test_a_stop_text_of_several_tokens_ends_the_text(generator):
    whole = continuations(generator, Characters("".join(map(chr, range(256)))), "ab", Sampling(30, temperature=1.0))
    stop_text = whole[9:12]
    sampling = Sampling(30, temperature=1.0, stop=(stop_text,))
    tokenizer = Characters("".join(map(chr, range(256))))
    expected = whole[: whole.index(stop_text)]
    assert continuations(generator, tokenizer, "ab", sampling) == expected
    assert "".join(stream_text(generator, tokenizer, "ab", sampling)) == expected


@pytest.mark.parametrize(
    "axes", variants([{"fsdp": 4, "tensor": 2}, {"fsdp": 8}, {"tensor": 2, "data": 4}], default=1), ids=str
)
def test_a_mesh_gives_the_tokens_of_one_device(generator, axes):
    mesh = MeshSpec(**axes).build(jax.devices())
    module = nnx.merge(generator.graphdef, generator.params, copy=True)
    on_mesh = Generator(module, generator.model, layout=(mesh, AxisRules()))
    prompts = prompts_of((3, 17, 5, 9, 1, 2, 30, 8))
    drawn_ids, expected = decode(on_mesh, prompts, GREEDY), decode(generator, prompts, GREEDY)
    assert [ids.tolist() for ids in drawn_ids] == [ids.tolist() for ids in expected]


def test_layers_of_sharded_weights_stay_sharded(generator):
    mesh = MeshSpec(fsdp=8).build(jax.devices())

    def placed(leaf):
        spec = [None] * (leaf.ndim - 1) + ["fsdp" if leaf.shape[-1] % 8 == 0 else None]
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))

    module = nnx.merge(generator.graphdef, jax.tree.map(placed, generator.params))
    on_mesh = Generator(module, generator.model, layout=(mesh, AxisRules()))
    layers = on_mesh.step_params["blocks"]["layers"]
    assert len(layers) == FIELDS["layers"]
    assert {leaf.sharding.spec[-1] for leaf in jax.tree.leaves(layers[1]) if leaf.shape[-1] % 8 == 0} == {"fsdp"}
    prompts = prompts_of((3, 17, 5))
    drawn_ids, expected = decode(on_mesh, prompts, GREEDY), decode(generator, prompts, GREEDY)
    assert [ids.tolist() for ids in drawn_ids] == [ids.tolist() for ids in expected]


def test_layers_of_one_device_share_the_memory_of_the_stack(generator):
    stacked = generator.params["blocks"]["layers"]["mlp"]["up"]["weight"]
    start = stacked.addressable_data(0).unsafe_buffer_pointer()
    for index, layer in enumerate(generator.step_params["blocks"]["layers"]):
        pointer = layer["mlp"]["up"]["weight"].addressable_data(0).unsafe_buffer_pointer()
        assert pointer - start == index * stacked.nbytes // FIELDS["layers"]


def test_more_samples_than_memory_are_refused(generator, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10_000)
    fitting_count = 10_000 // memory.row_bytes(generator, 7)
    with pytest.raises(
        UserError, match=rf"samples: got 50 continuations at once.*draw at most {fitting_count} at once"
    ):
        Decoding(generator, prompts_of((3,)), Sampling(5, samples=50))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 0.0}, "top_p: got 0.0"),
        ({"top_p": 1.1}, "top_p: got 1.1"),
        ({"top_k": 0}, "top_k: got 0"),
        ({"min_p": -0.1}, "min_p: got -0.1"),
        ({"min_p": 1.5}, "min_p: got 1.5"),
        ({"samples": 0}, "samples: got 0"),
        ({"stop": ("",)}, "stop: got ''"),
        ({"stop_ids": (-1,)}, "stop_ids: got -1"),
    ],
)
def test_values_out_of_range_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Sampling(**settings)


def test_a_stop_text_that_the_tokenizer_cannot_yield_is_refused():
    with pytest.raises(UserError, match="stop: 'x': the text contains 'x'"):
        check_stop_texts(Characters("abc"), ("x",))
    check_stop_texts(Characters("abc"), ("ab",))


@pytest.mark.parametrize("length", [0, 49])
def test_a_prompt_that_is_empty_or_too_long_is_refused(generator, length):
    with pytest.raises(UserError, match=f"got {length or 'no'} tokens, expected at"):
        Decoding(generator, prompts_of((length,)), GREEDY)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ("a" * 49, {}, "prompt 'a+...': got 49 tokens, expected at most 48"),
        ("", {}, "prompt '' has no tokens"),
        ("a", {"stop": ("\ud800",)}, "stop: '.*'"),
        ("a", {"samples": 2**30}, "samples: got 1073741824 continuations at once"),
    ],
    ids=["long", "empty", "stop", "samples"],
)
def test_bad_input_is_refused_before_anything_is_compiled(generator, monkeypatch, prompt, settings, message):
    monkeypatch.setattr(Generator, "start", lambda *arguments: pytest.fail("a program was made"))
    with pytest.raises(UserError, match=message):
        continuations(generator, Bytes(), prompt, Sampling(5, **settings))
