"""Requests: the settings and properties of a training run that the rules of `combinations.py` refer to.

A request is a function of the facts of a training run. If the run has the setting, the function returns the setting's
text, such as "zero 3"; otherwise it returns `None`. A condition is also a function of the facts. It returns whether the
facts meet the condition, or `None` if that is still unknown.
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


_OR_STACK = ", or stack the parameters of the blocks by nnx.vmap and run them by nnx.scan"
"""Advice for messages: how to avoid the limits of blocks that are separate submodules."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts of a training run that are known when its combination of settings is checked.

    Args:
        plan: the plan; if it has no mesh, rules about a mesh axis are skipped.
        experiment: the experiment; `None` if a plan is checked alone.
        state: names of the arrays that the model has in addition to parameters.
        has_blocks: whether the model has a `Stack` or a `Chain`, or a scan over blocks; `None` while that is unknown.
        has_unlike_blocks: whether the blocks of the pipeline's stages differ, or are alike but not stacked.
        separate_blocks: paths of the blocks that are not stacked, in a model that is not built of jaxscale's layers.
        has_copies: whether two devices of the pipeline have the weights of the same stage.
        mixing: name of the operation by which the optimizer's update mixes elements of a tensor. It is `None` if the
            update is elementwise, or mixes only elements of one layer and has a state of the parameters' shapes.
        has_reshaped_state: whether the optimizer mixes elements, and keeps arrays whose shapes no parameter has.
    """

    plan: "Plan"
    experiment: "Experiment | None" = None
    state: tuple[str, ...] = ()
    has_blocks: bool | None = None
    has_unlike_blocks: bool = False
    separate_blocks: tuple[str, ...] = ()
    has_copies: bool = False
    mixing: str | None = None
    has_reshaped_state: bool = False

    def size(self, axis: str) -> int | None:
        """Return the number of devices along a mesh axis; `None` while the mesh is unknown."""
        return None if self.plan.mesh is None else self.plan.mesh.sizes[axis]

    def fill(self, text: str) -> str:
        """Return the text of a rule, with the facts inserted for its fields in braces."""
        plan, experiment = self.plan, self.experiment
        optimizer_name = "" if experiment is None else experiment.optimizer.name
        plain_optimizer = optimizer_name.removeprefix("one_bit_").replace("adam", "adamw")
        return text.format(
            plan=plan,
            experiment=experiment,
            plain=plain_optimizer,
            no_codec=f"take {plain_optimizer}" if self.codes_momenta else "leave reduce out",
            mixing=self.mixing,
            or_stack=_OR_STACK if self.separate_blocks else "",
        )

    @property
    def messages(self) -> "Messages | None":
        """The function that computes the momenta that replicas send; `None` if the optimizer is not a one-bit one."""
        return None if self.experiment is None else self.experiment.optimizer.messages(self.experiment.steps)

    @property
    def codes_momenta(self) -> bool:
        """Whether the plan's codec is the codec of momenta that the experiment's one-bit optimizer requires."""
        return self.messages is not None and str(self.plan.reduce) == f"onebit,start={self.messages.freeze}"


Request: TypeAlias = Callable[[Facts], str | None]
"""A function of the facts that returns the text of a request; `None` if the run does not make the request."""
Condition: TypeAlias = Callable[[Facts], bool | None]
"""A function of the facts that returns whether they meet a condition; `None` if that is still unknown."""


MEMORY, PIPELINE = "memory {plan.memory}", "pipeline {plan.pipeline.form}"
"""Templates for texts of requests, with fields of the plan in braces."""
FOREIGN = "a model of layers that are not jaxscale's"


def request_when(text: str, is_made: Callable[[Facts], bool]) -> Request:
    """Return a request that is made if a condition on the facts holds.

    Args:
        text: template for the text of the request, with fields of the plan and of the experiment in braces.
        is_made: function that returns whether the condition holds.
    """
    return lambda facts: text.format(plan=facts.plan, experiment=facts.experiment) if is_made(facts) else None


def pipeline_request(is_made: "Callable[[PipelinePlan], bool]", text: str = PIPELINE) -> Request:
    """Return a request that is made if the plan has a pipeline and a condition on the pipeline holds."""
    return request_when(text, lambda facts: facts.plan.pipeline is not None and is_made(facts.plan.pipeline))


def combination(first_request: Request, second_request: Request) -> Request:
    """Return a request that is made if two requests are both made."""

    def request(facts: Facts) -> str | None:
        """Return 'FIRST with SECOND', from the texts of two requests; `None` unless the run makes both requests."""
        first_text = first_request(facts)
        second_text = None if first_text is None else second_request(facts)
        return None if second_text is None else f"{first_text} with {second_text}"

    return request


def request_unless(request: Request, condition: Condition) -> Request:
    """Return a request that is made if `request` is made and a condition does not hold.

    As long as it is unknown whether the condition holds, the request counts as not made.
    """
    return lambda facts: request(facts) if condition(facts) is False else None


def plan_field(path: str, *values: object) -> Request:
    """Return a request that is made if the field of the plan at a dotted path has one of `values`."""

    def request(facts: Facts) -> str | None:
        """Return the path and value of the field as text; `None` if the value is not one of `values`."""
        setting = operator.attrgetter(path)(facts.plan)
        return f"{path} {setting}" if setting in values else None

    return request


def pipeline_option(name: str) -> Request:
    """Return a request that is made if an option of the pipeline differs from its default."""

    def request(facts: Facts) -> str | None:
        """Return the name and value of the option as text; `None` if the option has its default."""
        pipeline = facts.plan.pipeline
        setting = None if pipeline is None else getattr(pipeline, name)
        return None if setting == getattr(type(pipeline), name, None) else f"{name} {setting}"

    return request


def several_along(axis: str) -> Request:
    """Return a request that is made if the mesh has several devices along an axis."""
    return request_when("mesh {plan.mesh}", lambda facts: (facts.size(axis) or 1) > 1)


def memory_rule(*rules: str) -> Request:
    """Return a request that is made if the rule of the memory plan is one of `rules`."""
    return request_when(MEMORY, lambda facts: facts.plan.memory.rule in rules)


pipeline = pipeline_request(lambda pipeline: True)
"""A pipeline of any kind."""
asynchronous = pipeline_request(lambda pipeline: pipeline.asynchronous)
"""A pipeline whose stages update their weights at different times."""
newest_weights = pipeline_request(lambda pipeline: not pipeline.asynchronous)
"""A pipeline that computes gradients with respect to the newest weights."""
own_weights = pipeline_request(lambda pipeline: pipeline.name != "pipemare")
"""A pipeline whose backward passes read the same weights as their forward passes."""
phased_lowering = pipeline_request(lambda pipeline: pipeline.lowering == "phased", "lowering phased")
"""A pipeline that is lowered without branches. In each tick, all devices run forward passes, or all backward passes."""
kept_residuals = pipeline_request(lambda pipeline: pipeline.stash == "residuals", "stash residuals")
"""A pipeline whose stages keep the residuals that the memory plan specifies."""
weight_correction = pipeline_request(
    lambda pipeline: bool(pipeline.correction), "correction {plan.pipeline.correction}"
)
"""A pipeline with PipeMare's correction of weights."""
copied_stages = request_when(PIPELINE, lambda facts: facts.has_copies)
"""A pipeline in which two devices have the weights of the same stage."""
one_bit = request_when("optimizer {experiment.optimizer.name}", lambda facts: facts.messages is not None)
"""An optimizer whose replicas send momenta."""
foreign_model = request_when(
    FOREIGN, lambda facts: facts.experiment is not None and ModelTraits.of(facts.experiment.model).foreign
)
"""A model that is not built of jaxscale's layers."""
unrolled_foreign_model = request_when(
    "unroll {plan.unroll}", lambda facts: facts.plan.unroll > 1 and foreign_model(facts) is not None
)
"""Several layers in one iteration of the scan over the blocks of a model that is not built of jaxscale's layers."""
foreign_model_over_tensor = request_when(
    f"{FOREIGN} and tensor:{{plan.mesh.tensor}}",
    lambda facts: foreign_model(facts) is not None and (facts.size("tensor") or 1) > 1,
)
"""A model that is not built of jaxscale's layers, on several devices along the tensor axis."""
average = request_when(
    "optimizer.ema {experiment.optimizer.ema}",
    lambda facts: facts.experiment is not None and facts.experiment.optimizer.ema is not None,
)
"""An exponential moving average of the weights."""
frozen_parameters = request_when(
    "train {experiment.train}", lambda facts: facts.experiment is not None and facts.experiment.train is not None
)
"""Parameters that are not trained."""
few_bit_base = request_when(
    "a base in {experiment.model.few_bits}",
    lambda facts: facts.experiment is not None and getattr(facts.experiment.model, "few_bits", None) is not None,
)
"""A model whose frozen weights are quantized."""
loss_over_batch = request_when(
    "a loss over the whole batch",
    lambda facts: facts.experiment is not None and ModelTraits.of(facts.experiment.model).over == "batch",
)
"""A model whose loss is declared to couple the rows of a batch."""
diloco = request_when("diloco {plan.diloco}", lambda facts: facts.plan.diloco is not None)
"""Replicas that train independently, and synchronize every few steps (DiLoCo)."""
zero = request_when("zero {plan.zero}", lambda facts: facts.plan.zero > 0)
"""A ZeRO stage from 1 to 3."""
microbatches = request_when("microbatches {plan.microbatches}", lambda facts: facts.plan.microbatches > 1)
"""More than one microbatch, with or without a pipeline."""
memory_of_weights = request_when(MEMORY, lambda facts: facts.plan.memory.name == "everything_saveable")
"""A memory plan that keeps all values, including the weights that a block reads."""
memory_of_sequences = request_when(MEMORY, lambda facts: facts.plan.memory.rule not in ("none", "dots", "full", "jax"))
"""A memory plan whose choices depend on the sequence of all blocks."""
host_updates_by_slices = request_when(
    "{plan.offload}",
    lambda facts: facts.plan.offload.any and facts.plan.offload.optimizer_state != "host",
)
"""Optimizer state or weights on the host that the device updates slice by slice."""
weights_host, gradients_host = plan_field("offload.weights", "host"), plan_field("offload.gradients", "host")
"""Weights in host memory, and gradients in host memory."""
state_host = plan_field("offload.optimizer_state", "host")
"""Optimizer state that the host updates."""
state_off_device = plan_field("offload.optimizer_state", "host", "streamed")
"""Optimizer state in host memory, updated by the host or by the device."""
split_weights = plan_field("state.master", "split")
"""Weights that are stored as bfloat16 and an 8-bit correction."""


