"""PipeMare: PipeDream without weight stashing (Yang et al., 2021, arXiv:1910.05124).

The order is that of PipeDream, with one version of the weights: a backward differentiates its stage at the newest
weights, not at the weights that its forward read. To make training converge, the executor lowers the learning rates of
stages with a long delay, and corrects the weights that backwards read.
"""

import dataclasses

from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Schedule, Versions
from jaxscale.pipeline.schedules.pipedream import pipedream


def pipemare(ranks: int, microbatches: int, updates: int) -> Schedule:
    """Return the schedule of `pipedream` for the same arguments, but with one version of the weights."""
    versions = Versions(group=microbatches, backward="newest")
    return dataclasses.replace(pipedream(ranks, microbatches, updates), name="pipemare", versions=versions)


METHOD = Method("pipemare", "PipeDream with one version of the weights", pipemare, steps=True, streams=True)
