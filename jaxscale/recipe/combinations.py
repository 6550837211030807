"""What does not go together: a row a rule.

A row names requests (`requests.py`). A plan is checked by itself when it is made, and with its mesh, experiment and
model before a step is built; a row whose facts are not known yet is left for then. What a single value must be stands
with the value; what a schedule's table or a traced model shows first is refused there.
"""

import dataclasses

from jaxscale.errors import UserError
from jaxscale.recipe import requests as asked
from jaxscale.recipe.requests import Facts, Request


@dataclasses.dataclass(frozen=True)
class Rule:
    """A request, or a combination of requests, that cannot be met.

    Args:
        request: what is refused.
        text: why, and behind a semicolon what to do instead; `Facts.fill` fills in what it mentions.
    """

    request: Request
    text: str


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
        asked_for = rule.request(facts)
        if asked_for is not None:
            raise Incompatible(f"{asked_for}: {facts.fill(rule.text)}", rule)


OWN_COPIES = "its stages update copies of their own on the device, in the middle of a step"
OF_THE_WHOLE_BATCH = "batch statistics and generators are of the whole batch, and each replica would have its own"
LOOK_UPS = "XLA aborts on look-ups of such layers there (embeddings), and a model is not asked whether it has any"

RULES: tuple[Rule, ...] = (
    # what needs an axis of the mesh, or a pipeline
    Rule(
        asked.unless(asked.zero, asked.not_alone),
        "it shards over the fsdp axis, and mesh {plan.mesh} has none; take fsdp:N, leave mesh out to take all devices, "
        "or zero 0",
    ),
    Rule(
        asked.unless(asked.zero, asked.fsdp), "it shards over the fsdp axis, and mesh {plan.mesh} has none; add fsdp:N"
    ),
    Rule(
        asked.unless(asked.field("sequence_parallel", True), asked.has("tensor")),
        "it shards over the tensor axis, and mesh {plan.mesh} has none; add tensor:N",
    ),
    Rule(
        asked.unless(asked.codec, asked.has("replica")),
        "a codec reduces over the replica axis, and mesh {plan.mesh} has none; name the slow axis replica:N, or leave "
        "reduce out",
    ),
    Rule(
        asked.unless(asked.diloco, asked.has("replica")),
        "replicas train alone and meet over the replica axis, and mesh {plan.mesh} has none; name the slow axis "
        "replica:N, or leave diloco out",
    ),
    Rule(
        asked.unless(asked.one_bit, asked.has("replica")),
        "its momenta cross the replica axis, and mesh {plan.mesh} has none; name the slow axis replica:N, or take "
        "{plain}",
    ),
    Rule(
        asked.unless(asked.along("pipe"), lambda facts: facts.plan.pipeline is not None),
        "nothing specifies what the devices along pipe do; add a pipeline such as 1f1b:4x16",
    ),
    # numbers
    Rule(
        asked.unless(asked.field("reduce", "bfloat16"), lambda facts: facts.plan.precision == "bfloat16"),
        "what is computed in float32 is reduced in float32; add precision bfloat16, or leave reduce out",
    ),
    Rule(
        asked.unless(asked.split, lambda facts: facts.plan.precision == "bfloat16"),
        "its weights are bfloat16, which the passes read, and precision is {plan.precision}; add precision bfloat16, "
        "or take state.master float32",
    ),
    Rule(
        asked.both(asked.split, asked.field("reduce", "float32")),
        "gradients of bfloat16 weights are bfloat16; leave reduce out, or take state.master float32",
    ),
    # host memory
    Rule(
        asked.unless(asked.gradients_host, lambda facts: facts.plan.offload.weights == "host"),
        "they go there from weights that come from there; add offload.weights host",
    ),
    Rule(
        asked.both(asked.gradients_host, asked.microbatches),
        "nothing adds up the gradients of several microbatches there; take offload.gradients device, or microbatches 1",
    ),
    Rule(
        asked.both(asked.gradients_host, asked.pipeline),
        "nothing adds up the gradients of its microbatches there; take offload.gradients device, or leave the "
        "pipeline out",
    ),
    *(
        Rule(
            asked.both(asked.split, place),
            "what is on the host there is the float32 weights, which split weights do without; leave one out",
        )
        for place in (asked.weights_host, asked.state_host)
    ),
    Rule(
        asked.both(asked.keeps_weights, asked.weights_host),
        "it keeps every weight that was fetched on the device; take memory none, which keeps all else",
    ),
    Rule(
        asked.both(asked.memory("sqrt", "periodic", "revolve", "chain"), asked.weights_host),
        "segments of several blocks are cut out of the stacked weights, which would bring all of them to the device "
        "at once; take save:BYTES of at least the blocks' inputs, none, dots or full",
    ),
    Rule(
        asked.both(asked.weights_host, asked.foreign),
        "weights are streamed to the blocks of layers.Stack and layers.Chain; take offload.optimizer_state streamed "
        "or host",
    ),
    Rule(
        asked.unless(asked.host_updates_by_slices, lambda facts: facts.mixing is None),
        "this optimizer's update mixes elements of a tensor ({mixing}), so it can't be run slice by slice; take "
        "adamw, lamb, lion or sgd, or offload.optimizer_state host, whose update is of whole tensors",
    ),
    # what replicas send
    Rule(
        asked.both(asked.codec, asked.gradients_host),
        "a codec takes the gradients of a whole step on the device, and gradients on the host come block by block; "
        "take offload.gradients device, or leave reduce out",
    ),
    Rule(asked.both(asked.codec, asked.model_state), OF_THE_WHOLE_BATCH + "; {no_codec}, or take a model without"),
    Rule(asked.both(asked.codec, asked.foreign_over_tensor), f"{LOOK_UPS}; take a mesh without tensor"),
    Rule(
        asked.both(asked.one_bit, asked.codec_beside_one_bit),
        "it sends momenta in one bit, and no gradients that reduce could be for; leave reduce out",
    ),
    *(
        Rule(
            asked.both(asked.one_bit, place),
            "replicas send what their momentum becomes in the middle of an update, all of it from the device; keep "
            "it on the device",
        )
        for place in (asked.weights_host, asked.state_off)
    ),
    Rule(
        asked.both(asked.diloco, asked.one_bit),
        "its replicas exchange momenta in every step; take adamw inside, or leave diloco out",
    ),
    Rule(
        asked.unless(asked.diloco, asked.meets_before_the_end),
        "the run has {experiment.steps} steps, so replicas would meet once, at its end; meet more often, or leave "
        "diloco out",
    ),
    Rule(
        asked.both(asked.diloco, asked.weights_host),
        "each replica has weights of its own, on the device; take offload.weights device, or leave diloco out",
    ),
    Rule(
        asked.both(asked.diloco, asked.state_host),
        "the host would update each replica's own weights, which lie on the device; take offload.optimizer_state "
        "streamed, or leave diloco out",
    ),
    Rule(asked.both(asked.diloco, asked.split), "ways back are taken of float32 weights; take state.master float32"),
    Rule(
        asked.both(asked.diloco, asked.model_state),
        f"{OF_THE_WHOLE_BATCH}; leave diloco out, or take a model without",
    ),
    Rule(asked.both(asked.diloco, asked.foreign_over_tensor), f"{LOOK_UPS}; take a mesh without tensor"),
    # pipelines
    Rule(
        asked.both(asked.other_microbatches, asked.pipeline),
        "a pipeline specifies by itself how many parts it splits a batch into; leave microbatches out",
    ),
    *(
        Rule(
            asked.both(asked.option(name), asked.newest_weights),
            "its gradients are of the newest weights; leave it out, or take pipemare:P",
        )
        for name in ("anneal", "correction", "synchronous_steps")
    ),
    Rule(
        asked.both(asked.correction, asked.own_weights),
        "its backwards read the weights of their forwards; leave it out, or take pipemare:P",
    ),
    Rule(asked.both(asked.phased, asked.asynchronous), "its ticks mix kinds; leave it out"),
    Rule(
        asked.both(asked.weights_host, asked.copied),
        "two devices have each stage, and its weights go from one to the other in every step; take another pipeline, "
        "or offload.weights device",
    ),
    # asynchronous pipelines
    Rule(
        asked.both(asked.split, asked.asynchronous),
        "its stages keep older weights whole; take state.master float32, or a synchronous pipeline",
    ),
    Rule(
        asked.both(asked.weights_host, asked.asynchronous),
        f"{OWN_COPIES}; take offload.weights device, or a synchronous pipeline",
    ),
    Rule(
        asked.both(asked.state_off, asked.asynchronous),
        "a stage updates in the middle of a step, where nothing comes from the host; leave it out, or take a "
        "synchronous pipeline",
    ),
    Rule(
        asked.both(asked.zero, asked.asynchronous),
        "a stage updates in the middle of a step, with weights and optimizer state of its own, whole on its device; "
        "take zero 0, or a synchronous pipeline",
    ),
    Rule(
        asked.both(lambda facts: asked.codec(facts) if asked.along("tensor")(facts) else None, asked.asynchronous),
        "stages reduce when they update, each in a branch of its own, in which XLA would move parts of a gradient "
        "over tensor, and devices of other stages never come; take a mesh without tensor, or a synchronous pipeline",
    ),
    Rule(
        asked.both(asked.one_bit, asked.asynchronous),
        "replicas send momenta once, after a step, and a stage updates in the middle of it; take a synchronous "
        "pipeline, or {plain}",
    ),
    Rule(
        asked.both(asked.diloco, asked.asynchronous),
        f"{OWN_COPIES}, and replicas meet between steps; take a synchronous pipeline, or leave diloco out",
    ),
    Rule(
        asked.both(
            lambda facts: asked.memory("offload")(facts) if facts.plan.stages_keep == "residuals" else None,
            asked.asynchronous,
        ),
        "what its stages keep is in flight from step to step, and lies on the device; add the option stash=input, "
        "with which a stage offloads within its backward, or take a synchronous pipeline",
    ),
    Rule(
        asked.unless(asked.asynchronous, lambda facts: not facts.reshaped),
        "what this optimizer keeps has other shapes than its parameters, and a stage takes its layers' part of "
        "arrays that have theirs; take adamw, lamb, lion or sgd, or a synchronous pipeline",
    ),
    Rule(
        asked.unless(asked.asynchronous, lambda facts: facts.mixing is None),
        "this optimizer's update mixes elements of a tensor ({mixing}), which may be of several layers, and a stage "
        "has some of them alone; take an optimizer by name such as adamw or lamb, or a synchronous pipeline",
    ),
    # pipelines of unlike blocks
    Rule(
        asked.both(asked.unlike, asked.asynchronous),
        "its stages have no updates of their own; take a synchronous one",
    ),
    Rule(
        asked.both(asked.residuals, asked.unlike),
        "what a stage keeps has shapes of its own, and slots are alike; add the option stash=input",
    ),
    *(
        Rule(
            asked.both(asked.along(axis), asked.unlike),
            f"a stage's weights travel as one flat array, which nothing splits over {axis}; take data or fsdp in its "
            "place",
        )
        for axis in ("tensor", "sequence")
    ),
    Rule(
        asked.both(asked.field("zero", 3), asked.unlike),
        "a stage's weights travel as one flat array, whole on its device; take zero 2",
    ),
    Rule(
        asked.both(asked.weights_host, asked.unlike),
        "a stage's weights travel as one flat array, whole on its device; take offload.weights device, or "
        "offload.optimizer_state host",
    ),
    Rule(asked.both(asked.codec, asked.unlike), "codecs are made for weights that stages have; {no_codec}"),
    Rule(
        asked.both(asked.memory_of_sequences, asked.unlike),
        "it looks at all blocks in sequence, and a stage has some; take none, dots or full",
    ),
)
"""Every rule, in the order in which a combination is checked."""
