"""What every kind of data promises, checked on each: exact state, the same global batch for any number of processes."""

import itertools
import json
import threading

import numpy as np
import pytest

from jaxscale.data import Images, Mixture, Text
from jaxscale.data.loader import spread_order
from jaxscale.errors import UserError

KINDS = ("windows", "packed", "prompts", "mixture", "mixture_packed", "images")


@pytest.fixture(params=KINDS)
def data(request, corpus, tmp_path):
    other = tmp_path / "other.txt"
    other.write_bytes(b"<>".join(b"another %d text =>" % i + b"x" * i for i in range(40)))
    packed = {"context": 16, "layout": "packed", "separator": "<>"}
    if request.param == "images":
        rng = np.random.default_rng(0)
        path = tmp_path / "images.npz"
        np.savez(path, x=rng.integers(0, 17, (50, 4, 4)).astype(np.uint8), y=(np.arange(50) % 5).astype(np.uint8))
        return Images(path, scale=16.0)
    return {
        "windows": Text(corpus, context=16),
        "packed": Text(corpus, **packed),
        "prompts": Text(other, context=16, separator="<>", prompt_end="=>"),
        "mixture": Mixture((Text(corpus, context=16), Text(other, context=16)), (1.0, 3.0)),
        "mixture_packed": Mixture((Text(corpus, **packed), Text(other, prompt_end="=>", **packed)), (2.0, 1.0)),
    }[request.param]


def take(opened, count, start=None):
    with opened.train(start) as batches:
        return list(itertools.islice(batches, count))


def test_the_seed_decides_every_batch(data, same):
    first, second = take(data.open(4, 0), 12), take(data.open(4, 0), 12)
    for left, right in zip(first, second, strict=True):
        same(left, right)
    name = next(iter(first[0]))
    other = take(data.open(4, 1), 12)
    assert any((a[name] != b[name]).any() for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("at", [0, 1, 9])
def test_the_state_restores_exactly_in_the_middle_of_reading_ahead(data, same, at):
    opened = data.open(4, 3)
    with opened.train() as batches:
        for _ in range(at):
            next(batches)
        state = json.loads(json.dumps(batches.get_state()))
        expected = [next(batches) for _ in range(8)]
        batches.set_state(state)
        assert batches.get_state() == state
        for batch in expected:
            same(next(batches), batch)
    for left, right in zip(take(data.open(4, 3), 8, state), expected, strict=True):
        same(left, right)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_get_the_contiguous_rows_of_one_global_batch(data, same, processes):
    expected = take(data.open(8, 5), 5)
    shares = [data.open(8, 5, process=process, processes=processes) for process in range(processes)]
    taken = [take(share, 5) for share in shares]
    for batch, *parts in zip(expected, *taken, strict=True):
        same({name: np.concatenate([part[name] for part in parts]) for name in batch}, batch)
    held_out = [list(share.evaluation()) for share in shares]
    for batch, *parts in zip(data.open(8, 5).evaluation(), *held_out, strict=True):
        same({name: np.concatenate([part[name] for part in parts]) for name in batch}, batch)


def test_the_state_restores_on_another_number_of_processes(data, same):
    with data.open(8, 5, process=1, processes=2).train() as batches:
        for _ in range(3):
            next(batches)
        state = batches.get_state()
    same(take(data.open(8, 5), 1, state)[0], take(data.open(8, 5), 4)[-1])


def test_evaluation_is_repeatable_of_one_shape_and_weighs_its_targets_once(data):
    opened = data.open(8, 0)
    evaluation = opened.evaluation()
    once, twice = list(evaluation), list(evaluation)
    assert len(once) == len(evaluation) == -(-opened.facts["held_out_rows"] // 8)
    shapes = {name: values.shape for name, values in once[0].items()}
    assert "weights" in shapes
    for left, right in zip(once, twice, strict=True):
        assert {name: values.shape for name, values in left.items()} == shapes
        for name in left:
            np.testing.assert_array_equal(left[name], right[name])
    assert 0 < sum(batch["weights"].sum() for batch in once) <= opened.facts["held_out_targets"]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 55, 1000, 4096, 5040])