def unlike_blocks(facts: Facts) -> str | None:
    """Return the text of the request for a pipeline of blocks that differ or are not stacked; otherwise `None`."""
    if not facts.has_unlike_blocks:
        return None
    pipeline_text, paths = (
        f"pipeline {facts.plan.pipeline.form if facts.plan.pipeline else ''}",
        facts.separate_blocks,
    )
    if not paths:
        return f"{pipeline_text} of unlike blocks"
    return f"{pipeline_text} of separate submodules ({', '.join(paths[:2])}{', ...' if len(paths) > 2 else ''})"


def asynchronous_unlike_blocks(facts: Facts) -> str | None:
    """Return the text of `unlike_blocks` if the pipeline is asynchronous; otherwise `None`."""
    return unlike_blocks(facts) if asynchronous(facts) else None


def codec(facts: Facts) -> str | None:
    """Return the text of the request for a codec of gradients, or of a one-bit optimizer's momenta; else `None`."""
    if facts.codes_momenta:
        return one_bit(facts)
    return f"reduce {facts.plan.reduce}" if isinstance(facts.plan.reduce, NamedCodec) else None


def codec_beside_one_bit(facts: Facts) -> str | None:
    """Return the text of `reduce` if it is set, but not to the codec that a one-bit optimizer requires; else `None`."""
    return None if facts.codes_momenta or facts.plan.reduce is None else f"reduce {facts.plan.reduce}"


