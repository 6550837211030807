"""The collectives of a compiled program, by kind, mesh axes and bytes.

They are read from `compiled.as_text()`, the only format that CPU, GPU and TPU share. This text numbers devices by
their position in the mesh (row-major), not by their id, and spells replica groups in three ways:

    {{0,1},{2,3}}      [2,2]<=[4]  (iota; [2,2]<=[2,2]T(1,0) transposed)      mesh['data'=2,'fsdp'=2] {'fsdp'}

XLA:CPU never forms a reduce-scatter, and a TPU prints one as a fusion. So an all-reduce over n devices is listed as a
reduce-scatter if every use takes 1/n of its result (apart from copies, converts and tuples). If a collective overlaps
with matrix products, XLA:TPU prints it, always with the same channel, in every fusion with which it overlaps; it is
listed only where it starts. A transfer between TPU slices goes through the hosts (`platforms/megascale.py`), and is
listed with the bytes that leave a device. Left out: transfers inside a kernel (remote copies of Pallas), and all other
transfers to and from hosts.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from jaxscale.compiler.hlo_program import (
    ARRAY,
    Computation,
    HloProgram,
    Op,
    array_bytes,
    callees,
    integers,
    split_at_commas,
)
from jaxscale.platforms import megascale
from jaxscale.platforms.megascale import CollectiveKind

Groups = frozenset[frozenset[int]]

_KIND_BY_OPCODE: dict[str, Any] = {kind: kind for kind in get_args(CollectiveKind)} | {
    "ragged-all-to-all": "all-to-all"
}
# ops that only move or convert a whole value
_MOVE_OPCODES = {"bitcast", "convert", "copy", "copy-done", "copy-start", "opt-barrier", "optimization-barrier", "pad"}
_MOVE_OPCODES |= {"reshape", "transpose", "all-reduce-done", "async-done"}
_CALL_OPCODES = {"call", "fusion"}
_START_MARKER = 'custom_call_target="AsyncCollectiveStart"'


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Args:
        kind: kind of the operation; a reduce-scatter may be printed as an all-reduce whose result is sliced.
        axes: the mesh axes along which devices communicate, in mesh order; None if no set of axes matches the groups.
        bytes: bytes of the whole array, per device and execution: the result of an all-reduce or an all-gather, the
            operand of a reduce-scatter, the data sent by an all-to-all or a permute.
        count: number of executions in one run of the program, iterations of loops included.
        dtype: type of the elements, as XLA spells it ("f32", "bf16").
        computation: name of the computation that contains the operation.
        in_loop: whether the operation is inside a while loop.
        trips_known: whether every loop around the operation has a known trip count; if not, `count` assumes one trip.
    """

    kind: CollectiveKind
    axes: tuple[str, ...] | None
    bytes: int
    count: int
    dtype: str
    computation: str
    in_loop: bool = False
    trips_known: bool = True


def collectives(program: str | HloProgram, mesh: Any) -> list[Collective]:
    """Return the collectives of a compiled program, in the order of its text.

    A collective of a tuple (several arrays in one op) is listed once for each kind of collective and type of elements
    in it. Collectives whose groups have one device send nothing and are left out.

    Args:
        program: `compiled.as_text()`, or the program read from it.
        mesh: the mesh that the program was compiled for, or a mapping from axis name to size.

    Example:
        >>> program = '''
        ... ENTRY %main (x: f32[4]) -> f32[4] {
        ...   %x = f32[4]{0} parameter(0)
        ...   ROOT %sum = f32[4]{0} all-reduce(%x), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add
        ... }
        ... '''
        >>> [(c.kind, c.axes, c.bytes) for c in collectives(program, {"data": 2, "fsdp": 2})]
        [('all-reduce', ('data',), 16)]
    """
    program = HloProgram(program) if isinstance(program, str) else program
    return [
        collective
        for op_collectives in collectives_by_instruction(program, mesh).values()
        for collective in op_collectives
    ]


def collective_loop_depth(program: HloProgram) -> int:
    """Return the greatest number of nested loops and conditionals around a collective of a compiled program.

    Example:
        >>> text = "ENTRY %main (x: f32[4]) -> f32[4] {\\n  ROOT %y = f32[4] all-reduce(%x)\\n}"
        >>> collective_loop_depth(HloProgram(text))
        0
    """
    depth_by_computation: dict[str, int] = {}

    def depth_of(computation: Computation) -> int:
        if computation.name not in depth_by_computation:
            depth_by_computation[computation.name] = max(
                (
                    depth_of(caller) + (op.opcode in ("while", "conditional"))
                    for caller, op in program.callers.get(computation.name, [])
                ),
                default=0,
            )
        return depth_by_computation[computation.name]

    return max(
        (
            depth_of(computation)
            for computation, op in program.instructions()
            if op.opcode.removesuffix("-start") in _KIND_BY_OPCODE or op.opcode in ("send", "recv")
        ),
        default=0,
    )


