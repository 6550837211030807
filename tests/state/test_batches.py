import pytest

from jaxscale.state.batches import equal_part, span


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ({(0, 8)}, (0, 1)),
        ({(4, 6), (6, 8)}, (1, 2)),
        ({(0, 2), (4, 6)}, (0, 1)),  # not together
        ({(2, 6)}, (0, 1)),  # together, and no equal part
        ({(6, 8)}, (3, 4)),
    ],
)
def test_a_process_feeds_an_equal_part_or_reads_all(spans, expected):
    assert equal_part(spans, 8) == expected


def test_an_open_slice_ends_with_the_rows():
    assert span((slice(None), slice(None)), 8) == (0, 8)
    assert span((slice(4, None),), 8) == (4, 8)
