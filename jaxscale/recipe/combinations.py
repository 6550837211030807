"""What does not go together: a row a rule.

A row names requests (`requests.py`). A plan is checked by itself when it is made, and with its mesh, experiment and
model before a step is built; a row whose facts are not known yet is left for then. What a single value must be stands
with the value; what a schedule's table or a traced model shows first is refused there.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from jaxscale.errors import UserError
from jaxscale.recipe import requests as asked
from jaxscale.recipe.requests import Facts, Request


@dataclasses.dataclass(frozen=True)
class Exclusion:
    """Two requests that cannot be met together.

    Args:
        one: a request.
        other: another one.
        reason: why not; `Facts.fill` fills in what it mentions.
        way: what to do instead.
    """

    one: Request
    other: Request
    reason: str
    way: str

    def refusal(self, facts: Facts) -> str | None:
        """Why the facts are refused; `None` where they are not."""
        one, other = self.one(facts), self.other(facts)
        if one is None or other is None:
            return None
        return f"{one} with {other}: {facts.fill(self.reason)}; {facts.fill(self.way)}"


@dataclasses.dataclass(frozen=True)
class Requirement:
    """A request that can be met under a condition alone.

    Args:
        request: the request.
        met: whether the condition holds; `None` while that is not known.
        reason: what is needed, and what there is; likewise.
        way: what to do instead.
    """

    request: Request
    met: Callable[[Facts], bool | None]
    reason: str
    way: str

    def refusal(self, facts: Facts) -> str | None:
        """Why the facts are refused; `None` where they are not."""
        text = self.request(facts)
        if text is None or self.met(facts) is not False:
            return None
        return f"{text}: {facts.fill(self.reason)}; {facts.fill(self.way)}"


Rule: TypeAlias = Exclusion | Requirement


class Incompatible(UserError):
    """A combination that a rule refuses.

    Args:
        text: the reason and the way round, filled in.
        rule: the row.
    """

    def __init__(self, text: str, rule: Rule) -> None:
        super().__init__(text)
        self.rule = rule


def check(facts: Facts) -> None:
    """Refuse a combination that a row excludes.

    Raises:
        Incompatible: with the first such row's reason, and the way round.

    Example:
        >>> from jaxscale.recipe.plan import OffloadPlan, Plan
        >>> Plan(offload=OffloadPlan(gradients="host"))
        Traceback (most recent call last):
        jaxscale.recipe.combinations.Incompatible: offload.gradients host: they go there from weights that \
