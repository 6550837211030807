"""Iterables of a user's own: the batches as they come, shared between processes, and continued from a state."""

import grain
import numpy as np
import pytest
from flax import nnx

import jaxscale as jx
from jaxscale.data import Arrays, Stream
from jaxscale.data.stream import as_data
from jaxscale.errors import UserError
from tests.tiers import variants


def batch(number, rows=4):
    return {"x": np.full((rows, 2), number, np.float64), "y": np.arange(rows)}


def batches(count=5):
    return (batch(number) for number in range(count))


def numbers(stream_batches, count):
    return [int(next(stream_batches)["x"][0, 0]) for _ in range(count)]


class Loader:
    """An iterable with the state of torchdata's loaders: it belongs to the iterable, and is set before iterating."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while True:
            self.next += 1
            yield batch(self.next - 1)

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class BytesState:
    """An iterator whose state is bytes."""

    def __init__(self):
        self.number = -1

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return batch(self.number)

    def get_state(self):
        return bytes([self.number])

    def set_state(self, state):
        (self.number,) = state


def grain_batches():
    return grain.MapDataset.range(1000).map(batch).to_iter_dataset()


@pytest.mark.parametrize("source", [batches, lambda: list(batches()), lambda: Loader(), BytesState, grain_batches])
def test_a_continued_stream_has_the_batches_of_one_that_was_not_cut(source):
    whole = Stream(source).open(4, 0).train()
    first = Stream(source).open(4, 0).train()
    expected = numbers(whole, 9)
    assert expected[:4] == [0, 1, 2, 3]
    assert numbers(first, 3) == expected[:3]
    state = first.get_state()
    continued = Stream(source).open(4, 0).train(state)
    assert numbers(continued, 6) == expected[3:]
    is_stateful = "state" in state
    assert is_stateful == (source not in (batches,) and not isinstance(source(), list))
    assert (continued.note is None) == is_stateful
    if not is_stateful:
        assert continued.note == "the data has no state: read 3 batches and dropped them"


def test_a_finite_iterable_starts_again_and_an_iterator_ends_with_an_error():
    assert numbers(Stream(lambda: batches(3)).open(4, 0).train(), 7) == [0, 1, 2, 0, 1, 2, 0]
    once = Stream(batches(3)).open(4, 0).train()
    assert numbers(once, 3) == [0, 1, 2]
    with pytest.raises(UserError, match="the data ended after 3 batches, as an iterator can be read only once"):
        next(once)
    with pytest.raises(UserError, match="the iterable has no batch"):
        next(Stream([]).open(4, 0).train())


def test_the_first_batch_of_an_iterator_is_not_lost_when_its_shapes_are_read():
    stream = Stream(batches())
    assert stream.shapes(4) == {"x": ((4, 2), "float32"), "y": ((4,), "int32")}
    assert numbers(stream.open(4, 0).train(), 2) == [0, 1]
    with pytest.raises(UserError, match="the run cannot continue with an iterator that has been read"):
        stream.open(4, 0).train({"next": 2})


def test_each_process_takes_its_rows_or_asks_for_them():
    parts = [Stream(batches).open(4, 0, process=index, processes=2).train() for index in range(2)]
    np.testing.assert_array_equal(np.concatenate([next(part)["y"] for part in parts]), np.arange(4))

    def own(process, processes):
        assert processes == 2
        return [{"y": np.arange(2) + 10 * process}]

    assert next(Stream(own).open(4, 0, process=1, processes=2).train())["y"].tolist() == [10, 11]


def test_held_out_batches_have_weights_and_one_shape():
    opened = Stream(batches, held_out=[batch(0), batch(1, rows=3)]).open(4, 0)
    for _ in range(2):
        found = list(opened.evaluation())
        assert [each["weights"].tolist() for each in found] == [[1, 1, 1, 1], [1, 1, 1, 0]]
        assert {each["x"].shape for each in found} == {(4, 2)}
    assert not list(Stream(batches).open(4, 0).evaluation())
    with pytest.raises(UserError, match="batch 0 of held_out has 5 rows, expected at most 4"):
        list(Stream(batches, held_out=[batch(0, rows=5)]).open(4, 0).evaluation())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([batch(0, rows=3)], "batch 0 has 3 rows, expected 4: the experiment's batch is 4; set batch=3"),
        ([batch(0), {"x": np.ones((4, 2))}], "batch 1 has .*, but the first batch .*: expected one shape and dtype"),
        ([{"x": np.ones((4, 2)), "class_weights": np.ones(10)}], r"numbers of rows {'x': 4, 'class_weights': 10}"),
        ([(np.ones(4), np.ones(4))], "batch 0: got a tuple, expected a dict of arrays"),
        ([{"text": ["a"] * 4}], r"batch 0: text is <U1\[4\], expected an array of numbers"),
        ([{"x": np.full(4, 2**40)}], "expected integers that fit in int32"),
        (
            lambda count: batches(count),
            r"batches: got a function with the parameters \(count\), .* no arguments",
        ),
        (lambda: None, "batches: the function returned a NoneType, expected an iterable"),
    ],
)
def test_a_batch_that_cannot_be_trained_on_is_refused(source, message):
    with pytest.raises(UserError, match=message):
        numbers(Stream(source).open(4, 0).train(), 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "batches: got a int, expected an iterable of batches"),
        (({"x": 1},), "batches: got a dict, expected an iterable"),
        ((batches, batches()), "held_out: got an iterator, which can be evaluated on only once"),
        ((batches, 3), "held_out: got a int"),
    ],
)
def test_what_is_no_iterable_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        Stream(*arguments)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ((np.ones(4), np.ones(4)), "data: got 2 arrays without names, expected a dict of arrays"),
        (np.ones(4), "data: got an array without a name, expected a dict"),
    ],
)
def test_arrays_without_names_are_no_data(source, message):
    with pytest.raises(UserError, match=message):
        as_data(source)


def test_a_state_that_json_cannot_hold_is_refused():
    class Odd(Loader):
        def state_dict(self):
            return {"next": object()}

    stream_batches = Stream(Odd()).open(4, 0).train()
    next(stream_batches)
    with pytest.raises(UserError, match="the state of the data cannot be stored"):
        stream_batches.get_state()


def test_what_an_experiment_takes_as_data():
    assert isinstance(as_data({"x": np.ones((4, 2))}), Arrays)
    assert isinstance(as_data(batches()), Stream)
    assert as_data(None) is None
    with pytest.raises(UserError, match=r"data: got 'a\.txt', expected data such as jaxscale\.data\.Text"):
        as_data("a.txt")


def test_a_run_on_batches_of_ones_own_continues_exactly_and_is_evaluated(tmp_path):
    def score(module, rows):
        return (module(rows["x"])[:, 0] - rows["y"]) ** 2

    def experiment(data):
        model = jx.models.ForeignModel(lambda rngs: nnx.Linear(2, 1, rngs=rngs), score)
        return jx.Experiment(name="own", model=model, data=data, steps=6, batch=4, plan=jx.Plan(mesh="1"))

    held_out = [batch(7, rows=3)]
    whole = jx.train(experiment(Stream(Loader(), held_out)), out=tmp_path / "whole", quiet=True)
    stop = [lambda event: event.kind == "step" and event.step == 2]
    cut = jx.train(experiment(Stream(Loader(), held_out)), out=tmp_path / "cut", quiet=True, callbacks=stop)
    assert cut.step == 2
    continued = jx.train(experiment(Stream(Loader(), held_out)), out=tmp_path / "cut", quiet=True)
    assert continued.step == 6
    assert continued.held_out_loss == whole.held_out_loss
    predicted = whole.module(np.full((3, 2), 7.0, np.float32))[:, 0]
    assert whole.held_out_loss == pytest.approx(float(((predicted - np.arange(3)) ** 2).mean()), rel=1e-5)


@pytest.mark.variant
@pytest.mark.parametrize("kind", variants(["map", "iter"], default=1))  # `grain_batches` above are an iterator's
def test_a_run_on_a_dataset_of_grain_continues_bit_for_bit(kind, tmp_path):
    """Shuffled anew in each epoch of 6 batches, with a run of 9 steps that is cut after 4 and after 7."""

    def dataset():
        rows = grain.MapDataset.range(24).seed(3).shuffle().repeat()
        rows = rows.map(lambda number: {"x": np.array([number, 1], np.float32) / 24, "y": np.float32(number)}).batch(4)
        return rows if kind == "map" else rows.to_iter_dataset()

    def trained(folder, stops=(), callbacks=()):
        model = jx.models.ForeignModel(lambda rngs: nnx.Linear(2, 1, rngs=rngs), score)
        experiment = jx.Experiment("own", model, dataset(), steps=9, batch=4, plan=jx.Plan(mesh="1"))
        for stop in stops:
            run = jx.train(experiment, out=folder, quiet=True, callbacks=[lambda event, stop=stop: event.step == stop])
            assert run.step < 9
        return jx.train(experiment, out=folder, quiet=True, callbacks=callbacks)

    def score(module, rows):
        return (module(rows["x"])[:, 0] - rows["y"]) ** 2

    whole, cut = trained(tmp_path / "whole"), trained(tmp_path / "cut", stops=(4, 7))
    assert len({float(loss) for loss in whole.metrics.column("loss")}) == 9
    np.testing.assert_array_equal(cut.metrics.column("loss"), whole.metrics.column("loss"))
    np.testing.assert_array_equal(cut.module.kernel[...], whole.module.kernel[...])


def test_a_function_in_c_that_does_not_specify_its_parameters_is_called():
    """`inspect.signature` raises ValueError for `dict`; an iteration over an empty dict ends at once."""
    with pytest.raises(UserError, match="batches"):
        next(Stream(dict).open(4, 0).train())
