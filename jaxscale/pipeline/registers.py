"""Registers: the slots in which values live from one tick to another, allocated ahead of time as a compiler would."""

from collections.abc import Hashable, Iterable, Mapping


def allocate(lives: Iterable[tuple[int, int, Hashable]]) -> tuple[Mapping[Hashable, int], int]:
    """First fit over lifetimes: a slot is free again in the tick in which what it held is no longer read.

    For intervals this takes the fewest slots possible: as many as values are alive at once.

    Args:
        lives: (first tick, tick after the last, name) of each value.

    Returns:
        The slot of each value, and how many slots there are.

    Example:
        >>> allocate([(0, 3, "a"), (1, 4, "b"), (3, 5, "c")])
        ({'a': 0, 'b': 1, 'c': 0}, 2)
    """
    busy: list[int] = []
    slots: dict[Hashable, int] = {}
    for first, end, name in sorted(lives, key=lambda life: life[:2]):
        free = next((slot for slot, until in enumerate(busy) if until <= first), len(busy))
        if free == len(busy):
            busy.append(end)
        busy[free] = end
        slots[name] = free
    return slots, len(busy)
