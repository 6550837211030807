"""Pipeline parallelism: every schedule as data, one checker, one simulator, one drawing, one executor.

| file | what |
|---|---|
| action.py | one cell: kind, stage, microbatch |
| schedule.py, check.py | the actions of each rank, and what makes them valid |
| schedules/ | the named schedules, a file each |
| ticks.py | when each action runs if all ranks move together |
"""
