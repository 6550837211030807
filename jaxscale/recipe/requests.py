"""Requests: what a user can ask for, for the rules of `combinations.py`.

A request is a function of the facts of a training run. It returns the text with which the user asked for something,
such as "zero 3", or `None` if the user did not ask for it (the request is not made). A condition is a function of the
facts. It returns whether they allow something, or `None` if that is still unknown.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from jaxscale.model_traits import ModelTraits
from jaxscale.replicas.named import NamedCodec

if TYPE_CHECKING:
    from jaxscale.optim.one_bit import Messages
    from jaxscale.pipeline.plan import PipelinePlan
    from jaxscale.recipe.experiment import Experiment
    from jaxscale.recipe.plan import Plan


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts of a training run that are known when its combination of requests is checked.

    Args:
        plan: the plan; without a mesh, rules about a mesh axis are skipped.
        experiment: model, optimizer and steps; `None` when a plan is checked alone.
        state: names of the arrays that the model holds in addition to parameters.
        has_unlike_blocks: whether the stages of the pipeline have unlike blocks.
        has_copies: whether two devices of the pipeline have the weights of the same stage.
        mixing: the operation by which the optimizer's update mixes elements of a tensor; `None` if it mixes none, or
            only those within a layer, with a state of the parameters' shapes.
        has_reshaped_state: whether the optimizer mixes elements, and keeps arrays of other shapes than its parameters'.
    """

    plan: "Plan"
    experiment: "Experiment | None" = None
    state: tuple[str, ...] = ()
    has_unlike_blocks: bool = False
    has_copies: bool = False
    mixing: str | None = None
    has_reshaped_state: bool = False

    def size(self, axis: str) -> int | None:
        """Number of devices along a mesh axis; `None` while the mesh is unknown."""
        return None if self.plan.mesh is None else self.plan.mesh.sizes[axis]

    def fill(self, text: str) -> str:
        """The text of a rule, with its fields in braces replaced by facts."""
        plan, experiment = self.plan, self.experiment
        optimizer_name = "" if experiment is None else experiment.optimizer.name
        plain_optimizer = optimizer_name.removeprefix("one_bit_").replace("adam", "adamw")
        return text.format(
            plan=plan,
            experiment=experiment,
            plain=plain_optimizer,
            no_codec=f"take {plain_optimizer}" if self.codes_momenta else "leave reduce out",
            mixing=self.mixing,
        )

    @property
    def messages(self) -> "Messages | None":
        """Computation of what replicas of a one-bit optimizer send instead of gradients; `None` for others."""
        return None if self.experiment is None else self.experiment.optimizer.messages(self.experiment.steps)

    @property
    def codes_momenta(self) -> bool:
        """Whether the plan's codec is the one for the momenta of its one-bit optimizer."""
        return self.messages is not None and str(self.plan.reduce) == f"onebit,start={self.messages.freeze}"


Request: TypeAlias = Callable[[Facts], str | None]
"""Function from the facts to the text with which the user asked for something; `None` if the user did not."""
Condition: TypeAlias = Callable[[Facts], bool | None]
"""Function from the facts to whether they allow something; `None` if that is still unknown."""


MEMORY, PIPELINE = "memory {plan.memory}", "pipeline {plan.pipeline.form}"
"""Texts of requests, with fields of the plan in braces."""
FOREIGN = "a model of layers that are not ours"


def when(text: str, holds: Callable[[Facts], bool]) -> Request:
    """A request that is made if a condition on the facts holds.

    Args:
        text: text of the request, with fields of the plan and of the experiment in braces.
        holds: function that returns whether the condition holds.
    """
    return lambda facts: text.format(plan=facts.plan, experiment=facts.experiment) if holds(facts) else None


def of_pipeline(holds: "Callable[[PipelinePlan], bool]", text: str = PIPELINE) -> Request:
    """A request that is made if there is a pipeline and a condition on it holds."""
    return when(text, lambda facts: facts.plan.pipeline is not None and holds(facts.plan.pipeline))


def both(first: Request, second: Request) -> Request:
    """A request that is made if two requests are both made."""

    def request(facts: Facts) -> str | None:
        """The texts of both requests; `None` if one is not made."""
        first_text = first(facts)
        second_text = None if first_text is None else second(facts)
        return None if second_text is None else f"{first_text} with {second_text}"

    return request


def unless(request: Request, condition: Condition) -> Request:
    """A request that is made if `request` is made and a condition does not hold.

    While it is unknown whether the condition holds, the request counts as not made.
    """
    return lambda facts: request(facts) if condition(facts) is False else None


def field(path: str, *values: object) -> Request:
    """A request that is made if the field of the plan at a dotted path has one of some values."""

    def request(facts: Facts) -> str | None:
        setting = operator.attrgetter(path)(facts.plan)
        return f"{path} {setting}" if setting in values else None

    return request


def option(name: str) -> Request:
    """A request that is made if an option of the pipeline differs from its default."""

    def request(facts: Facts) -> str | None:
        """Name and setting of the option; `None` if it has its default."""
        pipeline = facts.plan.pipeline
        setting = None if pipeline is None else getattr(pipeline, name)
        return None if setting == getattr(type(pipeline), name, None) else f"{name} {setting}"

    return request


def along(axis: str) -> Request:
    """A request that is made if the mesh has several devices along an axis."""
    return when("mesh {plan.mesh}", lambda facts: (facts.size(axis) or 1) > 1)


def memory(*rules: str) -> Request:
    """A request that is made if the memory plan follows one of some rules."""
    return when(MEMORY, lambda facts: facts.plan.memory.rule in rules)


