"""CSV: the file format in which PyTorch and torchtitan store schedules (torch.distributed.pipelining, torch 2.13).

Each line is the order of a rank. Each cell is an action, such as `0F0`, `7I0`, `7W0` or `0B0`, or a pair of actions,
such as `(0F7;7B3)OVERLAP_F_B`. The cells of a line give an order, not times: empty cells are dropped, and an action
runs as soon as its inputs arrive. The lowered form also has messages, which are checked and then dropped. UNSHARD,
RESHARD and REDUCE_GRAD are ignored. The file specifies neither the rank of each stage nor the number of microbatches;
both are inferred from the actions.

Left out: the updates of asynchronous schedules, because PyTorch's format has no updates.
"""

import csv
import dataclasses
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxscale.errors import UserError
from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.check import Fault
from jaxscale.pipeline.infer_routes import count_microbatches, infer_routes
from jaxscale.pipeline.messages import Message, check_messages, lowered_cells
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.ticks import rows, ticks
from jaxscale.values.limits import MAX_SCHEDULE_FORWARDS, check_at_most
from jaxscale.values.read_files import read_bytes

_PASS = re.compile(r"\d{1,9}[FBIW]\d{1,9}", re.ASCII)
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B", re.ASCII)
_MESSAGE = re.compile(r"(\d{1,9})(SEND|RECV)_([FB])(\d{1,9})", re.ASCII)
_IGNORED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*", re.ASCII)
_MAX_ACTIONS = 6 * MAX_SCHEDULE_FORWARDS  # a forward, two parts of its backward, and their messages
_EXPECTED = "expected a pass such as 0F3 (stage, F/B/I/W, microbatch), (0F7;7B3)OVERLAP_F_B, 0SEND_F3 or 0UNSHARD"


def _cell_contents(text: str) -> Iterator[Action | Message]:
    """Yield the contents of a cell: nothing, one or two passes, or a message."""
    stripped_text = text.strip()
    if match := _MESSAGE.fullmatch(stripped_text):
        stage, verb, kind, microbatch = match.groups()
        yield Message(verb, kind, int(stage), int(microbatch))
    elif stripped_text and not _IGNORED.fullmatch(stripped_text):
        overlap_match = _OVERLAP.fullmatch(stripped_text)
        for pass_text in overlap_match[1].split(";") if overlap_match else [stripped_text]:
            if not _PASS.fullmatch(pass_text.strip()):
                raise UserError(f"got {stripped_text[:60]!r}, {_EXPECTED}")
            yield Action.parse(pass_text.strip())


def parse_csv(text: str, name: str = "csv") -> Schedule:
    """Parse the schedule that a CSV text describes.

    If all passes of each column have the same kind, and every pass is in a later column than its inputs, the result is
    a lock-step schedule, in which each tick has one kind.

    Args:
        text: text of the file. It has only passes (PyTorch's compute-only form) or also messages (the lowered form).
        name: name of the schedule, and of the file in error messages.

    Raises:
        Fault: a cell is invalid, or an action or message is missing, occurs twice, is misplaced or waits forever. The
            error names the rank and the cell in the file, both counted from 0.
        UserError: the text is empty.

    Example:
        >>> schedule = parse_csv("0F0,0F1,,0B0,0B1\\n,1F0,1B0,1F1,1I1,1W1")
        >>> schedule.ranks, schedule.microbatches, schedule.live, schedule.split
        (2, 2, (2, 1), True)
    """
    try:
        cell_rows = list(csv.reader(io.StringIO(text.rstrip())))
    except csv.Error as error:
        raise UserError(f"schedule {name}: {error}; expected cells of a few characters, separated by commas") from None
    orders: list[list[Action]] = [[] for _ in cell_rows]
    columns_by_rank: list[list[int]] = [[] for _ in cell_rows]  # the column of each action of `orders`
    located_messages: list[tuple[int, int, Message]] = []  # (rank, column, message)
    action_count = 0
    for rank, cells in enumerate(cell_rows):
        for column, cell in enumerate(cells):
            try:
                cell_contents = list(_cell_contents(cell))
            except UserError as error:
                raise Fault(name, str(error), rank, column) from None
            for cell_content in cell_contents:
                if isinstance(cell_content, Message):
                    located_messages.append((rank, column, cell_content))
                else:
                    orders[rank].append(cell_content)
                    columns_by_rank[rank].append(column)
                    action_count += 1
            check_at_most(f"schedule {name}: number of actions", action_count + len(located_messages), _MAX_ACTIONS)
        if not orders[rank]:
            raise Fault(name, "has no pass, expected one or more: each line has the passes of a rank", rank)
    if not orders:
        raise UserError(f"schedule {name}: got an empty file, expected a line for each rank")
    try:
        microbatches = count_microbatches(name, orders)
        routes, route = infer_routes(name, orders, microbatches)
        schedule = Schedule(name, tuple(map(tuple, orders)), len(routes[0]), microbatches, routes, route)
    except Fault as fault:
        raise fault.renumbered(columns_by_rank) from None
    column_of = {
        action: column
        for rank, order in enumerate(orders)
        for action, column in zip(order, columns_by_rank[rank], strict=True)
    }
    if located_messages:
        check_messages(schedule, located_messages, column_of)
        return schedule
    return _as_lockstep(schedule, column_of)


