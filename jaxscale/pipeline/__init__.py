"""Pipeline parallelism: every schedule as data, one checker, one simulator, one drawing, one executor.

| subject | files |
|---|---|
| a schedule | action.py (a cell), schedule.py (the actions of each rank), check.py (validity), ticks.py, versions.py |
| named schedules | schedules/ (a file each), method.py; made with builders.py |
| as a request | plan.py (`1f1b:4x8`) |
| as a file | csv.py (PyTorch's), messages.py, infer_routes.py |
| in time | clock/: simulate.py (seconds, bubbles), table.py, clock.py, many_orders.py, costs.py, measured.py |
| chosen | choose/: partition.py (blocks to stages), search.py (orders), auto.py (`auto:P`: both, and microbatches) |
| as a program | run/: execute.py, asynchronous.py; tables.py, actions.py, passes.py, split.py (in two halves) |
| as a chart | charts/ |
"""
