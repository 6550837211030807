"""Combinations of settings that do not work together, as a table with one rule per row.

A row names requests, that is, settings of a plan or properties of a model (`requests.py`). A plan is checked when it is
created, and again with its mesh, experiment and model before a step is built. If the facts for a row are not known yet,
the row is skipped. The table has no conditions on a single value, because the class of the value checks these. It also
has no conditions on the table of a schedule, or on a traced model.
"""

import dataclasses

from jaxscale.errors import UserError
from jaxscale.recipe import requests
from jaxscale.recipe.requests import Facts, Request


@dataclasses.dataclass(frozen=True)
class Rule:
    """A request, or a combination of requests, that is refused.

    Args:
        request: the request, or the combination of requests.
        text: the reason, a semicolon, and what to do instead. `Facts.fill` replaces its fields in braces.
    """

    request: Request
    text: str


class Incompatible(UserError):
    """A combination of requests that a rule refuses.

    Args:
        text: the requests, the reason, and what to do instead.
        rule: the rule that refuses the combination.
    """

    def __init__(self, text: str, rule: Rule) -> None:
        super().__init__(text, page="choosing/combinations")
        self.rule = rule


def batch_cut_text(facts: Facts) -> str | None:
    """Return the text of the first request that splits the batch on which the loss is computed, or else `None`."""
    return next((text for request in CUTS_THE_BATCH if (text := request(facts)) is not None), None)


def check(facts: Facts) -> None:
    """Raise an error for the first rule that applies to a training run.

    Args:
        facts: the settings and properties of the training run that are known so far.

    Raises:
        Incompatible: a rule applies; the error gives its reason and what to do instead.

    Example:
        >>> from jaxscale.recipe.plan import OffloadPlan, Plan
        >>> Plan(offload=OffloadPlan(gradients="host"))
        Traceback (most recent call last):
        jaxscale.recipe.combinations.Incompatible: offload.gradients host: gradients go to the host only if \
weights lie there too; add offload.weights host (jaxscale docs choosing/combinations)
    """
    for rule in RULES:
        request_text = rule.request(facts)
        if request_text is not None:
            raise Incompatible(f"{request_text}: {facts.fill(rule.text)}", rule)


# reasons that several rules share
OWN_COPIES = "the pipeline's stages update their own copies of the weights on the device, in the middle of a step"
OF_THE_WHOLE_BATCH = "batch statistics and generators belong to the whole batch, but each replica would have its own"
LOOK_UPS = "XLA aborts on the embedding look-ups of such layers, and jaxscale cannot see whether a model has any"

CUTS_THE_BATCH = (requests.microbatches, requests.codec, requests.diloco)
"""Requests under which the loss is computed on parts of a batch: microbatches, or the rows of one replica."""