def collectives_by_instruction(program: HloProgram, mesh: Any) -> dict[tuple[str, str], list[Collective]]:
    """Return the collectives of a compiled program by the names of their computation and instruction.

    Args:
        program: the program.
        mesh: the mesh that the program was compiled for, or a mapping from axis name to size.
    """
    mesh_sizes = dict(mesh if isinstance(mesh, Mapping) else mesh.shape)
    # number of devices along each mesh axis inside a slice, and the axes that cross slices
    axis_sizes, slice_axes = megascale.split_axes(mesh_sizes, megascale.slices_of(program.text))
    device_count = math.prod(axis_sizes.values())
    axes_by_groups = {groups_of(axis_sizes, axes): axes for axes in _axis_subsets(axis_sizes)}
    continuation_names = _continuation_names(program)
    collectives_by_location: dict[tuple[str, str], list[Collective]] = {}
    for computation, op in program.instructions():
        count, in_loop, trips_known = program.executions(computation.name)  # number of executions
        kind = _KIND_BY_OPCODE.get(op.opcode.removesuffix("-start"))
        if not count or (computation.name, op.name) in continuation_names:
            continue
        axes, group_size, is_sending = None, 0, False
        bytes_by_kind_and_dtype: Iterable[tuple[tuple[Any, str], int]] = ()
        if op.opcode == "send" and (send_kind := megascale.kind_of(op.attributes)):
            axes, dtype = slice_axes, op.arrays[0][0]
            bytes_by_kind_and_dtype = [((send_kind, dtype), nbytes) for nbytes in _message_part_bytes(computation, op)]
        elif kind == "collective-permute":
            device_pairs = permuted_pairs(op)
            axes = _permuted_axes(device_pairs, axis_sizes)
            group_size, is_sending = device_count, any(source != target for source, target in device_pairs)
        elif kind is not None:
            replica_groups = parse_groups(op.attributes, device_count)
            axes, group_size = axes_by_groups.get(replica_groups), max(map(len, replica_groups))
            is_sending = group_size > 1
        if kind is not None and is_sending:
            bytes_by_kind_and_dtype = _bytes_by_kind_and_dtype(program, computation, op, kind, group_size).items()
        op_collectives = [
            Collective(array_kind, axes, nbytes, count, dtype, computation.name, in_loop, trips_known)
            for (array_kind, dtype), nbytes in bytes_by_kind_and_dtype
        ]
        if op_collectives:
            collectives_by_location[computation.name, op.name] = op_collectives
    return collectives_by_location


def groups_of(axis_sizes: Mapping[str, int], axes: Iterable[str]) -> Groups:
    """Return the groups of devices that communicate along `axes` of a mesh, as positions in the mesh.

    Example:
        >>> sorted(map(sorted, groups_of({"data": 2, "fsdp": 2}, ["data"])))
        [[0, 2], [1, 3]]
    """
    axis_names = set(axes)
    axis_indices = [index for index, axis in enumerate(axis_sizes) if axis in axis_names]
    device_array = np.moveaxis(_device_array([*axis_sizes.values()]), axis_indices, range(len(axis_indices)))
    group_size = math.prod(size for axis, size in axis_sizes.items() if axis in axis_names)
    return frozenset(map(frozenset, device_array.reshape(group_size, -1).T.tolist()))


def _device_array(shape: Sequence[int]) -> np.ndarray:
    """Return the device numbers 0, 1, ... as an array of this shape."""
    return np.arange(math.prod(shape)).reshape(shape)


def parse_groups(attributes: str, device_count: int) -> Groups:
    """Return the replica groups in an instruction's attributes, in any spelling; by default one group of all devices.

    Example:
        >>> sorted(map(sorted, parse_groups("replica_groups=mesh['a'=2,'b'=2] {'b'}, dimensions={0}", 4)))
        [[0, 1], [2, 3]]
    """
    match = re.search(r"replica_groups=(.*)", attributes)
    groups_text = match[1] if match else ""
    if groups_text.startswith("mesh["):
        return _mesh_groups(groups_text)
    if groups_text.startswith("["):
        iota_match = re.match(r"\[([\d,]+)\](<=\[[\d,]+\](?:T\([\d,]+\))?)", groups_text)
        assert iota_match is not None, f"replica groups in an unknown spelling: {groups_text[:80]}"
        group_size = integers(iota_match[1])[-1]
        device_order = _iota(iota_match[2][2:])
        return frozenset(frozenset(device_order[i : i + group_size]) for i in range(0, len(device_order), group_size))
    braces_match = re.match(r"\{((?:\{[\d,\s]*\},?\s*)*)\}", groups_text)
    device_groups = [integers(text) for text in re.findall(r"\{([\d,\s]*)\}", braces_match[1])] if braces_match else []
    return frozenset(map(frozenset, device_groups)) if device_groups else frozenset([frozenset(range(device_count))])