def microbatches_beside_pipeline(facts: Facts) -> str | None:
    """Return the text of `microbatches` if it is over 1 and differs from the pipeline's number; otherwise `None`."""
    pipeline = facts.plan.pipeline
    pipeline_microbatches = None if pipeline is None or pipeline.name == "auto" else pipeline.shape()[1]
    return None if facts.plan.microbatches == pipeline_microbatches else microbatches(facts)


def model_state(facts: Facts) -> str | None:
    """Return a text about the model's state if the model has state in addition to its parameters; otherwise `None`."""
    return f"a model that holds state of its own ({', '.join(facts.state[:3])})" if facts.state else None


def has_blocks(facts: Facts) -> bool | None:
    """Return whether the model has a `Stack` or a `Chain`, or a scan over blocks; `None` while that is unknown."""
    return facts.has_blocks


def meets_before_the_end(facts: Facts) -> bool | None:
    """Return whether DiLoCo's replicas synchronize at least once in the run; `None` if that is unknown."""
    plan, experiment = facts.plan, facts.experiment
    return None if experiment is None or plan.diloco is None else plan.diloco.every <= experiment.steps


def has_axis(axis: str) -> Condition:
    """Return the condition that an axis of the mesh has several devices."""

    def condition(facts: Facts) -> bool | None:
        """Return whether the axis has several devices; `None` while the mesh is unknown."""
        device_count = facts.size(axis)
        return None if device_count is None else device_count > 1

    return condition


def has_fsdp_devices(facts: Facts) -> bool | None:
    """Return whether the fsdp axis has several devices; `None` if the mesh is unknown or has one device.

    `has_several_devices` is the condition for the latter case.
    """
    return None if facts.plan.mesh is not None and facts.plan.mesh.devices == 1 else has_axis("fsdp")(facts)


def has_several_devices(facts: Facts) -> bool | None:
    """Return whether the mesh has several devices; `None` while the mesh is unknown."""
    return None if facts.plan.mesh is None else facts.plan.mesh.devices > 1
