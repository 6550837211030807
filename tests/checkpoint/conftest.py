"""Many tests here train the same tiny model: its programs are compiled once."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _programs_are_kept(one_cache):
    pass
