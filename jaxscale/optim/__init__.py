"""Update rules and their wrappers: state in few bits or on the host, momentum exchanged in one bit a number.

Importing this package imports no JAX: each name below loads at its first use. Import a rule with the name of its file
from there: `from jaxscale.optim.muon import muon`, `.soap`, `.galore`, `.diloco`, `.split_weights`.
`offload_state` keeps a rule's state on the host in a custom training loop; in our runs the plan does
(`optimizer_state="streamed"` or `"host"`), by `offloaded.streamed` and `offloaded.on_host`.
"""

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "Optimizer": "optimizer",
    "lamb": "large_batch",
    "lars": "large_batch",
    "offload_state": "hosted",
    "one_bit_adam": "one_bit",
    "one_bit_lamb": "one_bit",
    "over_replicas": "one_bit",
    "quantize_state": "quantized",
    "ramp_up": "large_batch",
    "scaled": "large_batch",
}

if TYPE_CHECKING:
    from jaxscale.optim.hosted import offload_state
    from jaxscale.optim.large_batch import lamb, lars, ramp_up, scaled
    from jaxscale.optim.one_bit import one_bit_adam, one_bit_lamb, over_replicas
    from jaxscale.optim.optimizer import Optimizer
    from jaxscale.optim.quantized import quantize_state

__all__ = [
    "Optimizer", "lamb", "lars", "offload_state", "one_bit_adam", "one_bit_lamb", "over_replicas", "quantize_state",
    "ramp_up", "scaled",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