come from there; add offload.weights host
    """
    for rule in RULES:
        text = rule.refusal(facts)
        if text is not None:
            raise Incompatible(text, rule)


OWN_COPIES = "its stages update copies of their own on the device, in the middle of a step"
OF_THE_WHOLE_BATCH = "batch statistics and generators are of the whole batch, and each replica would have its own"
LOOK_UPS = "XLA aborts on look-ups of such layers there (embeddings), and a model is not asked whether it has any"

RULES: tuple[Rule, ...] = (
    # what needs an axis of the mesh, or a pipeline
    Requirement(
        asked.zero,
        asked.not_alone,
        "it shards over the fsdp axis, and mesh {mesh} has none",
        "take fsdp:N, leave mesh out to take all devices, or zero 0",
    ),
    Requirement(asked.zero, asked.fsdp, "it shards over the fsdp axis, and mesh {mesh} has none", "add fsdp:N"),
    Requirement(
        asked.field("sequence_parallel", True),
        asked.has("tensor"),
        "it shards over the tensor axis, and mesh {mesh} has none",
        "add tensor:N",
    ),
    Requirement(
        asked.codec,
        asked.has("replica"),
        "a codec reduces over the replica axis, and mesh {mesh} has none",
        "name the slow axis replica:N, or leave reduce out",
    ),
    Requirement(
        asked.diloco,
        asked.has("replica"),
        "replicas train alone and meet over the replica axis, and mesh {mesh} has none",
        "name the slow axis replica:N, or leave diloco out",
    ),
    Requirement(
        asked.one_bit,
        asked.has("replica"),
        "its momenta cross the replica axis, and mesh {mesh} has none",
        "name the slow axis replica:N, or take {plain}",
    ),
    Requirement(
        asked.along("pipe"),
        lambda facts: facts.plan.pipeline is not None,
        "nothing specifies what the devices along pipe do",
        "add a pipeline such as 1f1b:4x16",
    ),
    # numbers
    Requirement(
        asked.field("reduce", "bfloat16"),
        lambda facts: facts.plan.precision == "bfloat16",
        "what is computed in float32 is reduced in float32",
        "add precision bfloat16, or leave reduce out",
    ),
    Requirement(
        asked.split,
        lambda facts: facts.plan.precision == "bfloat16",
        "its weights are bfloat16, which the passes read, and precision is {precision}",
        "add precision bfloat16, or take state.master float32",
    ),
    Exclusion(
        asked.split,
        asked.field("reduce", "float32"),
        "gradients of bfloat16 weights are bfloat16",
        "leave reduce out, or take state.master float32",
    ),
    # host memory
    Requirement(
        asked.gradients_host,
        lambda facts: facts.plan.offload.weights == "host",
        "they go there from weights that come from there",
        "add offload.weights host",
    ),
    Exclusion(
        asked.gradients_host,
        asked.microbatches,
        "nothing adds up the gradients of several microbatches there",
        "take offload.gradients device, or microbatches 1",
    ),
    Exclusion(
        asked.gradients_host,
        asked.pipeline,
        "nothing adds up the gradients of its microbatches there",
        "take offload.gradients device, or leave the pipeline out",
    ),
    *(
        Exclusion(
            asked.split,
            place,
            "what is on the host there is the float32 weights, which split weights do without",
            "leave one out",
        )
        for place in (asked.weights_host, asked.state_host)
    ),
    Exclusion(
        asked.keeps_weights,
        asked.weights_host,
        "it keeps every weight that was fetched on the device",
        "take memory none, which keeps all else",
    ),
    Exclusion(
        asked.memory("sqrt", "periodic", "revolve", "chain"),
        asked.weights_host,
        "segments of several blocks are cut out of the stacked weights, which would bring all of them to the device at "
        "once",
        "take save:BYTES of at least the blocks' inputs, none, dots or full",
    ),
    Exclusion(
        asked.weights_host,
        asked.foreign,
        "weights are streamed to the blocks of layers.Stack and layers.Chain",
        "take offload.optimizer_state streamed or host",
    ),
    Requirement(
        asked.host_updates_by_slices,
        lambda facts: facts.mixing is None,
        "this optimizer's update mixes elements of a tensor ({mixing}), so it can't be run slice by slice",
        "take adamw, lamb, lion or sgd, or offload.optimizer_state host, whose update is of whole tensors",
    ),
    # what replicas send
    Exclusion(
        asked.codec,
        asked.gradients_host,
        "a codec takes the gradients of a whole step on the device, and gradients on the host come block by block",
        "take offload.gradients device, or leave reduce out",
    ),
    Exclusion(asked.codec, asked.model_state, OF_THE_WHOLE_BATCH, "{no_codec}, or take a model without"),
    Exclusion(asked.codec, asked.foreign_over_tensor, LOOK_UPS, "take a mesh without tensor"),
    Exclusion(
        asked.one_bit,
        asked.codec_beside_one_bit,
        "it sends momenta in one bit, and no gradients that reduce could be for",
        "leave reduce out",
    ),
    *(
        Exclusion(
            asked.one_bit,
            place,
            "replicas send what their momentum becomes in the middle of an update, all of it from the device",
            "keep it on the device",
        )
        for place in (asked.weights_host, asked.state_off)
    ),
    Exclusion(
        asked.diloco,
        asked.one_bit,
        "its replicas exchange momenta in every step",
        "take adamw inside, or leave diloco out",
    ),
    Requirement(
        asked.diloco,
        asked.meets_before_the_end,
        "the run has {steps} steps, so replicas would meet once, at its end",
        "meet more often, or leave diloco out",
    ),
    Exclusion(
        asked.diloco,
        asked.weights_host,
        "each replica has weights of its own, on the device",
        "take offload.weights device, or leave diloco out",
    ),
    Exclusion(
        asked.diloco,
        asked.state_host,
        "the host would update each replica's own weights, which lie on the device",
        "take offload.optimizer_state streamed, or leave diloco out",
    ),
    Exclusion(asked.diloco, asked.split, "ways back are taken of float32 weights", "take state.master float32"),
    Exclusion(asked.diloco, asked.model_state, OF_THE_WHOLE_BATCH, "leave diloco out, or take a model without"),
    Exclusion(asked.diloco, asked.foreign_over_tensor, LOOK_UPS, "take a mesh without tensor"),
    # pipelines
    Exclusion(
        asked.other_microbatches,
        asked.pipeline,
        "a pipeline specifies by itself how many parts it splits a batch into",
        "leave microbatches out",
    ),
    *(
        Exclusion(
            asked.option(name),
            asked.newest_weights,
            "its gradients are of the newest weights",
            "leave it out, or take pipemare:P",
        )
        for name in ("anneal", "correction", "synchronous_steps")
    ),
    Exclusion(
        asked.correction,
        asked.own_weights,
        "its backwards read the weights of their forwards",
        "leave it out, or take pipemare:P",
    ),
    Exclusion(asked.phased, asked.asynchronous, "its ticks mix kinds", "leave it out"),
    Exclusion(
        asked.weights_host,
        asked.copied,
        "two devices have each stage, and its weights go from one to the other in every step",
        "take another pipeline, or offload.weights device",
    ),
    # asynchronous pipelines
    Exclusion(
        asked.split,
        asked.asynchronous,
        "its stages keep older weights whole",
        "take state.master float32, or a synchronous pipeline",
    ),
    Exclusion(
        asked.weights_host, asked.asynchronous, OWN_COPIES, "take offload.weights device, or a synchronous pipeline"
    ),
    Exclusion(
        asked.state_off,
        asked.asynchronous,
        "a stage updates in the middle of a step, where nothing comes from the host",
        "leave it out, or take a synchronous pipeline",
    ),
    Exclusion(
        asked.zero,
        asked.asynchronous,
        "a stage updates in the middle of a step, with weights and optimizer state of its own, whole on its device",
        "take zero 0, or a synchronous pipeline",
    ),
    Exclusion(
        lambda facts: asked.codec(facts) if asked.along("tensor")(facts) else None,
        asked.asynchronous,
        "stages reduce when they update, each in a branch of its own, in which XLA would move parts of a gradient over "
        "tensor, and devices of other stages never come",
        "take a mesh without tensor, or a synchronous pipeline",
    ),
    Exclusion(
        asked.one_bit,
        asked.asynchronous,
        "replicas send momenta once, after a step, and a stage updates in the middle of it",
        "take a synchronous pipeline, or {plain}",
    ),
    Exclusion(
        asked.diloco,
        asked.asynchronous,
        f"{OWN_COPIES}, and replicas meet between steps",
        "take a synchronous pipeline, or leave diloco out",
    ),
    Exclusion(
        lambda facts: asked.memory("offload")(facts) if facts.plan.stages_keep == "residuals" else None,
        asked.asynchronous,
        "what its stages keep is in flight from step to step, and lies on the device",
        "add the option stash=input, with which a stage offloads within its backward, or take a synchronous pipeline",
    ),
    Requirement(
        asked.asynchronous,
        lambda facts: not facts.reshaped,
        "what this optimizer keeps has other shapes than its parameters, and a stage takes its layers' part of arrays "
        "that have theirs",
        "take adamw, lamb, lion or sgd, or a synchronous pipeline",
    ),
    Requirement(
        asked.asynchronous,
        lambda facts: facts.mixing is None,
        "this optimizer's update mixes elements of a tensor ({mixing}), which may be of several layers, and a stage "
        "has some of them alone",
        "take an optimizer by name such as adamw or lamb, or a synchronous pipeline",
    ),
    # pipelines of unlike blocks
    Exclusion(asked.unlike, asked.asynchronous, "its stages have no updates of their own", "take a synchronous one"),
    Exclusion(
        asked.residuals,
        asked.unlike,
        "what a stage keeps has shapes of its own, and slots are alike",
        "add the option stash=input",
    ),
    *(
        Exclusion(
            asked.along(axis),
            asked.unlike,
            f"a stage's weights travel as one flat array, which nothing splits over {axis}",
            "take data or fsdp in its place",
        )
        for axis in ("tensor", "sequence")
    ),
    Exclusion(
        asked.field("zero", 3),
        asked.unlike,
        "a stage's weights travel as one flat array, whole on its device",
        "take zero 2",
    ),
    Exclusion(
        asked.weights_host,
        asked.unlike,
        "a stage's weights travel as one flat array, whole on its device",
        "take offload.weights device, or offload.optimizer_state host",
    ),
    Exclusion(asked.codec, asked.unlike, "codecs are made for weights that stages have", "{no_codec}"),
    Exclusion(
        asked.memory_of_sequences,
        asked.unlike,
        "it looks at all blocks in sequence, and a stage has some",
        "take none, dots or full",
    ),
)
"""Every rule, in the order in which a combination is checked."""