RULES: tuple[Rule, ...] = (
    # requests that need an axis of the mesh, or a pipeline
    Rule(
        requests.request_unless(requests.zero, requests.has_several_devices),
        "ZeRO shards over the fsdp axis, but mesh {plan.mesh} has none; take fsdp:N, leave mesh out to take all "
        "devices, or zero 0",
    ),
    Rule(
        requests.request_unless(requests.zero, requests.has_fsdp_devices),
        "ZeRO shards over the fsdp axis, but mesh {plan.mesh} has none; add fsdp:N",
    ),
    Rule(
        requests.request_unless(requests.plan_field("sequence_parallel", True), requests.has_axis("tensor")),
        "sequences are sharded over the tensor axis, but mesh {plan.mesh} has none; add tensor:N",
    ),
    Rule(
        requests.request_unless(requests.codec, requests.has_axis("replica")),
        "a codec reduces over the replica axis, but mesh {plan.mesh} has none; name the slow axis replica:N, or leave "
        "reduce out",
    ),
    Rule(
        requests.request_unless(requests.diloco, requests.has_axis("replica")),
        "replicas train alone and synchronize over the replica axis, but mesh {plan.mesh} has none; name the slow axis "
        "replica:N, or leave diloco out",
    ),
    Rule(
        requests.request_unless(requests.one_bit, requests.has_axis("replica")),
        "momenta cross the replica axis, but mesh {plan.mesh} has none; name the slow axis replica:N, or take {plain}",
    ),
    Rule(
        requests.request_unless(requests.several_along("pipe"), lambda facts: facts.plan.pipeline is not None),
        "nothing specifies what the devices along pipe do; add a pipeline such as 1f1b:4x16",
    ),
    # number formats
    Rule(
        requests.request_unless(
            requests.plan_field("reduce", "bfloat16"), lambda facts: facts.plan.precision == "bfloat16"
        ),
        "gradients that are computed in float32 are reduced in float32; add precision bfloat16, or leave reduce out",
    ),
    Rule(
        requests.request_unless(requests.split_weights, lambda facts: facts.plan.precision == "bfloat16"),
        "split weights are bfloat16, but precision is {plan.precision}; add precision bfloat16, or take state.master "
        "float32",
    ),
    Rule(
        requests.combination(requests.split_weights, requests.plan_field("reduce", "float32")),
        "gradients of bfloat16 weights are bfloat16; leave reduce out, or take state.master float32",
    ),
    Rule(
        requests.combination(requests.plan_field("matmul", "fp8", "int8", "int4"), requests.few_bit_base),
        "the recipe would round weights that are rounded already, and check a gradient of the weights, of which there "
        "is none; leave matmul out, or take a base in the precision of the plan",
    ),
    # host memory
    Rule(
        requests.request_unless(requests.gradients_host, lambda facts: facts.plan.offload.weights == "host"),
        "gradients go to the host only if weights lie there too; add offload.weights host",
    ),
    Rule(
        requests.combination(requests.gradients_host, requests.microbatches),
        "gradients on the host are not summed over microbatches; take offload.gradients device, or microbatches 1",
    ),
    Rule(
        requests.combination(requests.gradients_host, requests.pipeline),
        "gradients on the host are not summed over a pipeline's microbatches; take offload.gradients device, or leave "
        "the pipeline out",
    ),
    *(
        Rule(
            requests.combination(requests.split_weights, host_request),
            "the host would hold float32 weights, which split weights replace; leave out one of the two",
        )
        for host_request in (requests.weights_host, requests.state_host)
    ),
    Rule(
        requests.combination(requests.memory_of_weights, requests.weights_host),
        "the rule would keep every weight that is fetched to the device; take memory none, which keeps everything else",
    ),
    Rule(
        requests.combination(requests.memory_rule("sqrt", "periodic", "revolve", "chain"), requests.weights_host),
        "segments of several blocks are cut out of the stacked weights, which would bring all of them to the device "
        "at once; take save:BYTES of at least the blocks' inputs, none, dots or full",
    ),
    Rule(
        requests.request_unless(
            requests.combination(requests.weights_host, requests.foreign_model), requests.has_blocks
        ),
        "weights are streamed to blocks that a scan runs, or that lie in layers.Stack or layers.Chain; take "
        "offload.optimizer_state streamed or host",
    ),
    Rule(
        requests.request_unless(requests.unrolled_foreign_model, requests.has_blocks),
        "this model runs its own layers without a scan; leave unroll out",
    ),
    Rule(
        requests.request_unless(requests.host_updates_by_slices, lambda facts: facts.mixing is None),
        "this optimizer's update mixes elements of a tensor ({mixing}), so it can't be run slice by slice; take "
        "adamw, lamb, lion or sgd, or offload.optimizer_state host, whose update is of whole tensors",
    ),
    # codecs, one-bit optimizers and DiLoCo
    Rule(
        requests.combination(requests.codec, requests.gradients_host),
        "a codec takes the gradients of a whole step on the device, and gradients on the host come block by block; "
        "take offload.gradients device, or leave reduce out",
    ),
    Rule(
        requests.combination(requests.codec, requests.model_state),
        OF_THE_WHOLE_BATCH + "; {no_codec}, or take a model without such state",
    ),
    Rule(
        requests.combination(requests.codec, requests.foreign_model_over_tensor),
        f"{LOOK_UPS}; take a mesh without tensor",
    ),
    Rule(
        requests.combination(requests.one_bit, requests.codec_beside_one_bit),
        "replicas send momenta in one bit instead of gradients, so reduce has nothing to compress; leave reduce out",
    ),
    *(
        Rule(
            requests.combination(requests.one_bit, host_request),
            "replicas send their new momentum in the middle of an update, from the device; keep weights and state "
            "on the device",
        )
        for host_request in (requests.weights_host, requests.state_off_device)
    ),
    Rule(
        requests.combination(requests.diloco, requests.one_bit),
        "the optimizer's replicas exchange momenta in every step; take optimizer adamw, or leave diloco out",
    ),
    Rule(
        requests.request_unless(requests.diloco, requests.meets_before_the_end),
        "the run has {experiment.steps} steps, so replicas would synchronize only once, at its end; take a "
        "smaller every=N in diloco, or leave diloco out",
    ),
    Rule(
        requests.combination(requests.diloco, requests.weights_host),
        "each replica has weights of its own, on the device; take offload.weights device, or leave diloco out",
    ),
    Rule(
        requests.combination(requests.diloco, requests.state_host),
        "the host would update each replica's own weights, which lie on the device; take offload.optimizer_state "
        "streamed, or leave diloco out",
    ),
    Rule(
        requests.combination(requests.diloco, requests.split_weights),
        "displacements are computed from float32 weights; take state.master float32",
    ),
    Rule(
        requests.combination(requests.diloco, requests.model_state),
        f"{OF_THE_WHOLE_BATCH}; leave diloco out, or take a model without such state",
    ),
    Rule(
        requests.combination(requests.diloco, requests.foreign_model_over_tensor),
        f"{LOOK_UPS}; take a mesh without tensor",
    ),
    # parameters that are not trained
    Rule(
        requests.combination(requests.frozen_parameters, requests.pipeline),
        "a pipeline divides the trained parameters into stages, and the others would be whole on every device; take a "
        "mesh of fsdp devices with zero 3, or leave the pipeline out",
    ),
    Rule(
        requests.combination(requests.frozen_parameters, requests.weights_host),
        "weights are streamed to be updated, and parameters that are not trained stay on the device; take "
        "offload.weights device, or zero 3",
    ),
    # an average of weights
    Rule(
        requests.combination(requests.average, requests.asynchronous),
        "a stage updates in the middle of a step, so a step has no one set of weights to average; take a synchronous "
        "pipeline, or leave ema out",
    ),
    Rule(
        requests.combination(requests.average, requests.diloco),
        "each replica has weights of its own, and the outer update averages them; leave ema or diloco out",
    ),
    *(
        Rule(
            requests.combination(requests.average, host_request),
            "the average lies on the device, and float32 weights that are updated from the host do not; keep weights "
            "and state on the device, or leave ema out",
        )
        for host_request in (requests.weights_host, requests.state_off_device)
    ),
    # losses that couple the rows of a batch
    *(
        Rule(
            requests.combination(requests.loss_over_batch, cut),
            "the loss of parts of a batch is another loss; leave one of the two out, and take memory full or zero 3 "
            "if memory is short",
        )
        for cut in (requests.microbatches, requests.diloco)  # a codec's replicas gather what the module returns
    ),
    # pipelines
    Rule(
        requests.combination(requests.microbatches_beside_pipeline, requests.pipeline),
        "a pipeline specifies by itself how many parts it splits a batch into; leave microbatches out",
    ),
    *(
        Rule(
            requests.combination(requests.pipeline_option(name), requests.newest_weights),
            f"this pipeline's gradients are of the newest weights; leave {name} out, or take pipemare:P",
        )
        for name in ("anneal", "correction", "synchronous_steps")
    ),
    Rule(
        requests.combination(requests.weight_correction, requests.own_weights),
        "the pipeline's backward passes read the same weights as its forward passes; leave correction out, or take "
        "pipemare:P",
    ),
    Rule(
        requests.combination(requests.phased_lowering, requests.asynchronous),
        "the pipeline's ticks mix forward and backward passes; leave lowering out",
    ),
    Rule(
        requests.combination(requests.weights_host, requests.copied_stages),
        "two devices run each stage, and one of them sends the stage's weights to the other in every step; take "
        "another pipeline, or offload.weights device",
    ),
    # asynchronous pipelines
    Rule(
        requests.combination(requests.split_weights, requests.asynchronous),
        "the pipeline's stages keep older weights whole; take state.master float32, or a synchronous pipeline",
    ),
    Rule(
        requests.combination(requests.weights_host, requests.asynchronous),
        f"{OWN_COPIES}; take offload.weights device, or a synchronous pipeline",
    ),
    Rule(
        requests.combination(requests.state_off_device, requests.asynchronous),
        "a stage updates in the middle of a step, when nothing comes from the host; take offload.optimizer_state "
        "device, or a synchronous pipeline",
    ),
    Rule(
        requests.combination(requests.zero, requests.asynchronous),
        "a stage updates in the middle of a step, with weights and optimizer state of its own, whole on its device; "
        "take zero 0, or a synchronous pipeline",
    ),
    Rule(
        requests.combination(
            lambda facts: requests.codec(facts) if requests.several_along("tensor")(facts) else None,
            requests.asynchronous,
        ),
        "each stage reduces its gradients in a branch of its own, in which XLA would wait for devices along tensor "
        "that do not run this branch; take a mesh without tensor, or a synchronous pipeline",
    ),
    Rule(
        requests.combination(requests.one_bit, requests.asynchronous),
        "replicas send momenta once, after a step, but a stage updates in the middle of a step; take a synchronous "
        "pipeline, or {plain}",
    ),
    Rule(
        requests.combination(requests.diloco, requests.asynchronous),
        f"{OWN_COPIES}, and replicas meet between steps; take a synchronous pipeline, or leave diloco out",
    ),
    Rule(
        requests.combination(
            lambda facts: requests.memory_rule("offload")(facts) if facts.plan.stages_keep == "residuals" else None,
            requests.asynchronous,
        ),
        "the pipeline's stages keep activations from step to step, which must stay on the device; add the option "
        "stash=input, with which a stage offloads within its backward pass, or take a synchronous pipeline",
    ),
    Rule(
        requests.request_unless(requests.asynchronous, lambda facts: not facts.has_reshaped_state),
        "this optimizer keeps arrays of other shapes than its parameters, which cannot be divided into stages; take "
        "adamw, lamb, lion or sgd, or a synchronous pipeline",
    ),
    Rule(
        requests.request_unless(requests.asynchronous, lambda facts: facts.mixing is None),
        "this optimizer's update mixes elements of a tensor ({mixing}), which may belong to several layers, and a "
        "stage has only some of the layers; take an optimizer by name such as adamw or lamb, or a synchronous pipeline",
    ),
    # pipelines of unlike blocks
    Rule(
        requests.asynchronous_unlike_blocks,
        "stages of blocks that are not in one stack cannot update their weights at different times; take a synchronous "
        "pipeline{or_stack}",
    ),
    Rule(
        requests.combination(requests.kept_residuals, requests.unlike_blocks),
        "residuals have other shapes in each stage, but all slots for them have one shape; add the option stash=input"
        "{or_stack}",
    ),
    *(
        Rule(
            requests.combination(requests.several_along(axis), requests.unlike_blocks),
            f"a stage's weights form one flat array, which nothing splits over {axis}; take data or fsdp instead"
            "{or_stack}",
        )
        for axis in ("tensor", "sequence")
    ),
    Rule(
        requests.combination(requests.plan_field("zero", 3), requests.unlike_blocks),
        "a stage's weights form one flat array, whole on its device; take zero 2{or_stack}",
    ),
    Rule(
        requests.combination(requests.weights_host, requests.unlike_blocks),
        "a stage's weights form one flat array, whole on its device; take offload.weights device, or "
        "offload.optimizer_state host{or_stack}",
    ),
    Rule(
        requests.combination(requests.codec, requests.unlike_blocks),
        "codecs support only stages of alike blocks in one stack; {no_codec}{or_stack}",
    ),
    Rule(
        requests.combination(requests.memory_of_sequences, requests.unlike_blocks),
        "the rule looks at all blocks in sequence, but a stage has only some of the blocks; take none, dots or full"
        "{or_stack}",
    ),
)
"""Every rule, in the order in which a combination is checked."""
