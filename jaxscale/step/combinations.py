"""What does not go together: a row a rule, and the only place that refuses a combination of techniques.

A row names requests, each a function from the facts to what the user wrote, or `None` where it was not asked for. A
plan is checked by itself when it is made, and with its mesh, experiment and model before a step is built; a row whose
facts are not known yet is left for then. What a single value must be stands with the value.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from jaxscale.compression.named import NamedCodec
from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan

if TYPE_CHECKING:
    from jaxscale.step.experiment import Experiment
    from jaxscale.step.plan import Plan


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a training when its combination is checked.

    Args:
        plan: its plan; rows about an axis of the mesh wait until the plan has one.
        experiment: model, optimizer and steps; `None` while the plan is made.
        state: names of what the model holds beside parameters.
        unlike: its pipeline has stages of unlike blocks.
        copied: two devices of its pipeline have weights of the same stage.
        mixing: the operation by which the optimizer's update mixes elements of a tensor; `None`: it mixes none.
    """

    plan: "Plan"
    experiment: "Experiment | None" = None
    state: tuple[str, ...] = ()
    unlike: bool = False
    copied: bool = False
    mixing: str | None = None

    def size(self, axis: str) -> int | None:
        """Devices along an axis; `None` while it is not known."""
        return None if self.plan.mesh is None else self.plan.mesh.sizes[axis]

    def fill(self, text: str) -> str:
        """A row's text, with what it mentions of the facts filled in."""
        plan, experiment = self.plan, self.experiment
        optimizer = "" if experiment is None else experiment.optimizer.name
        return text.format(
            mesh=plan.mesh,
            precision=plan.precision,
            steps="" if experiment is None else experiment.steps,
            plain=optimizer.removeprefix("one_bit_").replace("adam", "adamw"),
            mixing=self.mixing,
        )


Request: TypeAlias = Callable[[Facts], str | None]
"""What the user wrote of a technique; `None` where it is not asked for."""


@dataclasses.dataclass(frozen=True)
class Excludes:
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
class Needs:
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
        asked = self.request(facts)
        if asked is None or self.met(facts) is not False:
            return None
        return f"{asked}: {facts.fill(self.reason)}; {facts.fill(self.way)}"


Rule: TypeAlias = Excludes | Needs


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
        >>> from jaxscale.step.plan import Plan
        >>> Plan(gradients="host")
        Traceback (most recent call last):
        jaxscale.step.combinations.Incompatible: gradients host: they go there from weights that come from there; add \
weights host
    """
    for rule in RULES:
        text = rule.refusal(facts)
        if text is not None:
            raise Incompatible(text, rule)


# -- requests ----------------------------------------------------------------------------------------------------------


def field(name: str, *values: object) -> Request:
    """A field of the plan that has one of some values."""

    def request(facts: Facts) -> str | None:
        value = getattr(facts.plan, name)
        return f"{name} {value}" if value in values else None

    return request


def changed(name: str) -> Request:
    """A field of the plan that has another value than its default."""

    def request(facts: Facts) -> str | None:
        value = getattr(facts.plan, name)
        return None if value == getattr(type(facts.plan), name) else f"{name} {value}"

    return request


def along(axis: str) -> Request:
    """Several devices along an axis of the mesh."""

    def request(facts: Facts) -> str | None:
        return f"mesh {facts.plan.mesh}" if (facts.size(axis) or 1) > 1 else None

    return request


def _pipeline(facts: Facts) -> str | None:
    return None if facts.plan.pipeline is None else f"pipeline {facts.plan.pipeline}"


def _asynchronous(facts: Facts) -> str | None:
    return f"pipeline {facts.plan.pipeline}" if facts.plan.asynchronous else None


def _unlike(facts: Facts) -> str | None:
    return f"pipeline {facts.plan.pipeline} of unlike blocks" if facts.unlike else None


def _copied(facts: Facts) -> str | None:
    return f"pipeline {facts.plan.pipeline}" if facts.copied else None


def _newest_weights(facts: Facts) -> str | None:
    pipeline = facts.plan.pipeline
    return f"pipeline {pipeline}" if pipeline is not None and not facts.plan.asynchronous else None


def _own_weights(facts: Facts) -> str | None:
    """A pipeline whose backwards read the weights of their forwards."""
    pipeline = facts.plan.pipeline
    return f"pipeline {pipeline}" if pipeline is not None and pipeline.name != "pipemare" else None


def _codec(facts: Facts) -> str | None:
    return f"reduce {facts.plan.reduce}" if isinstance(facts.plan.reduce, NamedCodec) else None


def _codec_beside_one_bit(facts: Facts) -> str | None:
    """A codec other than the one that takes a one-bit optimizer's momenta."""
    experiment, reduce = facts.experiment, facts.plan.reduce
    messages = None if experiment is None else experiment.optimizer.messages(experiment.steps)
    takes_them = messages is not None and str(reduce) == f"onebit,start={messages.freeze}"
    return None if takes_them else changed("reduce")(facts)


