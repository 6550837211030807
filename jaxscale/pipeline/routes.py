"""Routes: the rank of each stage in the named schedules."""


def straight(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Stage s on rank s mod p: once through the devices, or several times (interleaved).

    Example:
        >>> straight(2, chunks=2)
        (0, 1, 0, 1)
    """
    return tuple(range(ranks)) * chunks


def vee(ranks: int) -> tuple[int, ...]:
    """Down the devices and back up: the first and the last stage on rank 0 (ZB-V, DualPipe-V).

    Example:
        >>> vee(3)
        (0, 1, 2, 2, 1, 0)
    """
    return (*range(ranks), *reversed(range(ranks)))
