"""Update rules and what wraps them: states in few bits, on the host, or exchanged between replicas in a bit a number.

Importing this package imports no JAX: each name below loads where it is first used. A rule that is a file's namesake is
imported from there: `from jaxscale.optim.muon import muon`, `.soap`, `.galore`, `.diloco`, `.split_weights`.
`offload_state` keeps a rule's state on the host in a training loop of one's own; for a run of ours the plan says it
(`optimizer_state="streamed"` or `"host"`), and `offloaded.streamed` and `offloaded.on_host` make that step.
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