def test_evaluation_takes_every_row_once_and_any_number_of_the_first_evenly(count):
    order = spread_order(count)
    assert sorted(order) == list(range(count))
    for taken in (5, 20, 100):
        if count < 4 * taken:
            continue
        gaps = np.diff(np.sort(order[:taken]), append=order[:taken].min() + count)
        assert gaps.max() <= 2.5 * count / taken, "a stretch of rows is missed"


def test_a_few_batches_hold_documents_of_all_lengths(tmp_path):
    """Packed rows lie in the order of their packing; what is learnt of a long document is not what a short one says."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 64, 2000)
    path = tmp_path / "a.txt"
    path.write_text("<>".join("x" * length for length in lengths))
    opened = Text(path, context=64, layout="packed", separator="<>", held_out=0.5).open(8, 0)

    def mean(batches):
        sizes = np.concatenate([np.bincount(row[row > 0])[1:] for batch in batches for row in batch["segments"]])
        return np.average(sizes, weights=sizes), sizes.min(), sizes.max()

    everything = list(opened.evaluation())
    found = mean(everything[:6])
    assert len(everything) > 40
    np.testing.assert_allclose(found[0], mean(everything)[0], rtol=0.1)
    assert found[1] < 8
    assert found[2] > 56


def test_nothing_held_out_is_an_empty_evaluation(corpus):
    opened = Text(corpus, context=16, held_out=0.0).open(4, 0)
    assert len(opened.evaluation()) == 0
    assert list(opened.evaluation()) == []


def test_an_epoch_reads_every_row_once_and_the_next_in_another_order(corpus):
    opened = Text(corpus, context=16, layout="packed", separator="<>").open(1, 0)
    rows = opened.facts["rows"]
    taken = [batch["tokens"].tobytes() + batch["segments"].tobytes() for batch in take(opened, 2 * rows)]
    everything = [
        row.tobytes() + segments.tobytes()
        for batch in [opened.parts[0].read(np.arange(rows))]
        for row, segments in zip(batch["tokens"], batch["segments"], strict=True)
    ]
    assert sorted(taken[:rows]) == sorted(taken[rows:]) == sorted(everything)
    assert taken[:rows] != taken[rows:] != everything


def test_a_mixture_keeps_its_shares_and_every_row_of_its_parts(tmp_path):
    for name, letter in (("a", "a"), ("b", "b")):
        (tmp_path / f"{name}.txt").write_text(letter * 1000)
    mixture = Mixture(tuple(Text(tmp_path / f"{n}.txt", context=8, held_out=0.0) for n in "ab"), (1.0, 3.0))
    tokens = np.concatenate([batch["tokens"] for batch in take(mixture.open(8, 0), 100)])
    share = (tokens == ord("b")).mean()
    assert share == 0.75
    assert ((tokens == ord("a")).all(1) | (tokens == ord("b")).all(1)).all()


def test_a_part_without_weights_counts_fully_beside_one_that_has_some(corpus, tmp_path):
    path = tmp_path / "qa.txt"
    path.write_text("<>".join(f"zzzzzzzz=>{i:08d}" for i in range(30)))
    masked = Text(path, context=16, held_out=0.0, separator="<>", prompt_end="=>")
    mixture = Mixture((Text(corpus, context=16, held_out=0.0), masked), (1.0, 1.0))
    for batch in take(mixture.open(6, 0), 20):
        assert batch["weights"].dtype == np.float32
        prompt = np.isin(batch["targets"], list(b"z=>")) & (batch["tokens"] != ord(">"))
        mine = (batch["targets"] == ord("z")).any(1) | (batch["targets"] == ord("=")).any(1)
        assert (batch["weights"][~mine] == 1).all()
        assert (batch["weights"][mine][np.isin(batch["targets"][mine], list(b"z="))] == 0).all()
        assert prompt.shape == batch["weights"].shape


def test_no_thread_outlives_its_iterator(corpus):
    before = set(threading.enumerate())
    opened = Text(corpus, context=16).open(4, 0)
    for _ in range(3):
        with opened.train() as batches:
            next(batches)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


def test_a_state_of_other_data_is_refused(corpus):
    with Text(corpus, context=16).open(4, 0).train() as batches:
        state = batches.get_state()
    corpus.write_bytes(corpus.read_bytes() + b" and more")
    with pytest.raises(UserError, match="the data has changed since this run was last started"):
        Text(corpus, context=16).open(4, 0).train(state)
