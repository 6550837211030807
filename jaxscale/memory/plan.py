"""MemoryPlan: how to choose the values kept for the backward pass, as a request with a short text form.

A request specifies how to choose ("the optimal save set of 136 MiB"); its resolution for one model, block by block, is
a `Decision` (`memory/decision.py`).
"""

import dataclasses
from typing import Literal, cast, get_args

from jaxscale.errors import UserError, unknown
from jaxscale.values import check_types
from jaxscale.values.byte_sizes import bytes_text, parse_bytes

MemoryRule = Literal[
    "none", "dots", "full", "jax", "sqrt", "periodic", "revolve", "chain", "save", "greedy", "dtr_static", "offload",
    "fit", "file",
]  # fmt: skip
Selector = Literal["pofo", "vdnn", "tflms", "autoswap", "swapadvisor", "capuchin"]
SaveSetObjective = Literal["flop", "seconds"]

FORMS = {
    "none": "none",
    "dots": "dots",
    "full": "full",
    "jax": "jax:POLICY",
    "sqrt": "sqrt",
    "periodic": "periodic:K",
    "revolve": "revolve:SLOTS",
    "chain": "chain:BYTES",
    "save": "save:BYTES[:flop|seconds]",
    "greedy": "greedy:BYTES",
    "dtr_static": "dtr_static:BYTES",
    "offload": "offload:SELECTOR:BYTES",
    "fit": "fit",
    "file": "file:PATH",
}
"""The text form of each rule."""

POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)
"""JAX's own policies that need no argument (`jax.checkpoint_policies`)."""

_BUDGETED = ("chain", "save", "greedy", "dtr_static", "offload")
_COUNTED = ("periodic", "revolve")


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """How to choose the values kept for the backward pass, by its text form.

    | text form | keeps |
    |---|---|
    | `none` | every residual |
    | `dots` | results of matrix products; the values between them are recomputed |
    | `full` | each block's input |
    | `jax:POLICY` | the values selected by a policy of `jax.checkpoint_policies`, by name |
    | `sqrt`, `periodic:K` | the input of every K-th block (K = sqrt of their number) |
    | `revolve:SLOTS` | at most SLOTS block inputs: Griewank and Walther's optimum for alike blocks |
    | `chain:BYTES` | Rotor's optimum for a chain of unlike blocks: segments that run again, and a save set per block |
    | `save:BYTES[:flop\\|seconds]` | the save set of least cost for each block, by integer program |
    | `greedy:BYTES`, `dtr_static:BYTES` | heuristics for the same |
    | `offload:SELECTOR:BYTES` | BYTES on the device; the selector chooses values for host memory |
    | `fit` | the cheapest of these that fits the device |
    | `file:PATH` | a decision recorded earlier (memory.json of a run) |

    Args:
        rule: how to choose.
        budget: bytes of kept activations on the device, per device and microbatch, of the whole model: inputs of
            blocks, and their kept values. The working memory of the running block is not included.
        count: K of periodic, SLOTS of revolve.
        selector: rule of offload.
        objective: the cost that `save` minimizes: recomputed FLOP, or modelled seconds; `None`: seconds on a chip with
            known rates, else FLOP.
        name: POLICY of jax, PATH of file.

    Example:
        >>> plan = MemoryPlan.parse("save:136MiB")
        >>> str(plan), plan.rule, plan.budget
        ('save:136MiB', 'save', 142606336)
    """

    rule: MemoryRule = "none"
    budget: int | None = None
    count: int | None = None
    selector: Selector | None = None
    objective: SaveSetObjective | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.rule not in get_args(MemoryRule):
            raise unknown("memory plan", str(self.rule), get_args(MemoryRule))
        check_types(self)
        requirements = {
            "budget": self.rule in _BUDGETED,
            "count": self.rule in _COUNTED,
            "selector": self.rule == "offload",
            "name": self.rule in ("jax", "file"),
        }
        for field, needed in requirements.items():
            if (getattr(self, field) is not None) != needed:
                verb = "needs" if needed else "takes no"
                raise UserError(f"memory plan {self.rule} {verb} {field}: write {FORMS[self.rule]}")
        if self.objective is not None and self.rule != "save":
            raise UserError(f"memory plan {self.rule} takes no objective: write {FORMS[self.rule]}")
        if self.budget is not None and self.budget < 0:
            raise UserError(f"memory plan {self.rule}: got a budget of {self.budget} bytes, expected 0 or more")
        if self.count is not None and self.count < 1:
            raise UserError(f"memory plan {self.rule}: got {self.count}, expected a whole number >= 1")
        if self.rule == "jax" and self.name not in POLICIES:
            raise unknown("JAX policy", str(self.name), POLICIES)

    @classmethod
    def parse(cls, text: str) -> "MemoryPlan":
        """The plan of its text form.

        Raises:
            UserError: an unknown rule, selector, policy or unit, with the near miss; an argument missing or too many.
        """
        head, *words = text.strip().split(":")
        if head not in FORMS:
            raise unknown("memory plan", head, get_args(MemoryRule))
        rule = cast(MemoryRule, head)
        if rule == "file":
            return cls(rule, name=":".join(words) or None)
        fields = FORMS[rule].replace("[", "").replace("]", "").split(":")[1:]
        optional = FORMS[rule].count("[")
        if not len(fields) - optional <= len(words) <= len(fields):
            raise UserError(f"memory plan {text!r}: expected {FORMS[rule]}")
        arguments = dict(zip(fields, words, strict=False))
        subject = f"memory plan {rule}:"
        count = arguments.get("K") or arguments.get("SLOTS")
        if count is not None and not count.isdecimal():
            raise UserError(f"memory plan {text!r}: got {count!r}, expected a whole number: {FORMS[rule]}")
        selector, objective = arguments.get("SELECTOR"), arguments.get("flop|seconds")
        if selector is not None and selector not in get_args(Selector):
            raise unknown("selector", selector, get_args(Selector))
        if objective is not None and objective not in get_args(SaveSetObjective):
            raise unknown("objective", objective, get_args(SaveSetObjective))
        return cls(
            rule,
            budget=parse_bytes(arguments["BYTES"], subject) if "BYTES" in arguments else None,
            count=int(count) if count is not None else None,
            selector=cast(Selector | None, selector),
            objective=cast(SaveSetObjective | None, objective),
            name=arguments.get("POLICY"),
        )

    @property
    def policy(self) -> str | None:
        """Name of JAX's policy that the plan applies to every block; `None` for other rules."""
        return {"dots": "dots_saveable", "full": "nothing_saveable", "jax": self.name}.get(self.rule)

    def __str__(self) -> str:
        parts = [self.rule, self.selector]
        parts += [None if self.budget is None else bytes_text(self.budget)]
        parts += [None if self.count is None else str(self.count), self.objective, self.name]
        return ":".join(part for part in parts if part is not None)
