"""Pipeline parallelism: every schedule as data, one checker, one simulator, one drawing, one executor.

| subject | files |
|---|---|
| schedules | action.py (one pass), schedule.py (the actions of each rank), check.py (validity), ticks.py, versions.py |
| named schedules | schedules/ (one file for each), method.py, builders.py |
| requests for a schedule, such as `1f1b:4x8` | plan.py |
| files of schedules in PyTorch's CSV format | csv.py, messages.py, infer_routes.py |
| seconds and bubbles of a schedule | clock/: simulate.py, table.py, clock.py, many_orders.py, costs.py, measured.py |
| choice of partition and schedule | choose/: partition.py (blocks of a stage), search.py (orders), auto.py |
| execution in JAX | run/: execute.py, asynchronous.py, tables.py, actions.py, passes.py, split.py |
| charts | charts/ |
"""
