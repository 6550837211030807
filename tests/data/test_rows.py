"""Arrays and datasets of a user's own: every row once an epoch, held-out rows apart, each process its part."""

import grain
import numpy as np
import pytest

from jaxscale.data import Arrays, Rows
from jaxscale.errors import UserError

X = np.random.default_rng(0).normal(size=(20, 3))
Y = np.arange(20)


class Squares:
    """A dataset as PyTorch's: tuples by index, and many at once."""

    def __init__(self):
        self.calls = []

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return X[index], Y[index]

    def __getitems__(self, indices):
        self.calls.append(len(indices))
        return [self[index] for index in indices]


def datasets():
    return {
        "arrays": Arrays({"x": X, "y": Y}, held_out=0.2),
        "list of dicts": Rows([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)], held_out=0.2),
        "tuples": Rows(Squares(), held_out=0.2, names=("x", "y")),
        "grain": Rows(grain.MapDataset.range(20).map(lambda i: {"x": X[i], "y": Y[i]}), held_out=0.2),
    }


@pytest.mark.parametrize("name", datasets())
def test_an_epoch_has_each_row_once_and_no_row_that_is_held_out(name):
    opened = datasets()[name].open(4, seed=3)
    assert opened.facts["rows"] == 16
    batches = opened.train()
    epoch = [next(batches) for _ in range(4)]
    held_out = [row for batch in opened.evaluation() for row in batch["y"][batch["weights"] > 0]]
    seen = np.concatenate([batch["y"] for batch in epoch])
    assert sorted([*seen, *held_out]) == list(range(20))
    for batch in epoch:
        assert batch["x"].dtype == np.float32
        assert batch["y"].dtype == np.int32
        np.testing.assert_array_equal(batch["x"], X.astype(np.float32)[batch["y"]])
    assert (np.concatenate([next(batches)["y"] for _ in range(4)]) != seen).any()


def test_the_same_rows_as_a_dataset_of_dicts_from_arrays():
    batches = [next(data.open(4, seed=3).train()) for data in datasets().values()]
    for batch in batches[1:]:
        np.testing.assert_array_equal(batch["x"], batches[0]["x"])


def test_many_rows_are_read_by_one_call():
    squares = Squares()
    next(Rows(squares, held_out=0.0, names=("x", "y")).open(8, seed=0).train())
    assert 8 in squares.calls


def test_each_process_gets_its_rows_and_a_state_continues():
    data = Arrays({"x": X, "y": Y})
    whole, parts = data.open(4, 0).train(), [data.open(4, 0, process=i, processes=2).train() for i in range(2)]
    for _ in range(3):
        np.testing.assert_array_equal(next(whole)["y"], np.concatenate([next(part)["y"] for part in parts]))
    again = data.open(4, 0).train(whole.get_state())
    np.testing.assert_array_equal(next(whole)["x"], next(again)["x"])
    with pytest.raises(UserError, match="the data has changed since this run"):
        Arrays({"x": X + 1, "y": Y}).open(4, 0).train(whole.get_state())


@pytest.mark.parametrize("shape", [(200,), (200, 1)])
def test_data_of_the_generator_that_chooses_held_out_rows_is_refused(shape):
    drawn = np.random.default_rng(0).uniform(1, 5, shape)
    with pytest.raises(UserError, match=r"arrays\['u'\] rises or falls along the order in which rows are held out"):
        Arrays({"n": np.arange(200), "u": -drawn}).open(8, 0)
    Arrays({"u": drawn}, held_out=0.0).open(8, 0)
    Arrays({"u": np.random.default_rng(1).uniform(1, 5, shape), "same": np.ones(200)}).open(8, 0)
    one_label = np.zeros(200, np.int32)
    one_label[np.argmax(drawn)] = 1
    Arrays({"label": one_label}).open(8, 0)


def test_held_out_batches_are_filled_up_with_rows_of_weight_zero():
    weights = [batch["weights"].tolist() for batch in Arrays({"x": X}, held_out=0.3).open(4, 0).evaluation()]
    assert weights == [[1, 1, 1, 1], [1, 1, 0, 0]]
    own = Arrays({"x": X, "weights": np.full(20, 0.5)}, held_out=0.3).open(4, 0)
    assert [batch["weights"].sum() for batch in own.evaluation()] == [2, 1]
    assert not list(Arrays({"x": X}, held_out=0.0).open(4, 0).evaluation())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Arrays([X]), "arrays: got a list, expected a dict of NumPy arrays"),
        (lambda: Arrays({}), "got an empty dict, expected a dict of NumPy arrays"),
        (lambda: Arrays({"x": X, "y": Y[:3]}), r"numbers of rows {'x': 20, 'y': 3}, expected one row for each"),
        (lambda: Arrays({"x": np.array(["a"])}), r"arrays: x is <U1\[1\], expected an array of numbers"),
        (lambda: Arrays({"x": 3.0}), r"x is float64\[\], expected an array of numbers with one row"),
        (lambda: Arrays({"x": np.array([2**40])}), "x has numbers from 1099511627776 to .* that fit in int32"),
        (lambda: Arrays({1: X}), "got the name 1, expected names that are texts"),
        (lambda: Arrays({"x": X}, held_out=1.5), "held_out: got 1.5, expected a share of the rows"),
        (lambda: Arrays({"x": X}, held_out=0.99).open(4, 0), "20 rows: held_out 0.99 leaves none to train on"),
        (lambda: Arrays({"x": X}).open(4, 0, processes=3), "cannot be split evenly over 3 processes"),
        (lambda: Rows({"x": X}), "rows: got a dict, .* for a dict of arrays, use jaxscale.data.Arrays"),
        (lambda: Rows(iter([])), "rows: got list_iterator, expected a dataset with len"),
        (lambda: Rows([]).open(4, 0), "the data has 0 rows: held_out 0.1 leaves none to train on"),
        (lambda: Rows([(1, 2)]).open(1, 0), r"rows\[0\]: got a tuple of 2, .* a tuple needs names="),
        (lambda: Rows([(1, 2)], names=("x",)).open(1, 0), r"rows\[0\]: got a tuple of 2, expected a tuple of x"),
        (lambda: Rows([{"x": "a"}] * 9).open(1, 0), r"x is <U1\[1\]"),
    ],
)
def test_what_is_no_data_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"x": np.ones(3)}, r"has shape \(3,\), but rows\[.*\(2,\): expected one shape in all rows; pad or cut"),
        ({"z": 1.0}, r"expected the same names in all rows"),
    ],
)
def test_a_row_unlike_the_others_is_refused(odd, message):
    rows = [{"x": np.ones(2)} for _ in range(8)]
    rows[5] = odd
    with pytest.raises(UserError, match=message):
        next(Rows(rows, held_out=0.0).open(8, 0).train())


def test_data_is_equal_to_itself_alone():
    data = Arrays({"x": X})
    assert data == data
    assert data != Arrays({"x": X})
    assert len({data, Arrays({"x": X})}) == 2


@pytest.mark.parametrize(("batch", "has_note"), [(8, False), (9, True)])
def test_a_batch_that_is_larger_than_the_data_is_reported(batch, has_note):
    """Ten rows, two of them held out, are repeated in a batch of nine."""
    data = Arrays({"x": np.random.default_rng(5).normal(size=(10, 3))}, held_out=0.2)
    note = data.open(batch, seed=0).train().note
    assert (note is not None) is has_note
    if has_note:
        assert note == (
            "batch: 9 rows a step are more than the 8 rows of the data, which are repeated within a batch; a batch of "
            "at most 8 rows takes less time"
        )