def _diloco(facts: Facts) -> str | None:
    return None if facts.plan.diloco is None else f"diloco {facts.plan.diloco}"


def _one_bit(facts: Facts) -> str | None:
    """An optimizer whose replicas send momenta."""
    experiment = facts.experiment
    sends = experiment is not None and experiment.optimizer.messages(experiment.steps) is not None
    return f"optimizer {experiment.optimizer.name}" if experiment is not None and sends else None


def _zero(facts: Facts) -> str | None:
    return f"zero {facts.plan.zero}" if facts.plan.zero else None


def _microbatches(facts: Facts) -> str | None:
    return f"microbatches {facts.plan.microbatches}" if facts.plan.microbatches > 1 else None


def _memory(*rules: str) -> Request:
    def request(facts: Facts) -> str | None:
        return f"memory {facts.plan.memory}" if facts.plan.memory.rule in rules else None

    return request


def _memory_of_sequences(facts: Facts) -> str | None:
    memory: MemoryPlan = facts.plan.memory
    return None if memory.rule in ("none", "dots", "full", "jax") else f"memory {memory}"


def _keeps_weights(facts: Facts) -> str | None:
    return f"memory {facts.plan.memory}" if facts.plan.memory.name == "everything_saveable" else None


def _host_updates_by_slices(facts: Facts) -> str | None:
    """State or weights on the host whose updates are made on the device, slice by slice."""
    plan = facts.plan
    if plan.optimizer_state == "host" or (plan.weights == "device" and plan.optimizer_state == "device"):
        return None
    places = {name: getattr(plan, name) for name in ("weights", "gradients", "optimizer_state")}
    return ", ".join(f"{name} {place}" for name, place in places.items() if place != "device")


def _scores_named(facts: Facts) -> str | None:
    return f"kernels {facts.plan.kernels}" if facts.plan.scores in ("tpu", "reference") else None


def _attention_named(facts: Facts) -> str | None:
    return f"kernels {facts.plan.kernels}" if facts.plan.kernels.of("attention") != "auto" else None


def _model_state(facts: Facts) -> str | None:
    return f"a model that holds state of its own ({', '.join(facts.state[:3])})" if facts.state else None


def _foreign(facts: Facts) -> str | None:
    model = None if facts.experiment is None else facts.experiment.model
    return "a model of layers that are not ours" if getattr(model, "foreign", False) else None


def _foreign_over_tensor(facts: Facts) -> str | None:
    return (
        f"{_foreign(facts)} and tensor:{facts.size('tensor')}" if _foreign(facts) and along("tensor")(facts) else None
    )


def _meets_before_the_end(facts: Facts) -> bool | None:
    """Whether DiLoCo's replicas meet before the end of the run."""
    plan, experiment = facts.plan, facts.experiment
    return None if experiment is None or plan.diloco is None else plan.diloco.every <= experiment.steps


def _has(axis: str) -> Callable[[Facts], bool | None]:
    def met(facts: Facts) -> bool | None:
        size = facts.size(axis)
        return None if size is None else size > 1

    return met


def _fsdp(facts: Facts) -> bool | None:
    """Whether there is an fsdp axis; one device alone has another way round."""
    return None if facts.plan.mesh is not None and facts.plan.mesh.devices == 1 else _has("fsdp")(facts)


def _not_alone(facts: Facts) -> bool | None:
    return None if facts.plan.mesh is None else facts.plan.mesh.devices > 1


def _without_pipeline(facts: Facts) -> str | None:
    """Fields that mean something beside a pipeline alone."""
    from jaxscale.step.plan import OF_A_PIPELINE

    plan = facts.plan
    if plan.pipeline is not None:
        return None
    return next((text for text in (changed(name)(facts) for name in OF_A_PIPELINE) if text), None)


_weights_host, _gradients_host = field("weights", "host"), field("gradients", "host")
_state_host, _state_off = field("optimizer_state", "host"), field("optimizer_state", "host", "streamed")
_split, _residuals = field("master", "split"), field("stash", "residuals")

ONE_COPY = "its stages update copies of their own on the device, in the middle of a step"
OF_THE_WHOLE_BATCH = "batch statistics and generators are of the whole batch, and each replica would have its own"
LOOK_UPS = "XLA aborts on look-ups of such layers there"

