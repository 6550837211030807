"""Train steps of pipelines: gradients by a schedule, and the pipeline that never drains."""
