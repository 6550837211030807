"""What a user can ask for, as the rules of `combinations.py` name it: each is read off the facts of a training.

A request is a function from the facts to the text that asks for it, as the user wrote it, or `None` where nothing does.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from jaxscale.memory.plan import MemoryPlan
from jaxscale.replicas.named import NamedCodec

if TYPE_CHECKING:
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
            mesh=plan.mesh,
            precision=plan.precision,
            steps="" if experiment is None else experiment.steps,
            plain=plain,
            no_codec=f"take {plain}" if self.momenta_coded else "leave reduce out",
            mixing=self.mixing,
        )

    @property
    def momenta_coded(self) -> bool:
        """Whether the codec is the one that takes a one-bit optimizer's momenta."""
        experiment = self.experiment
        messages = None if experiment is None else experiment.optimizer.messages(experiment.steps)
        return messages is not None and str(self.plan.reduce) == f"onebit,start={messages.freeze}"


Request: TypeAlias = Callable[[Facts], str | None]
"""What the user wrote of a technique; `None` where it is not asked for."""


def field(path: str, *values: object) -> Request:
    """A field of the plan, by its dotted path, that has one of some values."""

    def request(facts: Facts) -> str | None:
        value = operator.attrgetter(path)(facts.plan)
        return f"{path} {value}" if value in values else None

    return request


def changed(name: str) -> Request:
    """A field of the plan that has another value than its default."""

    def request(facts: Facts) -> str | None:
        return _unless_default(name, facts.plan)

    return request


def option(name: str) -> Request:
    """An option of the pipeline that has another value than its default."""

    def request(facts: Facts) -> str | None:
        return None if facts.plan.pipeline is None else _unless_default(name, facts.plan.pipeline)

    return request


def _unless_default(name: str, value: object) -> str | None:
    inner = getattr(value, name)
    return None if inner == getattr(type(value), name) else f"{name} {inner}"


def along(axis: str) -> Request:
    """Several devices along an axis of the mesh."""

    def request(facts: Facts) -> str | None:
        return f"mesh {facts.plan.mesh}" if (facts.size(axis) or 1) > 1 else None

    return request


def pipeline(facts: Facts) -> str | None:
    """A pipeline."""
    return None if facts.plan.pipeline is None else f"pipeline {facts.plan.pipeline.form}"


def asynchronous(facts: Facts) -> str | None:
    """A pipeline that updates weights on its way."""
    return pipeline(facts) if facts.plan.asynchronous else None


def unlike(facts: Facts) -> str | None:
    """A pipeline with stages of unlike blocks."""
    return f"{pipeline(facts)} of unlike blocks" if facts.unlike else None


def copied(facts: Facts) -> str | None:
    """A pipeline in which two devices have the same stage."""
    return pipeline(facts) if facts.copied else None


def newest_weights(facts: Facts) -> str | None:
    """A pipeline whose gradients are of the newest weights."""
    pipeline = facts.plan.pipeline
    return f"pipeline {pipeline.form}" if pipeline is not None and not facts.plan.asynchronous else None


def own_weights(facts: Facts) -> str | None:
    """A pipeline whose backwards read the weights of their forwards."""
    pipeline = facts.plan.pipeline
    return f"pipeline {pipeline.form}" if pipeline is not None and pipeline.name != "pipemare" else None


def codec(facts: Facts) -> str | None:
    """A codec of gradients, or of the momenta that an optimizer sends."""
    if facts.momenta_coded:
        return one_bit(facts)
    return f"reduce {facts.plan.reduce}" if isinstance(facts.plan.reduce, NamedCodec) else None


def codec_beside_one_bit(facts: Facts) -> str | None:
    """A codec other than the one that takes a one-bit optimizer's momenta."""
    return None if facts.momenta_coded else changed("reduce")(facts)


def diloco(facts: Facts) -> str | None:
    """Replicas that train alone and meet."""
    return None if facts.plan.diloco is None else f"diloco {facts.plan.diloco}"


def one_bit(facts: Facts) -> str | None:
    """An optimizer whose replicas send momenta."""
    experiment = facts.experiment
    sends = experiment is not None and experiment.optimizer.messages(experiment.steps) is not None
    return f"optimizer {experiment.optimizer.name}" if experiment is not None and sends else None


def zero(facts: Facts) -> str | None:
    """A stage of ZeRO."""
    return f"zero {facts.plan.zero}" if facts.plan.zero else None


def microbatches(facts: Facts) -> str | None:
    """Several microbatches."""
    return f"microbatches {facts.plan.microbatches}" if facts.plan.microbatches > 1 else None


def other_microbatches(facts: Facts) -> str | None:
    """Other microbatches than the pipeline's own."""
    pipeline = facts.plan.pipeline
    count = None if pipeline is None or pipeline.name == "auto" else pipeline.shape()[1]
    return None if facts.plan.microbatches == count else microbatches(facts)


def memory(*rules: str) -> Request:
    """A memory plan by one of some rules."""

    def request(facts: Facts) -> str | None:
        return f"memory {facts.plan.memory}" if facts.plan.memory.rule in rules else None

    return request


def memory_of_sequences(facts: Facts) -> str | None:
    """A memory plan that looks at all blocks in sequence."""
    memory: MemoryPlan = facts.plan.memory
    return None if memory.rule in ("none", "dots", "full", "jax") else f"memory {memory}"


def keeps_weights(facts: Facts) -> str | None:
    """A memory plan that keeps every weight."""
    return f"memory {facts.plan.memory}" if facts.plan.memory.name == "everything_saveable" else None


def host_updates_by_slices(facts: Facts) -> str | None:
    """State or weights on the host whose updates are made on the device, slice by slice."""
    offload = facts.plan.offload
    if offload.optimizer_state == "host" or (offload.weights == "device" and offload.optimizer_state == "device"):
        return None
    return str(offload)


def phased(facts: Facts) -> str | None:
    """A pipeline without branches."""
    return "lowering phased" if facts.plan.pipeline is not None and facts.plan.pipeline.lowering == "phased" else None


def correction(facts: Facts) -> str | None:
    """PipeMare's correction of weights."""
    return option("correction")(facts) if facts.plan.pipeline is not None and facts.plan.pipeline.correction else None


def residuals(facts: Facts) -> str | None:
    """A pipeline that keeps residuals by the memory plan."""
    return None if facts.plan.pipeline is None or facts.plan.stages_keep == "input" else "stash residuals"


def model_state(facts: Facts) -> str | None:
    """A model that holds more than parameters."""
    return f"a model that holds state of its own ({', '.join(facts.state[:3])})" if facts.state else None


def foreign(facts: Facts) -> str | None:
    """A model of layers that are not ours."""
    model = None if facts.experiment is None else facts.experiment.model
    return "a model of layers that are not ours" if getattr(model, "foreign", False) else None


def foreign_over_tensor(facts: Facts) -> str | None:
    """Such a model on a tensor axis."""
    return f"{foreign(facts)} and tensor:{facts.size('tensor')}" if foreign(facts) and along("tensor")(facts) else None


def meets_before_the_end(facts: Facts) -> bool | None:
    """Whether DiLoCo's replicas meet before the end of the run."""
    plan, experiment = facts.plan, facts.experiment
    return None if experiment is None or plan.diloco is None else plan.diloco.every <= experiment.steps


def has(axis: str) -> Callable[[Facts], bool | None]:
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


weights_host, gradients_host = field("offload.weights", "host"), field("offload.gradients", "host")
state_host = field("offload.optimizer_state", "host")
state_off = field("offload.optimizer_state", "host", "streamed")
split = field("state.master", "split")
