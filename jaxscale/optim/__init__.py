"""Update rules, and wrappers that keep state in few bits or on the host, or exchange momentum in one bit a number.

Importing this package imports no JAX: each name below loads at its first use. Three rules have the name of their file
and are imported from that file: `from jaxscale.optim.muon import muon`, `.soap` and `.galore`.
`offload_state` keeps a rule's state on the host in a custom training loop. In our runs, the plan offloads it through
`offload.updates` (`optimizer_state="streamed"` or `"host"`).
"""

from typing import TYPE_CHECKING

from jaxscale.lazy import lazy_names

_MODULE_OF_NAME = {
    "Optimizer": "jaxscale.optim.optimizer",
    "lamb": "jaxscale.optim.large_batch",
    "lars": "jaxscale.optim.large_batch",
    "offload_state": "jaxscale.offload.wrapper",
    "one_bit_adam": "jaxscale.optim.one_bit",
    "one_bit_lamb": "jaxscale.optim.one_bit",
    "over_replicas": "jaxscale.optim.replica_updates",
    "quantize_state": "jaxscale.lowbit.quantized",
    "ramp_up": "jaxscale.optim.large_batch",
    "scaled": "jaxscale.optim.large_batch",
}

if TYPE_CHECKING:
    from jaxscale.lowbit.quantized import quantize_state
    from jaxscale.offload.wrapper import offload_state
    from jaxscale.optim.large_batch import lamb, lars, ramp_up, scaled
    from jaxscale.optim.one_bit import one_bit_adam, one_bit_lamb
    from jaxscale.optim.optimizer import Optimizer
    from jaxscale.optim.replica_updates import over_replicas

__all__ = [
    "Optimizer", "lamb", "lars", "offload_state", "one_bit_adam", "one_bit_lamb", "over_replicas", "quantize_state",
    "ramp_up", "scaled",
]  # fmt: skip

__getattr__ = lazy_names(__name__, _MODULE_OF_NAME)
