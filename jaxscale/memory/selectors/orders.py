"""Rules that move values to the host in a given order until the others fit the budget, and recompute nothing.

Each rule is a sort key: the value with the least key goes to the host first.
"""

from jaxscale.memory.selectors.swap import Idle


def vdnn(value: Idle) -> float:
    """vDNN: the inputs of convolutions go to the host, in the order of the forward pass.

    Here the inputs of matrix products also go, and after them the other values, until the kept ones fit. Left out: the
    paper's choice of slower convolutions that need less workspace, and its prefetch, which XLA decides.

    References:
        Rhu et al., vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design, 2016
        (arXiv 1602.08124).
    """
    return not value.read_by_products


def tflms(value: Idle) -> float:
    """TFLMS: the value with the longest distance to its next read goes to the host first.

    Distance is in seconds here; the paper counts operations. Left out: the paper's control edges that time the copy
    back, which XLA decides, and its fusing of swaps.

    References:
        Le et al., TFLMS: Large Model Support in TensorFlow by Graph Rewriting, 2018 (arXiv 1807.02037).
    """
    return -value.seconds


def autoswap(value: Idle) -> float:
    """AutoSwap: the value with the largest product of bytes and idle time, its "area of absence", goes first.

    Left out: the paper's weighting of this score with three others by Bayesian optimization, and its memory pool,
    which XLA has.

    References:
        Zhang et al., Efficient Memory Management for GPU-based Deep Learning Systems, 2019 (arXiv 1903.06631).
    """
    return -value.seconds * value.bytes
