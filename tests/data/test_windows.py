import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.data.cache import Tokens
from jaxscale.data.windows import Windows


def counting(length, learned=None):
    return Tokens(np.arange(length, dtype=np.uint32), learned, np.array([0, length], np.int64))


@given(st.integers(0, 200), st.integers(1, 20), st.integers(0, 3))
def test_an_epoch_reads_windows_that_neither_overlap_nor_leave_gaps(length, context, epoch):
    rows = Windows(counting(length), context, seed=5)
    if not len(rows):
        assert length <= context
        return
    batch = rows.read(np.arange(len(rows)) + epoch * len(rows))
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    flat = batch["tokens"].reshape(-1)
    np.testing.assert_array_equal(flat, np.arange(len(flat)) + rows.offset(epoch))
    assert 0 <= rows.offset(epoch) < context
    assert length - 1 - len(flat) < 2 * context, "more is left out than the offset needs"


def test_offsets_differ_between_epochs_and_seeds():
    offsets = [[Windows(counting(1000), 64, seed).offset(epoch) for epoch in range(20)] for seed in (0, 1)]
    assert len(set(offsets[0])) > 10
    assert offsets[0] != offsets[1]
    assert offsets[0] != [offsets[1][0], *offsets[0][:-1]]


@pytest.mark.parametrize("length", [65, 66, 128, 129, 130, 1000])
def test_evaluation_covers_the_peers_targets_and_the_rest(length):
    """nanogpt_cpu: w = va[: (len(va) - 1) // T * T + 1]; x = w[:-1], y = w[1:], in rows of T, and what that drops."""
    context = 64
    va = np.arange(length)
    w = va[: (len(va) - 1) // context * context + 1]
    rows = Windows(counting(length), context, None)
    batch = rows.read(np.arange(len(rows)))
    full = (batch["weights"] == 1).all(1)
    np.testing.assert_array_equal(batch["tokens"][full], w[:-1].reshape(-1, context))
    np.testing.assert_array_equal(batch["targets"][full], w[1:].reshape(-1, context))
    counted = batch["weights"] > 0
    np.testing.assert_array_equal(batch["targets"][counted], va[1:])
    np.testing.assert_array_equal(batch["tokens"][counted], va[:-1])
    assert rows.targets == length - 1


def test_weights_belong_to_targets():
    learned = np.zeros(100, bool)
    learned[30:] = True
    rows = Windows(counting(96, learned[:96]), 10, None)
    batch = rows.read(np.arange(len(rows)))
    np.testing.assert_array_equal(batch["weights"], (batch["targets"] >= 30).astype(np.float32))
    assert batch["weights"].sum() == 66
