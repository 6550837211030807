"""PipeMare: PipeDream without weight stashing (Yang et al., 2021, arXiv:1910.05124).

The order of PipeDream, but one version of the weights: a backward linearises at the newest, not at those its forward
read. What makes that converge, learning rates by delay and the discrepancy correction, is the executor's.
"""

import dataclasses

from jaxscale.pipeline.method import Method
from jaxscale.pipeline.schedule import Schedule, Versions
from jaxscale.pipeline.schedules.pipedream import pipedream


def pipemare(ranks: int, microbatches: int, updates: int) -> Schedule:
    """A stream of updates, one for each microbatch; arguments as of `pipedream`."""
    versions = Versions(group=microbatches, backward="newest")
    return dataclasses.replace(pipedream(ranks, microbatches, updates), name="pipemare", versions=versions)


METHOD = Method("pipemare", "PipeDream with one version of the weights", pipemare, steps=True, streams=True)
