"""A memory plan specifies how to choose the values kept for the backward pass ("the optimal save set of 136 MiB").

A plan has a short text form, such as `save:136MiB`. `memory/decide.py` resolves the plan for the blocks of one model to
a `Decision` (`memory/decision.py`).
"""

import dataclasses
from typing import Literal, cast, get_args

from jaxscale.errors import UserError, unknown
from jaxscale.values import check_types
from jaxscale.values.byte_sizes import bytes_text, parse_bytes
from jaxscale.values.read_files import whole_number

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
    "everything_saveable", "nothing_saveable", "dots_saveable", "checkpoint_dots", "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)  # fmt: skip
"""The policies in `jax.checkpoint_policies` that need no argument."""

_RULES_WITH_BUDGET = ("chain", "save", "greedy", "dtr_static", "offload")
"""Rules with a budget."""
_RULES_WITH_COUNT = ("periodic", "revolve")
"""Rules with a count."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """How to choose the values kept for the backward pass.

    | text form | keeps |
    |---|---|
    | `none` | every residual |
    | `dots` | results of matrix products; the values between them are recomputed |
    | `full` | each block's input |
    | `jax:POLICY` | the values selected by a policy of `jax.checkpoint_policies`, by name |
    | `sqrt`, `periodic:K` | the input of every K-th block; for `sqrt`, K is about the square root of the block count |
    | `revolve:SLOTS` | at most SLOTS block inputs: Griewank and Walther's optimum for identical blocks |
    | `chain:BYTES` | Rotor's optimum for different blocks: segments that run again, and a save set per block |
    | `save:BYTES[:flop\\|seconds]` | the save set of least cost for each block, by integer program |
    | `greedy:BYTES`, `dtr_static:BYTES` | a save set for each block, by a heuristic |
    | `offload:SELECTOR:BYTES` | BYTES on the device; the selector chooses values for host memory |
    | `fit` | the values of the cheapest of these plans that fits the device |
    | `file:PATH` | a decision recorded earlier (memory.json of a run) |

    Args:
        rule: name of the rule, the first word of the text form.
        budget: maximum bytes of activations that the whole model keeps on a device, per microbatch: inputs of blocks,
            and kept values inside blocks. The working memory of the running block is not included.
        count: K of `periodic`, or SLOTS of `revolve`.
        selector: SELECTOR of `offload`.
        objective: the cost that `save` minimizes: recomputed FLOP, or modeled seconds. `None` chooses seconds on a
            chip with known rates, and FLOP otherwise.
        name: POLICY of `jax`, or PATH of `file`.

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
        if isinstance(self.rule, str) and self.rule not in get_args(MemoryRule):
            raise unknown("memory plan", self.rule, get_args(MemoryRule))
        check_types(self)
        is_needed_by_field = {
            "budget": self.rule in _RULES_WITH_BUDGET,
            "count": self.rule in _RULES_WITH_COUNT,
            "selector": self.rule == "offload",
            "name": self.rule in ("jax", "file"),
        }
        for field_name, is_needed in is_needed_by_field.items():
            if (getattr(self, field_name) is not None) != is_needed:
                verb = "needs" if is_needed else "does not take"
                raise UserError(f"memory plan {self.rule} {verb} a {field_name}: write {FORMS[self.rule]}")
        if self.objective is not None and self.rule != "save":
            raise UserError(f"memory plan {self.rule} does not take an objective: write {FORMS[self.rule]}")
        if self.budget is not None and self.budget < 0:
            raise UserError(f"memory plan {self.rule}: got a budget of {self.budget} bytes, expected 0 or more")
        if self.count is not None and self.count < 1:
            raise UserError(f"memory plan {self.rule}: got a count of {self.count}, expected a whole number >= 1")
        if self.rule == "jax" and self.name not in POLICIES:
            raise unknown("JAX policy", str(self.name), POLICIES)

    @classmethod
    def parse(cls, text: str) -> "MemoryPlan":
        """Return the plan that a text form describes.

        Raises:
            UserError: a rule, selector, policy or unit is unknown (the message suggests the most similar one), or there
                are too few or too many arguments.
        """
        rule_name, *arguments = text.strip().split(":")
        if rule_name not in FORMS:
            raise unknown("memory plan", rule_name, get_args(MemoryRule))
        rule = cast(MemoryRule, rule_name)
        if rule == "file":
            return cls(rule, name=":".join(arguments) or None)
        argument_names = FORMS[rule].replace("[", "").replace("]", "").split(":")[1:]
        optional_argument_count = FORMS[rule].count("[")
        if not len(argument_names) - optional_argument_count <= len(arguments) <= len(argument_names):
            raise UserError(f"memory plan {text!r}: expected {FORMS[rule]}")
        argument_by_name = dict(zip(argument_names, arguments, strict=False))
        error_prefix = f"memory plan {rule}:"
        count_text = argument_by_name.get("K") or argument_by_name.get("SLOTS")
        if count_text is not None and whole_number(count_text) is None:
            raise UserError(f"memory plan {text!r}: got {count_text!r}, expected a whole number: {FORMS[rule]}")
        selector, objective = argument_by_name.get("SELECTOR"), argument_by_name.get("flop|seconds")
        if selector is not None and selector not in get_args(Selector):
            raise unknown("selector", selector, get_args(Selector))
        if objective is not None and objective not in get_args(SaveSetObjective):
            raise unknown("objective", objective, get_args(SaveSetObjective))
        return cls(
            rule,
            budget=parse_bytes(argument_by_name["BYTES"], error_prefix) if "BYTES" in argument_by_name else None,
            count=int(count_text) if count_text is not None else None,
            selector=cast(Selector | None, selector),
            objective=cast(SaveSetObjective | None, objective),
            name=argument_by_name.get("POLICY"),
        )

    @property
    def policy(self) -> str | None:
        """The name of the JAX policy that the plan applies to every block; `None` if the rule uses no JAX policy."""
        return {"dots": "dots_saveable", "full": "nothing_saveable", "jax": self.name}.get(self.rule)

    def __str__(self) -> str:
        argument_texts = [self.selector, None if self.budget is None else bytes_text(self.budget)]
        argument_texts += [None if self.count is None else str(self.count), self.objective, self.name]
        return ":".join([self.rule, *(text for text in argument_texts if text is not None)])
