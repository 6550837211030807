"""What a user can ask for, as the rules of `combinations.py` name it: each is read off the facts of a training.

A request is a function from the facts to the text that asks for it, as the user wrote it, or `None` where nothing does.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from jaxscale.replicas.named import NamedCodec

if TYPE_CHECKING:
    from jaxscale.optim.one_bit import Messages
    from jaxscale.pipeline.plan import PipelinePlan
    from jaxscale.recipe.experiment import Experiment
    from jaxscale.recipe.plan import Plan


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a training when its combination is checked.

    Args:
        plan: its plan; rows about an axis of the mesh wait until the plan has one.
        experiment: model, optimizer and steps; `None` while the plan is made.
        state: names of what the model holds beside parameters.
        unlike: its pipeline has stages of unlike blocks.
        copied: two devices of its pipeline have weights of the same stage.
        mixing: the operation by which the optimizer's update mixes elements; `None`: it mixes none, or those of a layer
            alone, with a state of the parameters' shapes.
        reshaped: the optimizer mixes elements, and keeps arrays of other shapes than its parameters'.
    """

    plan: "Plan"
    experiment: "Experiment | None" = None
    state: tuple[str, ...] = ()
    unlike: bool = False
    copied: bool = False
    mixing: str | None = None
    reshaped: bool = False

    def size(self, axis: str) -> int | None:
        """Devices along an axis; `None` while it is not known."""
        return None if self.plan.mesh is None else self.plan.mesh.sizes[axis]

    def fill(self, text: str) -> str:
        """A row's text, with what it mentions of the facts filled in."""
        plan, experiment = self.plan, self.experiment
        optimizer = "" if experiment is None else experiment.optimizer.name
        plain = optimizer.removeprefix("one_bit_").replace("adam", "adamw")
        return text.format(
            plan=plan,
            experiment=experiment,
            plain=plain,
            no_codec=f"take {plain}" if self.momenta_coded else "leave reduce out",
            mixing=self.mixing,
        )

    @property
    def messages(self) -> "Messages | None":
        """What the optimizer's replicas send in place of gradients."""
        return None if self.experiment is None else self.experiment.optimizer.messages(self.experiment.steps)

    @property
    def momenta_coded(self) -> bool:
        """Whether the codec is the one that takes a one-bit optimizer's momenta."""
        return self.messages is not None and str(self.plan.reduce) == f"onebit,start={self.messages.freeze}"


Request: TypeAlias = Callable[[Facts], str | None]
"""What the user wrote of a technique; `None` where it is not asked for."""
Condition: TypeAlias = Callable[[Facts], bool | None]
"""Whether the facts allow something; `None` while that is not known."""


MEMORY, PIPELINE = "memory {plan.memory}", "pipeline {plan.pipeline.form}"
FOREIGN = "a model of layers that are not ours"


def when(text: str, holds: Callable[[Facts], bool]) -> Request:
    """What a condition of the facts asks for.

    Args:
        text: of the request, with fields of the plan and of the experiment in braces.
        holds: the condition.
    """
    return lambda facts: text.format(plan=facts.plan, experiment=facts.experiment) if holds(facts) else None


def of_pipeline(holds: "Callable[[PipelinePlan], bool]", text: str = PIPELINE) -> Request:
    """What a condition of the pipeline asks for, if there is one."""
    return when(text, lambda facts: facts.plan.pipeline is not None and holds(facts.plan.pipeline))


def both(one: Request, other: Request) -> Request:
    """Two requests together."""

    def request(facts: Facts) -> str | None:
        text = one(facts)
        other_text = None if text is None else other(facts)
        return None if other_text is None else f"{text} with {other_text}"

    return request


def unless(one: Request, met: Condition) -> Request:
    """A request whose condition does not hold."""
    return lambda facts: one(facts) if met(facts) is False else None


def field(path: str, *values: object) -> Request:
    """A field of the plan, by its dotted path, that has one of some values."""

    def request(facts: Facts) -> str | None:
        setting = operator.attrgetter(path)(facts.plan)
        return f"{path} {setting}" if setting in values else None

    return request


def option(name: str) -> Request:
    """An option of the pipeline that has another value than its default."""

    def request(facts: Facts) -> str | None:
        pipeline = facts.plan.pipeline
        setting = None if pipeline is None else getattr(pipeline, name)
        return None if setting == getattr(type(pipeline), name, None) else f"{name} {setting}"

    return request


def along(axis: str) -> Request:
    """Several devices along an axis of the mesh."""
    return when("mesh {plan.mesh}", lambda facts: (facts.size(axis) or 1) > 1)


def memory(*rules: str) -> Request:
    """A memory plan by one of some rules."""
    return when(MEMORY, lambda facts: facts.plan.memory.rule in rules)


