"""Rules that move values to the host, each rule in its own order, until the other values fit the budget.

Each rule is a sort key: the value with the least key goes to the host first. Nothing is recomputed.
"""

from jaxscale.memory.selectors.swap import IdleValue


def vdnn(value: IdleValue) -> float:
    """Return vDNN's sort key: the inputs of convolutions go to the host first, in the order of the forward pass.

    Here the inputs of matrix products count like those of convolutions, and other values follow. Left out: the paper's
    choice of slower convolutions that need less workspace, and its prefetching, which XLA decides.

    References:
        Rhu et al., vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design, 2016
        (arXiv 1602.08124).
    """
    return not value.is_product_input


def tflms(value: IdleValue) -> float:
    """Return TFLMS's sort key: the value with the longest distance to its next read goes to the host first.

    Distance is in seconds here; the paper counts operations. Left out: the paper's control edges, which determine when
    the copy back runs (XLA decides this here), and its fusion of swaps.

    References:
        Le et al., TFLMS: Large Model Support in TensorFlow by Graph Rewriting, 2018 (arXiv 1807.02037).
    """
    return -value.seconds


def autoswap(value: IdleValue) -> float:
    """Return AutoSwap's sort key: the value with the largest product of bytes and idle time goes to the host first.

    The paper calls this product the "area of absence". Left out: the paper's combination of this score with three
    others by Bayesian optimization, and its memory pool, which XLA provides.

    References:
        Zhang et al., Efficient Memory Management for GPU-based Deep Learning Systems, 2019 (arXiv 1903.06631).
    """
    return -value.seconds * value.bytes
