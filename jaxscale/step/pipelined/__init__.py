"""The train steps of pipelines: stages, their gradients, and the pipeline that never drains."""