def _mesh_groups(text: str) -> Groups:
    """Read groups such as `mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}`; `'a':(2)2` is a part of an axis."""
    match = re.match(r"mesh\[([^\]]*)\](?:, device_ids=\(((?:[^()]|\([^()]*\))*)\))? \{([^}]*)\}", text)
    assert match is not None, f"replica groups in an unknown spelling: {text[:80]}"
    axis_sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", match[1])}
    device_order = _iota(match[2]) if match[2] else range(math.prod(axis_sizes.values()))
    # 'NAME':(MAJOR)SIZE names a part of an axis: the axis is split into MAJOR x SIZE x (the remaining factor)
    split_axis_sizes: dict[str, int] = {}
    part_by_axis = {
        name: (int(major), int(size)) for name, major, size in re.findall(r"'([^']*)':\((\d+)\)(\d+)", match[3])
    }
    for name, size in axis_sizes.items():
        major, part_size = part_by_axis.get(name, (1, size))
        split_axis_sizes |= {f"{name}<": major, name: part_size, f"{name}>": size // (major * part_size)}
    position_groups = groups_of(split_axis_sizes, re.findall(r"'([^']*)'", match[3]))
    return frozenset(frozenset(device_order[position] for position in group) for group in position_groups)


def _iota(text: str) -> list[int]:
    """Return the device order of a text: "[2,4]T(1,0)" is 0, 1, ... as a (2, 4) array, transposed, read by rows."""
    shape_text, is_transposed, permutation = text.partition("T")
    number_array = _device_array(integers(shape_text))
    return (number_array.transpose(integers(permutation)) if is_transposed else number_array).ravel().tolist()


def _axis_subsets(axis_sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return every non-empty subset of the mesh axes that have several devices."""
    axes = [axis for axis, size in axis_sizes.items() if size > 1]
    return [subset for count in range(1, len(axes) + 1) for subset in itertools.combinations(axes, count)]


def permuted_pairs(op: Op) -> list[tuple[int, int]]:
    """Return a pair (source device, target device) for each transfer of a collective-permute."""
    pairs_text = op.attribute(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}") or ""
    return [(int(source), int(target)) for source, target in re.findall(r"\{(\d+),(\d+)\}", pairs_text)]


def _permuted_axes(device_pairs: list[tuple[int, int]], axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which the two devices of at least one pair (source, target) differ."""
    differing_axes = set()
    for source, target in device_pairs:
        # from the last axis on: the index along the axis, and the position in the mesh of the axes before it
        for axis, size in reversed(list(axis_sizes.items())):
            (source, source_index), (target, target_index) = divmod(source, size), divmod(target, size)
            if source_index != target_index:
                differing_axes.add(axis)
    return tuple(axis for axis in axis_sizes if axis in differing_axes)


def _continuation_names(program: HloProgram) -> set[tuple[str, str]]:
    """Return a pair (computation, instruction) for each collective in a fusion that does not start the collective."""
    # by channel, the collectives in fusions that start them and in other fusions, as (computation, instruction)
    start_names_by_channel: dict[str, list[tuple[str, str]]] = {}
    repeat_names_by_channel: dict[str, list[tuple[str, str]]] = {}
    for computation in program.computations.values():
        if not any(caller.opcode == "fusion" for _, caller in program.callers.get(computation.name, [])):
            continue
        is_start = any(_START_MARKER in op.attributes for op in computation.instructions.values())
        for op in computation.instructions.values():
            channel = op.attribute(r"\bchannel_id=(\d+)") if op.opcode in _KIND_BY_OPCODE else None
            if channel:
                (start_names_by_channel if is_start else repeat_names_by_channel).setdefault(channel, []).append(
                    (computation.name, op.name)
                )
    return {
        instruction for channel in start_names_by_channel for instruction in repeat_names_by_channel.get(channel, [])
    }


def _message_part_bytes(computation: Computation, send: Op) -> list[int]:
    """Return the bytes of each nonempty part of a message between slices.

    The parts are the arrays, the scalars that XLA packs with them, and the padding of these scalars to a tile of 4096
    bytes, the least that a TPU sends. A message that lacks arrays or scalars is one part.
    """
    total_bytes = send.bytes
    op = computation.instructions[send.operands[0]]
    while op.opcode in ("bitcast", "copy", "reshape") or 'custom_call_target="ZeroCrop"' in op.attributes:
        op = computation.instructions[op.operands[0]]
    array_and_number_bytes = [0, 0]  # of arrays, and of scalars
    for name in op.operands if op.opcode == "concatenate" else []:
        operand = computation.instructions[name]
        array_and_number_bytes[math.prod(operand.shape) == 1] += operand.bytes
    part_bytes = (*array_and_number_bytes, total_bytes - sum(array_and_number_bytes))
    return [byte_count for byte_count in part_bytes if byte_count] if all(array_and_number_bytes) else [total_bytes]


def _bytes_by_kind_and_dtype(
    program: HloProgram, computation: Computation, op: Op, kind: str, group_size: int
) -> dict[tuple[Any, str], int]:
    """Return the bytes of a collective, by kind and type of the elements.

    There is one entry, unless the collective's operand is a tuple and its arrays differ in type, or only some of them
    are sliced.
    """
    array_types, result_type = op.arrays, op.type
    if op.opcode.endswith("-start") and (kind != "all-reduce" or op.type.startswith("((")):
        # a start's type is a tuple: types of operands, types of results, contexts; an all-reduce may lack this tuple
        operand_types, result_types = [*split_at_commas(op.type[1:-1]), ""][:2]
        larger_types = max(operand_types, result_types, key=lambda types: sum(map(array_bytes, ARRAY.findall(types))))
        result_type = result_types if kind == "all-reduce" else larger_types
        array_types = ARRAY.findall(result_type)
    elif kind == "reduce-scatter":
        array_types = [(dtype, f"{shape},{group_size}" if shape else str(group_size)) for dtype, shape in array_types]
    bytes_by_kind_and_dtype: dict[tuple[Any, str], int] = {}
    for index, (dtype, shape) in enumerate(array_types):
        array_kind = kind
        if kind == "all-reduce":
            tuple_index = index if result_type.startswith("(") else None
            is_in_scatter = "all-reduce-scatter" in computation.name
            if is_in_scatter or _is_scattered(program, computation, op.name, tuple_index, group_size):
                array_kind = "reduce-scatter"
        bytes_by_kind_and_dtype[array_kind, dtype] = bytes_by_kind_and_dtype.get((array_kind, dtype), 0) + array_bytes(
            (dtype, shape)
        )
    return bytes_by_kind_and_dtype


def _is_scattered(
    program: HloProgram, computation: Computation, name: str, tuple_index: int | None, group_size: int
) -> bool:
    """Return whether every use of a value takes only 1/`group_size` of it.

    Args:
        program: the program of the value.
        computation: the computation of the value.
        name: name of the instruction that computes the value.
        tuple_index: if the instruction returns a tuple, index of the value in the tuple; otherwise `None`.
        group_size: number of devices of a group of the collective.
    """
    op = computation.instructions[name]
    users_and_positions = computation.users_and_positions(name)
    if op.is_root:
        if computation.is_entry:
            return False
        for caller, call in program.callers.get(computation.name, []):
            if call.opcode not in _CALL_OPCODES or not _is_scattered(
                program, caller, call.name, tuple_index, group_size
            ):
                return False
    elif not users_and_positions:
        return False
    return all(
        _takes_slice(program, computation, use, position, tuple_index, group_size)
        for use, position in users_and_positions
    )


def _takes_slice(
    program: HloProgram, computation: Computation, use: Op, position: int, tuple_index: int | None, group_size: int
) -> bool:
    """Return whether the instruction `use` takes only 1/`group_size` of its operand `position`; see `_is_scattered`."""
    if use.opcode == "get-tuple-element":
        element_text = use.attribute(r"index=(\d+)")
        is_other = element_text is not None and tuple_index is not None and int(element_text) != tuple_index
        return is_other or _is_scattered(program, computation, use.name, None, group_size)
    if use.opcode == "tuple":
        return _is_scattered(program, computation, use.name, position, group_size)
    if use.opcode in _MOVE_OPCODES:
        return _is_scattered(program, computation, use.name, tuple_index, group_size)
    if use.opcode == "dynamic-slice":
        operand = computation.instructions[use.operands[0]]
        return position == 0 and math.prod(operand.shape) == group_size * math.prod(use.shape)
    if use.opcode in _CALL_OPCODES:
        callee = program.computations[callees(use.attributes)[0]]
        return _is_scattered(program, callee, callee.parameter(position), tuple_index, group_size)
    return False
