"""Update rules, and wrappers that quantize state, keep state on the host, or exchange momentum in one bit.

Importing this package imports no JAX: each name below loads on first use.
`offload_state` keeps a rule's state on the host in a custom training loop. In runs under a plan, `offload.updates` does
this (`optimizer_state="streamed"` or `"host"`).
"""

from typing import TYPE_CHECKING

from jaxscale.lazy import lazy_names

_MODULE_BY_NAME = {
    "Messages": "jaxscale.optim.one_bit",
    "Optimizer": "jaxscale.optim.optimizer",
    "ParamInfo": "jaxscale.optim.leaves",
    "galore": "jaxscale.optim.matrix.galore",
    "lamb": "jaxscale.optim.large_batch",
    "lars": "jaxscale.optim.large_batch",
    "leaf_of": "jaxscale.optim.leaves",
    "leaves_of": "jaxscale.optim.leaves",
    "muon": "jaxscale.optim.matrix.muon",
    "newton_schulz": "jaxscale.optim.matrix.muon",
    "offload_state": "jaxscale.offload.wrapper",
    "one_bit_adam": "jaxscale.optim.one_bit",
    "one_bit_lamb": "jaxscale.optim.one_bit",
    "over_replicas": "jaxscale.optim.replica_updates",
    "quantize_state": "jaxscale.lowbit.quantized",
    "ramp_up": "jaxscale.optim.large_batch",
    "scaled": "jaxscale.optim.large_batch",
    "soap": "jaxscale.optim.matrix.soap",
    "split_weights": "jaxscale.lowbit.split_weights",
}
"""For each public name, the module from which the name loads on first use."""

if TYPE_CHECKING:
    from jaxscale.lowbit.quantized import quantize_state
    from jaxscale.lowbit.split_weights import split_weights
    from jaxscale.offload.wrapper import offload_state
    from jaxscale.optim.large_batch import lamb, lars, ramp_up, scaled
    from jaxscale.optim.leaves import ParamInfo, leaf_of, leaves_of
    from jaxscale.optim.matrix.galore import galore
    from jaxscale.optim.matrix.muon import muon, newton_schulz
    from jaxscale.optim.matrix.soap import soap
    from jaxscale.optim.one_bit import Messages, one_bit_adam, one_bit_lamb
    from jaxscale.optim.optimizer import Optimizer
    from jaxscale.optim.replica_updates import over_replicas

__all__ = [
    "Messages", "Optimizer", "ParamInfo", "galore", "lamb", "lars", "leaf_of", "leaves_of", "muon", "newton_schulz",
    "offload_state", "one_bit_adam", "one_bit_lamb", "over_replicas", "quantize_state", "ramp_up", "scaled", "soap",
    "split_weights",
]  # fmt: skip

__getattr__ = lazy_names(__name__, _MODULE_BY_NAME)
