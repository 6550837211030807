"""What a layer takes where no dispatch of `pallas_kernels` has chosen it, for those who ask what a program runs."""

from jaxscale.layers.attention_kernel import place
from pallas_kernels.dispatch import Explanation, listening, note
from pallas_kernels.target import target


def took(kernel: str, chosen: str, why: str | None = None) -> None:
    """Note an implementation that is about to run here.

    Args:
        kernel: "attention", "cross_entropy".
        chosen: its name.
        why: why it is no kernel of the platform, in few words; `None` where nothing is better.
    """
    if not listening():
        return
    platform, kind = place()
    note(Explanation(kernel, target(f"{platform} {kind}"), chosen, {}, why))
