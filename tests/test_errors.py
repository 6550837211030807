"""The message of a user's error is safe to print, whatever was given."""

import time

from jaxscale.errors import MAX_MESSAGE_CHARACTERS, UserError, near_miss


def test_a_long_message_loses_its_middle():
    message = str(UserError(f"mesh {'data:2,' * 10_000}: expected at most 7 axes"))
    assert len(message) == MAX_MESSAGE_CHARACTERS
    assert message.startswith("mesh data:2,")
    assert message.endswith("expected at most 7 axes")


def test_characters_that_control_a_terminal_are_escaped():
    assert str(UserError("name \x1b[31m\0\u202e: expected\n\ta name")) == (
        "name \\x1b[31m\\x00\\u202e: expected\n\ta name"
    )


def test_half_a_surrogate_pair_can_be_printed():
    assert str(UserError("name \ud800")).encode("utf-8") == b"name \\ud800"


def test_escapes_do_not_make_a_message_too_long():
    assert len(str(UserError("\0" * 10_000))) <= MAX_MESSAGE_CHARACTERS


def test_a_word_of_millions_of_characters_has_no_near_miss():
    start_time = time.process_time()
    assert near_miss("reference" * 1_000_000, ["reference"]) == ""
    assert time.process_time() - start_time < 1
