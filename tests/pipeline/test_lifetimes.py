"""Slots are as few as values alive at once, and no two values share one."""

import hypothesis
from hypothesis import strategies

from jaxscale.pipeline.run.lifetimes import allocate

LIVES = strategies.lists(strategies.tuples(strategies.integers(0, 30), strategies.integers(1, 9)), max_size=40)


@hypothesis.given(LIVES)
def test_as_few_slots_as_values_alive_at_once(given):
    lives = [(first, first + length, name) for name, (first, length) in enumerate(given)]
    slots, count = allocate(lives)
    alive = [{name for first, end, name in lives if first <= tick < end} for tick in range(40)]
    assert count == max(map(len, alive))
    assert all(len({slots[name] for name in names}) == len(names) for names in alive)