RULES: tuple[Rule, ...] = (
    # what needs an axis of the mesh, or a pipeline
    Needs(
        _zero,
        _not_alone,
        "it shards over the fsdp axis, and mesh {mesh} has none",
        "take fsdp:N, leave mesh out to take all devices, or zero 0",
    ),
    Needs(_zero, _fsdp, "it shards over the fsdp axis, and mesh {mesh} has none", "add fsdp:N"),
    Needs(
        field("sequence_parallel", True),
        _has("tensor"),
        "it shards over the tensor axis, and mesh {mesh} has none",
        "add tensor:N",
    ),
    Needs(
        _codec,
        _has("replica"),
        "a codec reduces over the replica axis, and mesh {mesh} has none",
        "name the slow axis replica:N, or leave reduce out",
    ),
    Needs(
        _diloco,
        _has("replica"),
        "replicas train alone and meet over the replica axis, and mesh {mesh} has none",
        "name the slow axis replica:N, or leave diloco out",
    ),
    Needs(
        _one_bit,
        _has("replica"),
        "its momenta cross the replica axis, and mesh {mesh} has none",
        "name the slow axis replica:N, or take {plain}",
    ),
    Needs(
        along("pipe"),
        lambda facts: facts.plan.pipeline is not None,
        "nothing specifies what the devices along pipe do",
        "add a pipeline such as 1f1b:4x16",
    ),
    Needs(_without_pipeline, lambda facts: False, "there is no pipeline", "add one, or leave it out"),
    # numbers
    Needs(
        field("reduce", "bfloat16"),
        lambda facts: facts.plan.precision == "bfloat16",
        "what is computed in float32 is reduced in float32",
        "add precision bfloat16, or leave reduce out",
    ),
    Needs(
        _split,
        lambda facts: facts.plan.precision == "bfloat16",
        "its weights are bfloat16, which the passes read, and precision is {precision}",
        "add precision bfloat16, or take master float32",
    ),
    Excludes(
        _split,
        field("reduce", "float32"),
        "gradients of bfloat16 weights are bfloat16",
        "leave reduce out, or take master float32",
    ),
    # host memory
    Needs(
        _gradients_host,
        lambda facts: facts.plan.weights == "host",
        "they go there from weights that come from there",
        "add weights host",
    ),
    Excludes(
        _gradients_host,
        _microbatches,
        "nothing adds up the gradients of several microbatches there",
        "take gradients device, or microbatches 1",
    ),
    Excludes(
        _gradients_host,
        _pipeline,
        "nothing adds up the gradients of its microbatches there",
        "take gradients device, or leave the pipeline out",
    ),
    *(
        Excludes(
            _split,
            place,
            "what is on the host there is the float32 weights, which split weights do without",
            "leave one out",
        )
        for place in (_weights_host, _state_host)
    ),
    Excludes(
        _keeps_weights,
        _weights_host,
        "it keeps every weight that was fetched on the device",
        "take memory none, which keeps all else",
    ),
    Excludes(
        _memory("sqrt", "periodic", "revolve", "chain"),
        _weights_host,
        "segments of several blocks are cut out of the stacked weights, which would bring all of them to the device at "
        "once",
        "take save:BYTES of at least the blocks' inputs, none, dots or full",
    ),
    Excludes(
        _weights_host,
        _foreign,
        "weights are streamed to the blocks of layers.Stack and layers.Chain",
        "take optimizer_state streamed or host",
    ),
    Needs(
        _host_updates_by_slices,
        lambda facts: facts.mixing is None,
        "this optimizer's update mixes elements of a tensor ({mixing}), so it can't be run slice by slice",
        "take adamw, lion or sgd, or optimizer_state host, or keep the state on the device",
    ),
    # what replicas send
    Excludes(
        _codec,
        _gradients_host,
        "a codec takes the gradients of a whole step on the device, and gradients on the host come block by block",
        "take gradients device, or leave reduce out",
    ),
    Excludes(_codec, _model_state, OF_THE_WHOLE_BATCH, "leave reduce out, or take a model without"),
    Excludes(_codec, _foreign_over_tensor, LOOK_UPS, "take a mesh without tensor"),
    Excludes(
        _one_bit,
        _codec_beside_one_bit,
        "it sends momenta in one bit, and no gradients that reduce could be for",
        "leave reduce out",
    ),
    *(
        Excludes(
            _one_bit,
            place,
            "replicas send what their momentum on the device becomes, and an update from the host is made slice by "
            "slice",
            "keep it on the device",
        )
        for place in (_weights_host, _state_off)
    ),
    Excludes(
        _diloco,
        _one_bit,
        "its replicas exchange momenta in every step",
        "take adamw inside, or leave diloco out",
    ),
    Needs(
        _diloco,
        _meets_before_the_end,
        "the run has {steps} steps, so replicas would meet once, at its end",
        "meet more often, or leave diloco out",
    ),
    Excludes(
        _diloco,
        _weights_host,
        "each replica has weights of its own, on the device",
        "take weights device, or leave diloco out",
    ),
    Excludes(
        _diloco,
        _state_host,
        "the host would update each replica's own weights, which lie on the device",
        "take optimizer_state streamed, or leave diloco out",
    ),
    Excludes(_diloco, _split, "ways back are taken of float32 weights", "take master float32"),
    Excludes(_diloco, _model_state, OF_THE_WHOLE_BATCH, "leave diloco out, or take a model without"),
    Excludes(_diloco, _foreign_over_tensor, LOOK_UPS, "take a mesh without tensor"),
    # pipelines
    *(
        Excludes(
            changed(name),
            _newest_weights,
            "its gradients are of the newest weights",
            "leave it out, or take pipemare:P",
        )
        for name in ("anneal", "correction", "synchronous_steps")
    ),
    Excludes(
        lambda facts: changed("correction")(facts) if facts.plan.correction else None,
        _own_weights,
        "its backwards read the weights of their forwards",
        "leave it out, or take pipemare:P",
    ),
    Excludes(field("lowering", "phased"), _asynchronous, "its ticks mix kinds", "leave it out"),
    Excludes(
        _weights_host,
        _copied,
        "two devices have each stage, and its weights go from one to the other in every step",
        "take another pipeline, or weights device",
    ),
    # asynchronous pipelines
    Excludes(
        _split, _asynchronous, "its stages keep older weights whole", "take master float32, or a synchronous pipeline"
    ),
    Excludes(_weights_host, _asynchronous, ONE_COPY, "take weights device, or a synchronous pipeline"),
    Excludes(
        _state_off,
        _asynchronous,
        "a stage updates in the middle of a step, where nothing comes from the host",
        "leave it out, or take a synchronous pipeline",
    ),
    Excludes(
        _zero,
        _asynchronous,
        "a stage updates in the middle of a step, with weights and optimizer state of its own, whole on its device",
        "take zero 0, or a synchronous pipeline",
    ),
    Excludes(
        lambda facts: _codec(facts) if along("tensor")(facts) else None,
        _asynchronous,
        "stages reduce when they update, each in a branch of its own, in which XLA would move parts of a gradient over "
        "tensor, and devices of other stages never come",
        "take a mesh without tensor, or a synchronous pipeline",
    ),
    Excludes(
        _one_bit,
        _asynchronous,
        "replicas send momenta once, after a step, and a stage updates in the middle of it",
        "take a synchronous pipeline, or {plain}",
    ),
    Excludes(
        _diloco,
        _asynchronous,
        f"{ONE_COPY}, and replicas meet between steps",
        "take a synchronous pipeline, or leave diloco out",
    ),
    Excludes(
        lambda facts: _memory("offload")(facts) if facts.plan.stash == "residuals" else None,
        _asynchronous,
        "what its stages keep is in flight from step to step, and lies on the device",
        "add stash input, with which a stage offloads within its backward, or take a synchronous pipeline",
    ),
    Needs(
        _asynchronous,
        lambda facts: facts.mixing is None,
        "this optimizer's update mixes elements of a tensor ({mixing}), and a stage has some layers of each alone",
        "take adamw, lion or sgd, or a synchronous pipeline",
    ),
    # pipelines of unlike blocks
    Excludes(_unlike, _asynchronous, "its stages have no updates of their own", "take a synchronous one"),
    Excludes(_residuals, _unlike, "what a stage keeps has shapes of its own, and slots are alike", "add stash input"),
    *(
        Excludes(
            along(axis),
            _unlike,
            f"a stage's weights travel as one flat array, which nothing splits over {axis}",
            "take data or fsdp in its place",
        )
        for axis in ("tensor", "sequence")
    ),
    Excludes(
        field("zero", 3), _unlike, "a stage's weights travel as one flat array, whole on its device", "take zero 2"
    ),
    Excludes(
        _weights_host,
        _unlike,
        "a stage's weights travel as one flat array, whole on its device",
        "take weights device, or optimizer_state host",
    ),
    Excludes(_codec, _unlike, "codecs are made for weights that stages have", "leave it out"),
    Excludes(
        _memory_of_sequences,
        _unlike,
        "it looks at all blocks in sequence, and a stage has some",
        "take none, dots or full",
    ),
    # two ways to ask for the same
    Excludes(field("attention", "plain", "chunked", "splash"), _attention_named, "both choose it", "leave one out"),
    Excludes(changed("loss_chunk"), _scores_named, "its cross_entropy takes no chunk", "leave one out"),
)
"""Every rule, in the order in which a combination is checked."""