def _as_lockstep(schedule: Schedule, column_of: Mapping[Action, int]) -> Schedule:
    """Return the schedule as a lock-step schedule if its columns can be ticks; otherwise return `schedule`."""
    kind_of_column: dict[int, Kind] = {}
    for action, column in column_of.items():
        is_misplaced = any(column_of[input_action] >= column for input_action in schedule.inputs(action))
        if is_misplaced or kind_of_column.setdefault(column, action.kind) is not action.kind:
            return schedule
    cycle = tuple(dict.fromkeys(kind_of_column[column] for column in sorted(kind_of_column)))
    lockstep_schedule = dataclasses.replace(schedule, cycle=cycle)
    return lockstep_schedule if max(ticks(lockstep_schedule).values()) < len(kind_of_column) else schedule


def read_csv(path: str | Path) -> Schedule:
    """Read a schedule from a CSV file. The schedule gets the name of the file.

    Raises:
        UserError: the file cannot be read, or its text is not a valid schedule (see `parse_csv`).

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> _ = Path("gpipe.csv").write_text(to_csv(METHODS["gpipe"].schedule(2, 3)))
        >>> schedule = read_csv("gpipe.csv")
        >>> schedule.name, len(schedule.orders)
        ('gpipe.csv', 2)
    """
    try:
        text = read_bytes(Path(path)).decode("utf-8-sig")
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"schedule file {path}: {error}. Expected PyTorch's CSV with a line for each rank") from None
    return parse_csv(text, Path(path).name)


def to_csv(schedule: Schedule, *, lower: bool = False) -> str:
    """Return a schedule as CSV for PyTorch's reader.

    PyTorch's reader refuses Chimera, because each stage of Chimera is on two ranks.

    Args:
        schedule: a synchronous schedule.
        lower: whether to write the lowered form, which has messages (PyTorch's `compute_comms`). Otherwise each tick is
            a column, and the cell of an idle rank is empty.

    Raises:
        UserError: the schedule is asynchronous.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> print(to_csv(METHODS["1f1b"].schedule(2, 2)), end="")
        0F0,0F1,,0B0,,0B1
        ,1F0,1B0,1F1,1B1,
    """
    if schedule.versions is not None:
        raise UserError(
            f"schedule {schedule.name}: got updates of weights inside the schedule, which CSV cannot express"
        )
    actions_by_rank = zip(*rows(schedule), strict=True)
    cell_rows = lowered_cells(schedule) if lower else [[str(action or "") for action in row] for row in actions_by_rank]
    csv_buffer = io.StringIO()
    csv.writer(csv_buffer, lineterminator="\n").writerows(cell_rows)
    return csv_buffer.getvalue()
