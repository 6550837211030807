"""Pipeline parallelism: every schedule as data, one checker, one simulator, one drawing, one executor.

| subject | files |
|---|---|
| a schedule | action.py (a cell), schedule.py (the actions of each rank), check.py (validity) |
| named schedules | schedules/ (a file each), method.py; built with weave.py, slots.py, routes.py |
| as a request | plan.py (`1f1b:4x8`) |
| as a file | csv.py (PyTorch's), messages.py, places.py |
| in time | ticks.py (all ranks move together), simulate.py (seconds, bubbles), clock.py, costs.py |
| as a chart | draw.py, chart_text.py, chart_svg.py |
| blocks to stages | partition.py, chain_cut.py, footprint.py, price.py, virtual_workers.py |
| searched schedules | search.py, batch_clock.py, exhaustive.py; auto.py (`auto:P`: schedule, microbatches, partition) |
| as a program | execute.py, actions.py, passes.py; tables.py, registers.py, phases.py; pools.py, held.py |
| in two halves | split.py, halves.py (input and weight gradients apart) |
| without end | asynchronous.py, stream.py, versions.py, pipemare.py |
"""