pipeline = of_pipeline(lambda pipeline: True)
"""Any pipeline."""
asynchronous = of_pipeline(lambda pipeline: pipeline.asynchronous)
"""A pipeline whose stages update their weights at different times."""
newest_weights = of_pipeline(lambda pipeline: not pipeline.asynchronous)
"""A pipeline whose gradients are of the newest weights."""
own_weights = of_pipeline(lambda pipeline: pipeline.name != "pipemare")
"""A pipeline whose backward passes read the same weights as their forward passes."""
phased = of_pipeline(lambda pipeline: pipeline.lowering == "phased", "lowering phased")
"""A pipeline lowered without branches, in which all devices go forward, or all go backward, in each tick."""
residuals = of_pipeline(lambda pipeline: pipeline.stash == "residuals", "stash residuals")
"""A pipeline whose stages keep residuals, as the memory plan specifies."""
correction = of_pipeline(lambda pipeline: bool(pipeline.correction), "correction {plan.pipeline.correction}")
"""PipeMare's correction of weights."""
unlike = when(f"{PIPELINE} of unlike blocks", lambda facts: facts.has_unlike_blocks)
"""A pipeline whose stages have unlike blocks."""
copied = when(PIPELINE, lambda facts: facts.has_copies)
"""A pipeline in which two devices have the same stage."""
one_bit = when("optimizer {experiment.optimizer.name}", lambda facts: facts.messages is not None)
"""An optimizer whose replicas send momenta."""
foreign = when(FOREIGN, lambda facts: facts.experiment is not None and ModelTraits.of(facts.experiment.model).foreign)
"""A model that was not built of this package's layers."""
foreign_over_tensor = when(
    f"{FOREIGN} and tensor:{{plan.mesh.tensor}}",
    lambda facts: foreign(facts) is not None and (facts.size("tensor") or 1) > 1,
)
"""Such a model on several devices along the tensor axis."""
diloco = when("diloco {plan.diloco}", lambda facts: facts.plan.diloco is not None)
"""Replicas that train alone, and synchronise every few steps."""
zero = when("zero {plan.zero}", lambda facts: facts.plan.zero > 0)
"""A ZeRO stage from 1 to 3."""
microbatches = when("microbatches {plan.microbatches}", lambda facts: facts.plan.microbatches > 1)
"""Several microbatches, without or with a pipeline."""
keeps_weights = when(MEMORY, lambda facts: facts.plan.memory.name == "everything_saveable")
"""A memory plan that keeps even the weights that a block reads."""
memory_of_sequences = when(MEMORY, lambda facts: facts.plan.memory.rule not in ("none", "dots", "full", "jax"))
"""A memory plan whose decision depends on the sequence of all blocks."""
host_updates_by_slices = when(
    "{plan.offload}",
    lambda facts: facts.plan.offload.any and facts.plan.offload.optimizer_state != "host",
)
"""Optimizer state or weights on the host that are updated on the device, slice by slice."""
weights_host, gradients_host = field("offload.weights", "host"), field("offload.gradients", "host")
"""Weights, and gradients, in host memory."""
state_host = field("offload.optimizer_state", "host")
"""Optimizer state that the host updates."""
state_off_device = field("offload.optimizer_state", "host", "streamed")
"""Optimizer state in host memory, updated by the host or by the device."""
split = field("state.master", "split")
"""Weights that are stored as bfloat16 and 8 bits of correction."""


def codec(facts: Facts) -> str | None:
    """A request for a codec, of gradients or of the momenta that an optimizer sends."""
    if facts.codes_momenta:
        return one_bit(facts)
    return f"reduce {facts.plan.reduce}" if isinstance(facts.plan.reduce, NamedCodec) else None


def codec_beside_one_bit(facts: Facts) -> str | None:
    """A request for a setting of `reduce` other than the codec for a one-bit optimizer's momenta."""
    return None if facts.codes_momenta or facts.plan.reduce is None else f"reduce {facts.plan.reduce}"


def other_microbatches(facts: Facts) -> str | None:
    """A request for a number of microbatches other than the pipeline's."""
    pipeline = facts.plan.pipeline
    pipeline_microbatches = None if pipeline is None or pipeline.name == "auto" else pipeline.shape()[1]
    return None if facts.plan.microbatches == pipeline_microbatches else microbatches(facts)


def model_state(facts: Facts) -> str | None:
    """A request for a model that holds other state in addition to its parameters."""
    return f"a model that holds state of its own ({', '.join(facts.state[:3])})" if facts.state else None


def meets_before_the_end(facts: Facts) -> bool | None:
    """Whether DiLoCo's replicas meet before the end of the run."""
    plan, experiment = facts.plan, facts.experiment
    return None if experiment is None or plan.diloco is None else plan.diloco.every <= experiment.steps


def has(axis: str) -> Condition:
    """Whether an axis of the mesh has several devices; `None` while the mesh is unknown."""

    def condition(facts: Facts) -> bool | None:
        """Whether the axis has several devices; `None` while the mesh is unknown."""
        device_count = facts.size(axis)
        return None if device_count is None else device_count > 1

    return condition


def fsdp(facts: Facts) -> bool | None:
    """Whether the fsdp axis has several devices; `None` for a single device, which `has_several_devices` handles."""
    return None if facts.plan.mesh is not None and facts.plan.mesh.devices == 1 else has("fsdp")(facts)


def has_several_devices(facts: Facts) -> bool | None:
    """Whether the mesh has several devices; `None` while the mesh is unknown."""
    return None if facts.plan.mesh is None else facts.plan.mesh.devices > 1
