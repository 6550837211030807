"""What a TPU's compiler finishes late: the gradient of a head's weight, where it is summed around a ring of devices.

Nothing is missing for it when the loss is done, yet XLA schedules the last steps of the ring, or all of them, behind
the backward pass of the blocks: no one asks for it sooner, and its messages have the blocks to hide behind. The logits,
or their gradient in the compute type, stay as long; which of the two, and how many of the ring's steps are late,
differs from program to program. The logits are taken, which are the more. Left out: rings that XLA happens to finish
before the blocks.
"""

from collections.abc import Callable, Iterable

from jaxscale.planning.flat import Operation, Program


def outlasting(program: Program, rings: Iterable[int], is_array: Callable[[Operation], bool]) -> dict[int, int]:
    """The arrays that a product around a ring needs until the blocks' backward pass is done, and that pass's place.

    Args:
        program: of a step, or of the body of its loop over microbatches.
        rings: places of the products that are summed around a ring.
        is_array: whether the results of an operation are arrays; an expression stays as what it is computed of.
    """
    operations = program.operations
    blocks = [at for at, one in enumerate(operations) if one.loop is not None and one.params.get("reverse")]
    if not blocks:
        return {}
    maker = {value: one for one in operations[: blocks[0]] for value in one.outputs}
    heads = [operations[at] for at in rings if at < blocks[0] and operations[at].backward]
    wanted = [value for head in heads for value in head.inputs]
    found: dict[int, int] = {}
    seen: set[int | None] = set()
    while wanted:
        value = wanted.pop()
        if value is None or value in seen or value not in maker:
            continue
        seen.add(value)
        if is_array(maker[value]):
            found[value] = blocks[-1]
        else:
            wanted += maker[value].inputs
    return found
