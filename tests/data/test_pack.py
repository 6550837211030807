import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.data.cache import Tokens
from jaxscale.data.pack import Packed, best_fit, split_documents


def one_by_one(lengths, capacity):
    """Best fit decreasing by its definition: room left in every row."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            best = min(fitting, key=lambda i: rooms[i])
            rooms[best] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@given(st.integers(1, 40).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=80))))
def test_best_fit_equals_its_definition(drawn):
    capacity, lengths = drawn
    packing = best_fit(np.array(lengths, np.int64), capacity)
    assert sorted(packing.piece_indices.tolist()) == list(range(len(lengths)))
    rows = [packing.piece_indices[a:b] for a, b in zip(packing.row_starts[:-1], packing.row_starts[1:], strict=True)]
    rooms = sorted(capacity - sum(lengths[i] for i in row) for row in rows)
    assert rooms == one_by_one(lengths, capacity)


def test_a_million_documents_are_packed_well():
    lengths = np.random.default_rng(0).integers(1, 2049, 1_000_000)
    packing = best_fit(lengths, 2048)
    assert len(packing.piece_indices) == len(lengths)
    assert lengths.sum() / ((len(packing.row_starts) - 1) * 2048) > 0.99


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 7))
def test_split_makes_every_token_but_the_first_a_target_once(sizes, context):
    starts = np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))]).astype(np.int64)
    first, length = split_documents(starts, context)
    assert length.tolist() == [] or (length.min() >= 1 and length.max() <= context)
    targets = [t for f, n in zip(first, length, strict=True) for t in range(f + 1, f + n + 1)]
    expected = [t for a, b in itertools.pairwise(starts) for t in range(a + 1, b)]
    assert targets == expected


def made(sizes, learned=None, seed=0):
    total = int(sum(sizes))
    starts = np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))]).astype(np.int64)
    ids = np.arange(total, dtype=np.uint16)  # a token's id is its place, so that it says where it came from
    return Tokens(ids, None if learned is None else np.asarray(learned, bool), starts)


@pytest.mark.parametrize("context", [1, 5, 16])
def test_no_document_leaks_and_no_target_is_lost(context):
    sizes = np.random.default_rng(1).integers(1, 40, 50)
    tokens = made(sizes)
    document = np.repeat(np.arange(len(sizes)), sizes)
    packed = Packed(tokens, context)
    batch = packed.read(np.arange(len(packed)))
    seen = []
    for row in range(len(packed)):
        token, target, segment, position, weight = (
            batch[name][row] for name in ("tokens", "targets", "segments", "positions", "weights")
        )
        used = segment > 0
        assert (weight == used).all()
        assert (np.diff(used.astype(int)) <= 0).all(), "padding stands at the end"
        assert not token[~used].any()
        assert not position[~used].any()
        assert (target[used] == token[used] + 1).all()
        assert (document[token[used]] == document[target[used]]).all(), "a target of another document"
        for number in range(1, segment.max() + 1):
            inside = segment == number
            assert len(set(document[token[inside]])) == 1
            assert position[inside].tolist() == list(range(inside.sum()))
            assert (np.diff(token[inside]) == 1).all()
        seen += target[used].tolist()
    firsts = set(tokens.document_starts[:-1].tolist())
    assert sorted(seen) == [place for place in range(sum(sizes)) if place not in firsts]
    assert packed.targets == len(seen)


def test_prompts_weigh_nothing_and_pieces_of_nothing_but_prompt_are_left_out():
    # documents: 4 tokens of prompt, 3 of answer; a prompt alone; 12 tokens, with the answer in the second piece
    learned = [0, 0, 0, 0, 1, 1, 1] + [0, 0, 0] + [0] * 10 + [1, 1]
    packed = Packed(made([7, 3, 12], learned), 8)
    batch = packed.read(np.arange(len(packed)))
    weighted = sorted(batch["targets"][batch["weights"] > 0].tolist())
    assert weighted == [4, 5, 6, 20, 21]
    assert (batch["weights"].sum(1) > 0).all(), "a row without a single target to learn"
    assert sorted(batch["targets"][batch["segments"] > 0].tolist()) == [1, 2, 3, 4, 5, 6, 19, 20, 21]


def test_a_row_is_the_same_in_any_company_and_epoch():
    packed = Packed(made(np.random.default_rng(2).integers(2, 20, 30)), 16)
    everything = packed.read(np.arange(len(packed)))
    some = packed.read(np.array([3, 3 + len(packed), 1]))
    for name, values in some.items():
        np.testing.assert_array_equal(values, everything[name][[3, 3, 1]])
