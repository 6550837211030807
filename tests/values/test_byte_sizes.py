import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.errors import UserError
from jaxscale.values.byte_sizes import UNITS, bytes_at_least, bytes_text, parse_bytes


@given(st.integers(0, 2**60))
def test_a_text_is_read_back_to_the_byte(count):
    assert parse_bytes(bytes_text(count)) == count


@given(st.integers(0, 2**60))
def test_a_readable_number_is_enough_and_near(count):
    readable = bytes_at_least(count)
    assert count <= parse_bytes(readable) <= count * 1.01 + 1
    assert len(readable) <= len("1023.99GiB")


@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_with_and_without_a_space(unit):
    assert parse_bytes(f"2{unit}") == parse_bytes(f" 2 {unit} ") == 2 * UNITS[unit]


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9B", "1GiBs", "1.5B", "12", "1,5GiB", "٣GiB"])
def test_what_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(UserError, match="--limit"):
        parse_bytes(text, "--limit")
