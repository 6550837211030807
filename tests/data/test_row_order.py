import grain
import pytest

from jaxscale.data.row_order import MOST_ROWS, RowOrder


@pytest.mark.parametrize("row_count", [1, 2, 3, 5, 64, 1000, 40_000, MOST_ROWS])
@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_the_order_is_grains(row_count, seed):
    theirs = grain.MapDataset.range(row_count).seed(seed).shuffle().repeat(1000)
    ours = RowOrder(row_count, seed)
    indices = {0, 1, row_count - 1, row_count, 2 * row_count + row_count // 3, 999 * row_count + row_count // 2}
    assert {index: ours.row(index) for index in indices} == {index: theirs[index] for index in indices}


def test_an_epoch_has_each_row_once():
    order = RowOrder(1000, 3)
    epochs = [[order.row(epoch * 1000 + index) for index in range(1000)] for epoch in range(3)]
    assert all(sorted(rows) == list(range(1000)) for rows in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
