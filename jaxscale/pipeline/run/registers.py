"""Registers: the slots in which values live from one tick to another, allocated ahead of time as a compiler would."""

from collections.abc import Hashable, Iterable, Mapping


def allocate(lives: Iterable[tuple[int, int, Hashable]]) -> tuple[Mapping[Hashable, int], int]:
    """First fit over lifetimes: a slot is free again in the first tick in which its value is no longer read.

    For intervals this takes the fewest slots possible: as many as values are alive at once.

    Args:
        lives: (first tick, tick after the last, name) of each value.

    Returns:
        The slot of each value, and the number of slots.

    Example:
        >>> allocate([(0, 3, "a"), (1, 4, "b"), (3, 5, "c")])
        ({'a': 0, 'b': 1, 'c': 0}, 2)
    """
    slot_ends: list[int] = []
    slots: dict[Hashable, int] = {}
    for first, end, name in sorted(lives, key=lambda life: life[:2]):
        free_slot = next((slot for slot, slot_end in enumerate(slot_ends) if slot_end <= first), len(slot_ends))
        if free_slot == len(slot_ends):
            slot_ends.append(end)
        slot_ends[free_slot] = end
        slots[name] = free_slot
    return slots, len(slot_ends)
