"""Record implementations that layers select without the dispatch of `pallas_kernels`, for reports on a program."""

from jaxscale.layers.attention_kernel import place
from pallas_kernels.dispatch import Explanation, listening, note
from pallas_kernels.target import target


def took(kernel: str, chosen: str, why: str | None = None) -> None:
    """Record the implementation that is about to run.

    Args:
        kernel: "attention", "cross_entropy".
        chosen: its name.
        why: why it is no kernel of the platform, in few words; `None` if nothing is better.
    """
    if not listening():
        return
    platform, kind = place()
    note(Explanation(kernel, target(f"{platform} {kind}"), chosen, {}, why))
