"""Schedules as PyTorch writes them, for `tests/pipeline/test_csv.py`; and whether PyTorch takes what we write.

    python make.py                  # writes the *.csv here; needs torch 2.13 (the CPU build will do)
    python make.py --check FOLDER   # loads every *.csv of FOLDER with PyTorch's own reader: NAME.csv, NAME.lowered.csv

FOLDER comes from `python -m pytest tests/pipeline/test_csv.py --basetemp X` (X/test_written_for_torch0).

GPipe and 1F1B have no `_dump_csv`: what `_get_pipeline_order` gives is written as `_dump_csv` would. That 1F1B order is
wrong in torch 2.13 (the last rank lacks microbatch 0 and has one that does not exist): it is kept to be refused.
"""

import csv
import sys
from pathlib import Path
from unittest.mock import Mock

import torch
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import _PipelineStageBase

HERE = Path(__file__).parent
MULTI = {
    "interleaved_1f1b": (schedules.ScheduleInterleaved1F1B, 4, 8, 2),
    "interleaved_1f1b_10": (schedules.ScheduleInterleaved1F1B, 4, 10, 2),
    "zero_bubble_1": (schedules.ScheduleInterleavedZeroBubble, 4, 8, 1),
    "zero_bubble_2": (schedules.ScheduleInterleavedZeroBubble, 4, 8, 2),
    "zbv": (schedules.ScheduleZBVZeroBubble, 4, 8, 2),
    "dualpipe_v": (schedules.ScheduleDualPipeV, 4, 10, 2),
}
"""By file name: class, ranks, microbatches, stages a rank."""

SILENT = (schedules.UNSHARD, schedules.RESHARD, schedules.REDUCE_GRAD)
"""What PyTorch's simulator does not know."""


def stages(ranks: int, per_rank: int) -> list[Mock]:
    """Stages that know their numbers alone."""
    found = []
    for index in range(per_rank):
        stage = Mock(spec=_PipelineStageBase)
        stage.stage_index, stage.num_stages, stage.group_size = index * ranks, ranks * per_rank, ranks
        stage.group_rank, stage.is_last, stage.has_backward, stage.submod = 0, False, True, None
        stage.stage_index_to_group_rank = {}
        found.append(stage)
    return found


def make() -> None:
    """Write the files."""
    for name, (kind, ranks, microbatches, per_rank) in MULTI.items():
        schedule = kind(stages(ranks, per_rank), microbatches)
        for form, suffix in (("compute_only", ""), ("compute_comms", ".lowered")):
            schedule._dump_csv(HERE / f"{name}{suffix}.csv", form)
    for name, kind in (("gpipe", schedules.ScheduleGPipe), ("1f1b", schedules.Schedule1F1B)):
        [stage] = stages(4, 1)
        order = kind(stage, 8)._get_pipeline_order()
        with (HERE / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(order[rank] for rank in range(4))


def check(folder: Path) -> None:
    """Load every file of a folder with PyTorch's reader, and simulate it with PyTorch's simulator."""
    for path in sorted(folder.glob("*.csv")):
        rows = list(csv.reader(path.open(newline="")))
        cells = [schedules._Action.from_str(cell) for row in rows for cell in row if cell]
        passes = [cell for cell in cells if cell.computation_type == schedules.FORWARD]
        count = 1 + max(cell.stage_index for cell in passes)
        microbatches = 1 + max(cell.microbatch_index for cell in passes)
        schedule = _PipelineScheduleRuntime(stages(len(rows), count // len(rows)), microbatches)
        schedule._load_csv(path, "compute_comms" if ".lowered" in path.name else "compute_only")
        told = schedule.pipeline_order_with_comms.items()
        work = {rank: [one for one in order if one.computation_type not in SILENT] for rank, order in told}
        places = schedule.stage_index_to_group_rank
        schedules._simulate_comms_compute(work, places.__getitem__, count)
        print(f"{path.name}: taken ({len(rows)} ranks, {count} stages, {microbatches} microbatches)")


if __name__ == "__main__":
    assert torch.__version__.startswith("2.13"), torch.__version__
    if sys.argv[1:2] == ["--check"]:
        check(Path(sys.argv[2]))
    else:
        make()