pipeline = of_pipeline(lambda pipeline: True)
asynchronous = of_pipeline(lambda pipeline: pipeline.asynchronous)
"""A pipeline that updates weights on its way."""
newest_weights = of_pipeline(lambda pipeline: not pipeline.asynchronous)
"""A pipeline whose gradients are of the newest weights."""
own_weights = of_pipeline(lambda pipeline: pipeline.name != "pipemare")
"""A pipeline whose backwards read the weights of their forwards."""
phased = of_pipeline(lambda pipeline: pipeline.lowering == "phased", "lowering phased")
"""A pipeline without branches."""
residuals = of_pipeline(lambda pipeline: pipeline.stash == "residuals", "stash residuals")
"""A pipeline that keeps residuals by the memory plan."""
correction = of_pipeline(lambda pipeline: bool(pipeline.correction), "correction {plan.pipeline.correction}")
"""PipeMare's correction of weights."""
unlike = when(f"{PIPELINE} of unlike blocks", lambda facts: facts.unlike)
copied = when(PIPELINE, lambda facts: facts.copied)
"""A pipeline in which two devices have the same stage."""
one_bit = when("optimizer {experiment.optimizer.name}", lambda facts: facts.messages is not None)
"""An optimizer whose replicas send momenta."""
foreign = when(FOREIGN, lambda facts: getattr(getattr(facts.experiment, "model", None), "foreign", False))
foreign_over_tensor = when(
    f"{FOREIGN} and tensor:{{plan.mesh.tensor}}",
    lambda facts: foreign(facts) is not None and (facts.size("tensor") or 1) > 1,
)
diloco = when("diloco {plan.diloco}", lambda facts: facts.plan.diloco is not None)
"""Replicas that train alone and meet."""
zero = when("zero {plan.zero}", lambda facts: facts.plan.zero > 0)
microbatches = when("microbatches {plan.microbatches}", lambda facts: facts.plan.microbatches > 1)
keeps_weights = when(MEMORY, lambda facts: facts.plan.memory.name == "everything_saveable")
memory_of_sequences = when(MEMORY, lambda facts: facts.plan.memory.rule not in ("none", "dots", "full", "jax"))
"""A memory plan that looks at all blocks in sequence."""
host_updates_by_slices = when(
    "{plan.offload}",
    lambda facts: facts.plan.offload.any and facts.plan.offload.optimizer_state != "host",
)
"""State or weights on the host whose updates are made on the device, slice by slice."""
weights_host, gradients_host = field("offload.weights", "host"), field("offload.gradients", "host")
state_host = field("offload.optimizer_state", "host")
state_off = field("offload.optimizer_state", "host", "streamed")
split = field("state.master", "split")


def codec(facts: Facts) -> str | None:
    """A codec of gradients, or of the momenta that an optimizer sends."""
    if facts.momenta_coded:
        return one_bit(facts)
    return f"reduce {facts.plan.reduce}" if isinstance(facts.plan.reduce, NamedCodec) else None


def codec_beside_one_bit(facts: Facts) -> str | None:
    """A codec other than the one that takes a one-bit optimizer's momenta."""
    return None if facts.momenta_coded or facts.plan.reduce is None else f"reduce {facts.plan.reduce}"


def other_microbatches(facts: Facts) -> str | None:
    """Other microbatches than the pipeline's own."""
    pipeline = facts.plan.pipeline
    count = None if pipeline is None or pipeline.name == "auto" else pipeline.shape()[1]
    return None if facts.plan.microbatches == count else microbatches(facts)


def model_state(facts: Facts) -> str | None:
    """A model that holds more than parameters."""
    return f"a model that holds state of its own ({', '.join(facts.state[:3])})" if facts.state else None


def meets_before_the_end(facts: Facts) -> bool | None:
    """Whether DiLoCo's replicas meet before the end of the run."""
    plan, experiment = facts.plan, facts.experiment
    return None if experiment is None or plan.diloco is None else plan.diloco.every <= experiment.steps


def has(axis: str) -> Condition:
    """Whether an axis of the mesh has several devices; `None` while the mesh is not known."""

    def met(facts: Facts) -> bool | None:
        size = facts.size(axis)
        return None if size is None else size > 1

    return met


def fsdp(facts: Facts) -> bool | None:
    """Whether there is an fsdp axis; one device alone has another way round."""
    return None if facts.plan.mesh is not None and facts.plan.mesh.devices == 1 else has("fsdp")(facts)


def not_alone(facts: Facts) -> bool | None:
    """Whether there are several devices; `None` while the mesh is not known."""
    return None if facts.plan.mesh is None else facts.plan.mesh.devices > 1
