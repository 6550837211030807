"""GPipe: all forwards, then all backwards (Huang et al., 2019, arXiv:1811.06965).

The bubble is (p-1)/(m+p-1) of the makespan, and every rank holds the activations of all m microbatches. All actions of
a tick have the same kind.
"""

from jaxscale.pipeline.builders import Lane, single_route, weave
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Kind, Schedule


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Make the schedule that runs all forwards and then all backwards.

    Args:
        ranks: p, number of ranks, with one stage each.
        microbatches: m, any number of microbatches.
    """
    phases = ("F", microbatches), ("B", microbatches)
    orders = (weave(Lane.of_stage(stage, microbatches), *phases) for stage in range(ranks))
    return single_route("gpipe", orders, microbatches, (microbatches,) * ranks, cycle=(Kind.F, Kind.B))


METHOD = Method("gpipe", "all forwards, then all backwards", gpipe)
