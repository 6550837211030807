"""Memory plans: the choice of the values that are kept from the forward pass for the backward pass."""

from typing import TYPE_CHECKING

from jaxscale.lazy import lazy_names

_MODULE_BY_NAME = {
    "BlockGraph": "jaxscale.programs.block",
    "Decision": "jaxscale.memory.decision",
    "Host": "jaxscale.memory.save_set",
    "MemoryPlan": "jaxscale.memory.plan",
    "Option": "jaxscale.memory.chain",
    "SELECTORS": "jaxscale.memory.selectors",
    "SaveSet": "jaxscale.memory.decision",
    "Stage": "jaxscale.memory.chain",
    "StaleGraph": "jaxscale.memory.keep_named",
    "block_graph": "jaxscale.programs.block",
    "collect": "jaxscale.programs.collect",
    "greedy": "jaxscale.memory.greedy_sets",
    "keep_all": "jaxscale.memory.chain",
    "periodic": "jaxscale.memory.chain",
    "policy_set": "jaxscale.memory.save_set",
    "read_decision": "jaxscale.memory.decision",
    "remat": "jaxscale.memory.one_block",
    "revolve": "jaxscale.memory.chain",
    "revolve_cost": "jaxscale.memory.chain",
    "rotor": "jaxscale.memory.rotor_table",
    "simulate": "jaxscale.memory.chain",
    "solve": "jaxscale.memory.graph",
    "square_root": "jaxscale.memory.chain",
    "times_run": "jaxscale.memory.chain",
}
"""The module of each public name; a name is loaded from its module at the first use."""

if TYPE_CHECKING:
    from jaxscale.memory.chain import (
        Option,
        Stage,
        keep_all,
        periodic,
        revolve,
        revolve_cost,
        simulate,
        square_root,
        times_run,
    )
    from jaxscale.memory.decision import Decision, SaveSet, read_decision
    from jaxscale.memory.graph import solve
    from jaxscale.memory.greedy_sets import greedy
    from jaxscale.memory.keep_named import StaleGraph
    from jaxscale.memory.one_block import remat
    from jaxscale.memory.plan import MemoryPlan
    from jaxscale.memory.rotor_table import rotor
    from jaxscale.memory.save_set import Host, policy_set
    from jaxscale.memory.selectors import SELECTORS
    from jaxscale.programs.block import BlockGraph, block_graph
    from jaxscale.programs.collect import collect

__all__ = [
    "SELECTORS",
    "BlockGraph",
    "Decision",
    "Host",
    "MemoryPlan",
    "Option",
    "SaveSet",
    "Stage",
    "StaleGraph",
    "block_graph",
    "collect",
    "greedy",
    "keep_all",
    "periodic",
    "policy_set",
    "read_decision",
    "remat",
    "revolve",
    "revolve_cost",
    "rotor",
    "simulate",
    "solve",
    "square_root",
    "times_run",
]  # fmt: skip

__getattr__ = lazy_names(__name__, _MODULE_BY_NAME)
