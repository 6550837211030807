"""CSV: schedules as PyTorch and torchtitan write and read them (torch.distributed.pipelining, torch 2.13).

A line is a rank, a cell an action: `0F0`, `7I0`, `7W0`, `0B0`, or `(0F7;7B3)OVERLAP_F_B` for two. Cells are an order,
not times: empty ones are dropped, and actions run as soon as their inputs arrive. The lowered form has messages too:
they are checked, then dropped. UNSHARD, RESHARD and REDUCE_GRAD are ignored. The file has neither the ranks of stages
nor the number of microbatches: both follow from the ranks' actions.

Left out: the updates of asynchronous schedules, which PyTorch's format lacks.
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
from jaxscale.pipeline.messages import Message, check_messages, lowered
from jaxscale.pipeline.schedule import Schedule
from jaxscale.pipeline.ticks import rows, ticks

_PASS = re.compile(r"\d+[FBIW]\d+", re.ASCII)
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B", re.ASCII)
_MESSAGE = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)", re.ASCII)
_IGNORED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*", re.ASCII)
_EXPECTED = (
    "expected a pass such as 0F3 (stage, one of F B I W, microbatch), (0F7;7B3)OVERLAP_F_B, 0SEND_F3 or 0UNSHARD"
)


def _parts(text: str) -> Iterator[Action | Message]:
    """The content of a cell: nothing, one or two passes, or a message."""
    text = text.strip()
    if match := _MESSAGE.fullmatch(text):
        stage, verb, kind, microbatch = match.groups()
        yield Message(verb, kind, int(stage), int(microbatch))
    elif text and not _IGNORED.fullmatch(text):
        overlap = _OVERLAP.fullmatch(text)
        for cell in overlap[1].split(";") if overlap else [text]:
            if not _PASS.fullmatch(cell.strip()):
                raise UserError(f"got {text!r}, {_EXPECTED}")
            yield Action.parse(cell.strip())


def parse_csv(text: str, name: str = "csv") -> Schedule:
    """The schedule of a CSV.

    If the columns are those of a lock-step schedule (each column of one kind, inputs in columns before), its ticks stay
    of one kind.

    Args:
        text: of the file, compute-only or lowered.
        name: of the schedule, and of the file in messages.

    Raises:
        Fault: an invalid cell; an action or message that is missing, doubled, misplaced, or waits for ever; with the
            rank and the cell in the file, both from 0.

    Example:
        >>> schedule = parse_csv("0F0,0F1,,0B0,0B1\\n,1F0,1B0,1F1,1I1,1W1")
        >>> schedule.ranks, schedule.microbatches, schedule.live, schedule.split
        (2, 2, (2, 1), True)
    """
    table = list(csv.reader(io.StringIO(text.rstrip())))
    orders: list[list[Action]] = [[] for _ in table]
    columns: list[list[int]] = [[] for _ in table]
    messages: list[tuple[int, int, Message]] = []
    for rank, row in enumerate(table):
        for column, cell in enumerate(row):
            try:
                parts = list(_parts(cell))
            except UserError as error:
                raise Fault(name, str(error), rank, column) from None
            for part in parts:
                if isinstance(part, Message):
                    messages.append((rank, column, part))
                else:
                    orders[rank].append(part)
                    columns[rank].append(column)
        if not orders[rank]:
            raise Fault(name, "computes nothing: a line is a rank, its cells what it does", rank)
    if not orders:
        raise UserError(f"schedule {name}: got an empty file, expected a line for each rank")
    try:
        microbatches = count_microbatches(name, orders)
        routes, route = infer_routes(name, orders, microbatches)
        schedule = Schedule(name, tuple(map(tuple, orders)), len(routes[0]), microbatches, routes, route)
    except Fault as fault:
        raise fault.renumbered(columns) from None
    column_of = {
        action: column for rank, order in enumerate(orders) for action, column in zip(order, columns[rank], strict=True)
    }
    if messages:
        check_messages(schedule, messages, column_of)
        return schedule
    return _as_lockstep(schedule, column_of)


def _as_lockstep(schedule: Schedule, column_of: Mapping[Action, int]) -> Schedule:
    """A lock-step schedule if the columns are the ticks of one, else the schedule itself."""
    kinds: dict[int, Kind] = {}
    for action, column in column_of.items():
        misplaced = any(column_of[source] >= column for source in schedule.inputs(action))
        if misplaced or kinds.setdefault(column, action.kind) is not action.kind:
            return schedule
    cycle = tuple(dict.fromkeys(kinds[column] for column in sorted(kinds)))
    lockstep = dataclasses.replace(schedule, cycle=cycle)
    return lockstep if max(ticks(lockstep).values()) < len(kinds) else schedule


def read_csv(path: str | Path) -> Schedule:
    """The schedule of a file, named after it.

    Raises:
        UserError: no such file, or an error of `parse_csv`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"schedule file {path}: {error}; expected PyTorch's CSV, a line for each rank") from None
    return parse_csv(text, Path(path).name)


def to_csv(schedule: Schedule, *, lower: bool = False) -> str:
    """The text of a schedule for PyTorch's reader (which refuses Chimera, with a stage on two ranks).

    Args:
        schedule: a synchronous one.
        lower: whether to write the form with messages (`compute_comms`); else a column for each tick, empty if idle.

    Raises:
        UserError: an asynchronous schedule.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> print(to_csv(METHODS["1f1b"].schedule(2, 2)), end="")
        0F0,0F1,,0B0,,0B1
        ,1F0,1B0,1F1,1B1,
    """
    if schedule.versions is not None:
        raise UserError(f"schedule {schedule.name}: it updates weights inside the schedule, which CSV cannot express")
    by_rank = zip(*rows(schedule), strict=True)
    cells = lowered(schedule) if lower else [[str(action or "") for action in row] for row in by_rank]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(cells)
    return text.getvalue()
