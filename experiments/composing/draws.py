"""Random combinations of techniques, drawn from the dataclasses' own fields.

A technique is a field of `Plan` with another value than its default, an axis of the mesh, or the optimizer's name. What
a field may hold is read off its type (`Literal`, `bool`, numbers) or off the registry behind its text form (schedules,
codecs, memory rules, kernels), so that a new field, schedule, codec or rule is drawn without being added here. A field
of a type that nobody can draw is an error.
"""

import dataclasses
import functools
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from jaxscale.errors import UserError
from jaxscale.memory.chain_decision import CHAIN_RULES
from jaxscale.memory.plan import FORMS as MEMORY_FORMS
from jaxscale.memory.plan import POLICIES, MemoryPlan, Selector
from jaxscale.optim.optimizer import Optimizer
from jaxscale.pipeline.plan import OPTIONS as PIPELINE_OPTIONS
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.pipeline.plan import forms as pipeline_forms
from jaxscale.pipeline.schedules import METHODS
from jaxscale.platforms.compiler_options import CompilerOptions
from jaxscale.recipe.kernels import KNOWN, PLATFORMS, Kernels
from jaxscale.recipe.plan import Plan
from jaxscale.replicas.codec import Codec
from jaxscale.replicas.codecs import CODECS
from jaxscale.replicas.low_communication import Diloco
from jaxscale.replicas.named import NamedCodec
from jaxscale.sharding.mesh import AXES
from jaxscale.values import parse
from jaxscale.values.annotations import alternatives, field_types, is_record

DEVICES = 8
LAYERS = 8
"""Blocks of the model: stages of the deepest schedule that is drawn, two a device."""
OPTIONS = PIPELINE_OPTIONS[1:]
"""Options of a pipeline that are techniques of their own; stages a device are part of its schedule."""
EXCLUDED = ("custom", "file", "fit", "splash")
"""Values that need a file, a callable, a limit or another platform, by name."""
WIDTH = 32
"""Of the model's residual stream."""
FROZEN_SHARE = 0.1
"""Share of the combinations without a pipeline and weights on the host in which a part of the parameters is trained."""
GROUPED_SHARE = 0.1
"""Share of the combinations in which the weights of the MLP have a rule of their own."""
SCHEDULE_SHARE = 0.1
"""Share of the combinations in which a function returns the learning rate."""
WINDOWS_SHARE = 0.2
"""Share of the combinations in which every other block attends within a window, so that blocks repeat in cycles."""
OWN_LAYERS_SHARE = 0.25
"""Share of the combinations in which the feed-forward layers are a user's own, whose activations nothing places."""
GROUPS = '{"mlp": {"name": "sgd", "momentum": 0.9, "learning_rate": 0.01}}'
SGD = {
    "optimizer.name": "sgd",
    "optimizer.momentum": "0.9",
    "optimizer.learning_rate": "0.01",
    "optimizer.clip": "None",
}
"""SGD with momentum, whose step is as long as the gradient: a wrong scale shows in the losses."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """One combination.

    Args:
        techniques: text by dotted path of a field of `Experiment`, as on the command line.
        length: positions of a row.
        rows: of a device and microbatch.
        packed: rows hold several documents.
        dropout: rate of the model's.
        seed: of weights and batches.
        batch: rows of the global batch; `None`: what `rows` comes to.
        has_own_schedule: the learning rate is what a function returns, which falls from that of the draw.
        has_windows: every other block attends within a window.
        has_own_layers: the feed-forward layers are a user's own.
    """

    techniques: tuple[tuple[str, str], ...]
    length: int = 64
    rows: int = 1
    packed: bool = False
    dropout: float = 0.0
    seed: int = 0
    batch: int | None = None
    has_own_schedule: bool = False
    has_windows: bool = False
    has_own_layers: bool = False

    @property
    def plan(self) -> dict[str, str]:
        """The changes of the plan, by field."""
        return {path.removeprefix("plan."): text for path, text in self.techniques if path.startswith("plan.")}

    @property
    def optimizer(self) -> dict[str, str]:
        """The changes of the optimizer, by field."""
        return {path.removeprefix("optimizer."): text for path, text in self.techniques if path.startswith("optimizer")}

    def __str__(self) -> str:
        flags = " ".join(f"--{path.replace('_', '-')} {text}" for path, text in self.techniques)
        extras = f"length {self.length}, rows {self.rows}"
        extras += ", own schedule" * self.has_own_schedule + ", windows" * self.has_windows
        extras += ", own layers" * self.has_own_layers
        extras += ", packed" * self.packed + f", dropout {self.dropout}" * (self.dropout > 0)
        return f"{flags} ({extras})"


def draw(seed: int, index: int) -> Draw:
    """The combination number `index` of a seed: 3 to 6 techniques, and what they need.

    Example:
        >>> draw(0, 3) == draw(0, 3), draw(0, 3) == draw(0, 4)
        (True, False)
    """
    rng = random.Random(f"{seed}/{index}")
    count = rng.randint(3, 6)
    sizes = _sizes(rng, rng.sample(AXES_DRAWN, k=min(count - 1, rng.choice((0, 1, 1, 2, 2, 3)))))
    techniques: dict[str, str] = {}
    if rng.random() < 0.45:
        techniques["plan.pipeline"] = drawn_pipeline(rng)
        if rng.random() < 0.3:
            name = rng.choice(OPTIONS)
            text = _value(rng, option_texts(name))
            techniques["plan.pipeline"] = with_options(
                _for_option(techniques["plan.pipeline"], name, rng), **{name: text}
            )
    free = [one for one in TECHNIQUES if one[0] != "plan.pipeline"]
    while len(sizes) + len(techniques) < count:
        name, text = rng.choice(free)
        techniques.setdefault(name, _value(rng, [text]))
    other = {"optimizer.name": rng.choice(OPTIMIZERS), "optimizer.learning_rate": "0.003"}
    techniques |= SGD if rng.random() < 0.5 else other
    is_whole = "plan.pipeline" not in techniques and techniques.get("plan.offload.weights") != "host"
    if is_whole and random.Random(f"{seed}/{index}/train").random() < FROZEN_SHARE:
        techniques["optimizer.train"] = "attention|up"
    if random.Random(f"{seed}/{index}/groups").random() < GROUPED_SHARE:
        techniques["optimizer.groups"] = GROUPS
    long = rng.random() < 0.08
    one = Draw(
        tuple(sorted(completed(without_conflicts(techniques, rng), sizes, rng).items())),
        length=2048 if long else 64,
        rows=1 if long else rng.choice((1, 2, 3)),
        packed=rng.random() < 0.25,
        dropout=0.1 if rng.random() < 0.2 else 0.0,
        seed=index,
        has_own_schedule=_has_own_schedule(seed, index, techniques),
    )
    if long and _streams(techniques):  # a pipe takes a dozen steps to fill, and each of its twins as many
        one = dataclasses.replace(one, length=64)
    # a budget means something beside what blocks' inputs take, and a segment beside the blocks of a stage
    inputs = one.rows * one.length * WIDTH * 4 * LAYERS // 1024
    pipeline = one.plan.get("pipeline")
    if pipeline is not None:
        plan = PipelinePlan.parse(pipeline)
        inputs *= 8 if plan.name == "auto" else plan.shape()[1]
    words = {"BYTES": f"{int(inputs * rng.choice((1.1, 2.0, 5.0)))}KiB"}
    words |= {} if pipeline is None else {"periodic:3": "periodic:2"}
    changed = one.techniques
    for word, text in words.items():
        changed = tuple((path, value.replace(word, text)) for path, value in changed)
    one = dataclasses.replace(one, techniques=changed)
    has_windows = random.Random(f"{seed}/{index}/windows").random() < WINDOWS_SHARE
    has_own_layers = random.Random(f"{seed}/{index}/own layers").random() < OWN_LAYERS_SHARE
    has_windows = has_windows and _may_cycle(one.plan)
    return dataclasses.replace(one, has_windows=has_windows, has_own_layers=has_own_layers)


def _may_cycle(plan: Mapping[str, str]) -> bool:
    """Whether blocks may repeat in cycles of two: each stage has one, and no rule is for a chain of alike blocks."""
    if MemoryPlan.parse(plan.get("memory", "none")).rule in set(CHAIN_RULES) - {"none", "full"}:
        return False
    pipeline = PipelinePlan.parse(plan["pipeline"]) if "pipeline" in plan else None
    return pipeline is None or pipeline.name == "auto" or 2 * pipeline.schedule().stages <= LAYERS


def techniques() -> list[tuple[str, Any]]:
    """Every technique that can be drawn, as a field and a text, or a function that draws one: a row a value.

    Raises:
        TypeError: a field of the plan has a type whose values cannot be drawn.
    """
    rows: list[tuple[str, Any]] = [("plan.rules.mlp", "()")]
    for name, hint in field_types(Plan).items():
        if name in ("mesh", "rules"):
            continue
        default = getattr(Plan, name)
        if is_record(default):
            for inner, of_inner in field_types(type(default)).items():
                texts = _texts(of_inner, getattr(default, inner))
                rows += [(f"plan.{name}.{inner}", text) for text in texts]
            continue
        rows += [(f"plan.{name}", text) for member in alternatives(hint) for text in _texts(member, default)]
    return rows


def option_texts(name: str) -> list[Any]:
    """Texts of an option of a pipeline, or functions that draw one."""
    hint, default = field_types(PipelinePlan)[name], getattr(PipelinePlan, name)
    return [text for member in alternatives(hint) for text in _texts(member, default)]


def with_options(pipeline: str, **options: str) -> str:
    """The text of a pipeline with some options, in place of those that it has.

    Example:
        >>> with_options("1f1b:2x4,stash=input", stash="residuals", lowering="phased")
        '1f1b:2x4,lowering=phased'
    """
    hints = field_types(PipelinePlan)
    values = {name: parse(text.replace("+", ","), hints[name], name) for name, text in options.items()}
    return str(dataclasses.replace(PipelinePlan.parse(pipeline), **values))


def _for_option(pipeline: str, name: str, rng: random.Random) -> str:
    """A schedule for which an option means something."""
    if name in ("anneal", "correction"):
        return "pipemare:2"
    if name == "synchronous_steps" and not PipelinePlan.parse(pipeline).asynchronous:
        return "2bw:2x4"
    return rng.choice(("gpipe:2x4", "lockstep:2x4")) if name == "lowering" else pipeline


def _texts(hint: Any, default: Any) -> list[Any]:
    """Texts of the values of a type, other than the default, or functions that draw one.

    Raises:
        TypeError: nothing here can draw a value of the type.
    """
    if hint is type(None):
        return []
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint) if value != default and value not in EXCLUDED]
    if hint is bool:
        return [str(not default)]
    if hint is int:
        return [lambda rng: str(rng.choice((2, 4, 8)))]
    if hint is float:
        return [lambda rng: rng.choice(("0.05", "0.25", "0.5"))]
    if hint not in VALUES:
        raise TypeError(f"got a field of type {hint}, expected one of those whose values can be drawn")
    return VALUES[hint]()


def _value(rng: random.Random, texts: Sequence[Any]) -> str:
    text = rng.choice(texts)
    return text if isinstance(text, str) else text(rng)


def _sizes(rng: random.Random, axes: Sequence[str]) -> dict[str, int]:
    """Devices along each axis, at most `DEVICES` together."""
    sizes: dict[str, int] = {}
    product = 1
    for axis in axes:
        size = rng.choice((2, 2, 2, 4))
        if product * size > DEVICES:
            size = 2
        if product * size <= DEVICES:
            sizes[axis] = size
            product *= size
    return sizes


def completed(techniques: Mapping[str, str], sizes: Mapping[str, int], rng: random.Random) -> dict[str, str]:
    """The techniques with what they need, and the mesh: none is left out.

    Args:
        techniques: text by dotted path.
        sizes: devices along each axis; they are halved where these and what is needed are too many.
        rng: chooses which.
    """
    techniques, sizes = with_needs(techniques, rng), dict(sizes)
    least = axes_needed(techniques)
    sizes = {**least, **sizes}
    pipeline = techniques.get("plan.pipeline")
    ranks = 1 if pipeline is None else PipelinePlan.parse(pipeline).ranks or 1
    while ranks * math.prod(sizes.values()) > DEVICES:
        free = [axis for axis in sizes if sizes[axis] > 2] or [axis for axis in sizes if axis not in least]
        axis = rng.choice(free)
        sizes[axis] //= 2
        if sizes[axis] == 1:
            del sizes[axis]
    techniques["plan.mesh"] = ",".join(f"{axis}:{sizes[axis]}" for axis in AXES if axis in sizes) or "1"
    return techniques


ONE_BIT_NEEDS = {"optimizer.freeze": "1", "optimizer.learning_rate": "0.003", "optimizer.eps": "0.01"}
"""In bits from the second update on. The variance is estimated from one gradient: without eps signs go far."""


def with_needs(techniques: Mapping[str, str], rng: random.Random) -> dict[str, str]:
    """The techniques, and those that they need."""
    techniques = dict(techniques)
    kernel = techniques.get("plan.kernels", "").partition("=")[0]
    techniques |= KERNEL_NEEDS.get(kernel, {})
    if techniques["optimizer.name"].startswith("one_bit"):
        techniques |= ONE_BIT_NEEDS
    if techniques.get("plan.offload.gradients") == "host":
        techniques["plan.offload.weights"] = "host"
    if techniques.get("plan.offload.weights") == "host" and techniques["optimizer.name"] in WHOLE:
        techniques.setdefault("plan.offload.optimizer_state", "host")
    if techniques.get("plan.state.master") == "split" or techniques.get("plan.reduce") == "bfloat16":
        techniques["plan.precision"] = "bfloat16"
    pipeline = techniques.get("plan.pipeline")
    if pipeline is not None and PipelinePlan.parse(pipeline).stages is not None:
        plan = PipelinePlan.parse(pipeline)
        stages = 2 if plan.name == "auto" else plan.schedule().stages
        techniques["plan.pipeline"] = with_options(pipeline, stages="+".join(map(str, _parts(rng, LAYERS, stages))))
    if _streams(techniques) and techniques.get("plan.memory", "").startswith("offload"):
        techniques["plan.pipeline"] = with_options(techniques["plan.pipeline"], stash="input")
    return techniques


def _streams(techniques: Mapping[str, str]) -> bool:
    """Whether the pipeline is asynchronous."""
    return PipelinePlan.parse(techniques.get("plan.pipeline", "gpipe:2x2")).asynchronous


def axes_needed(techniques: Mapping[str, str]) -> dict[str, int]:
    """The axes that techniques shard or reduce over, and the fewest devices along each."""
    codec = techniques.get("plan.reduce") not in (None, "float32", "bfloat16")
    replicated = codec or "plan.diloco" in techniques or techniques["optimizer.name"].startswith("one_bit")
    wanted = {
        "replica": replicated,
        "fsdp": "plan.zero" in techniques,
        "tensor": "plan.sequence_parallel" in techniques,
    }
    return {axis: 2 for axis, is_wanted in wanted.items() if is_wanted}


def without_conflicts(techniques: Mapping[str, str], rng: random.Random) -> dict[str, str]:
    """A drawn combination without what asks for the same twice, or means nothing beside the rest.

    These are refused too, and `tests/recipe/test_combinations.py` has them; a draw has better to do.
    """
    techniques = dict(techniques)
    if techniques["optimizer.name"].startswith("one_bit") and {"plan.reduce", "plan.diloco"} & set(techniques):
        techniques["optimizer.name"] = "adamw"  # each specifies what replicas send
    if techniques.get("plan.kernels", "").partition("=")[0] == "adam8":
        techniques.pop("optimizer.momentum", None)
        techniques.pop("optimizer.groups", None)  # one rule for all parameters
    if techniques["optimizer.name"].startswith("one_bit"):
        techniques.pop("optimizer.groups", None)
    pipeline = techniques.get("plan.pipeline")
    if pipeline is not None:
        techniques.pop("plan.microbatches", None)
    ranks = 1 if pipeline is None else PipelinePlan.parse(pipeline).ranks or 1
    for field in ("plan.sequence_parallel", "plan.zero"):
        if ranks * math.prod(axes_needed(with_needs(techniques, rng)).values()) > DEVICES:
            techniques.pop(field, None)
    return techniques


def _has_own_schedule(seed: int, index: int, techniques: Mapping[str, str]) -> bool:
    """Whether a function returns the learning rate of a draw; one rule keeps its rate constant."""
    is_drawn = random.Random(f"{seed}/{index}/schedule").random() < SCHEDULE_SHARE
    return is_drawn and techniques["optimizer.name"] != "schedule_free"


def _parts(rng: random.Random, total: int, count: int) -> list[int]:
    """`count` whole numbers >= 1 that add up to `total`."""
    cuts = sorted(rng.sample(range(1, total), count - 1)) if count <= total else list(range(1, count))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]


def drawn_pipeline(rng: random.Random) -> str:
    """The text of a schedule on 2 or 4 devices."""
    name = rng.choice([name for name in pipeline_forms() if name not in EXCLUDED])
    ranks = rng.choice((2, 2, 4))
    if name not in METHODS:
        return f"{name}:{ranks}"
    method = METHODS[name]
    microbatches = rng.choice((ranks, 2 * ranks, 2 * ranks))
    if name == "zb-h2" or name == "zb-v":
        microbatches = 2 * ranks
    size = f"{ranks}" if method.streams else f"{ranks}x{microbatches}"
    return f"{name}:{size}" + (",v=2" if method.interleaves and rng.random() < 0.5 else "")


def memory_rules() -> list[Any]:
    """A function for each memory rule, and for each selector of offload, made of the rule's form."""
    rows = []
    for rule, form in MEMORY_FORMS.items():
        if rule == "none" or rule in EXCLUDED:
            continue
        for selector in get_args(Selector) if "SELECTOR" in form else ("",):
            rows.append(functools.partial(_memory_text, form.replace("SELECTOR", selector)))
    return rows


def _memory_text(form: str, rng: random.Random) -> str:
    if rng.random() < 0.5:
        form = re.sub(r"\[.*\]", "", form)
    form = re.sub(r"[\[\]]", "", form)
    policies = [policy for policy in POLICIES if policy != "everything_saveable"]
    words = {
        "POLICY": policies,
        "SLOTS": ("1", "2", "4"),
        "K": ("2", "3"),
        "flop|seconds": ("flop",),
    }  # a CPU's rates are unknown
    for word, options in words.items():
        form = re.sub(rf"(?<=:){re.escape(word)}(?![A-Z])", rng.choice(options), form)
    return form


def _codec_text(codec: type[Codec], rng: random.Random) -> str:
    """The text of a codec, with some of its options, as far as it takes them."""
    hints = field_types(codec)
    defaults = {field.name: field.default for field in dataclasses.fields(codec)}
    text = codec.name
    if codec.value is not None:
        text += f":{rng.choice(CODEC_VALUES[codec.value])}{codec.unit}"
    for name, hint in hints.items():
        if bool in alternatives(hint) and rng.random() < 0.3:
            text += f",{name}={str(not defaults[name]).lower()}"
    text += ",start=1" if rng.random() < 0.2 else ""
    text += ",warmup=0" if "warmup" in hints and rng.random() < 0.5 else ""
    try:
        NamedCodec.parse(text)
    except UserError:
        return text.partition(",")[0]
    return text


def kernel_choices() -> list[Any]:
    """Choices of kernels that run everywhere, and functions that draw a chunk of the loss, as many as for attention."""
    pairs = [f"{kernel}={one}" for kernel, names in KNOWN.items() for one in names if one not in PLATFORMS]
    return ["reference", *pairs, *(lambda rng: f"loss_chunk={rng.choice((2, 4, 8))}" for _ in range(3))]


VALUES: dict[Any, Callable[[], list[Any]]] = {
    PipelinePlan: lambda: [drawn_pipeline],
    MemoryPlan: memory_rules,
    NamedCodec: lambda: [functools.partial(_codec_text, codec) for codec in CODECS.values()],
    Diloco: lambda: [lambda rng: f"every={rng.choice((1, 2, 2))}" + (",momentum=0" if rng.random() < 0.3 else "")],
    Kernels: kernel_choices,
    CompilerOptions: lambda: ["overlap", "overlap,xla_llvm_disable_expensive_passes=true"],
    tuple[int, ...]: lambda: ["1"],  # layers of each stage, which `with_needs` counts
}
"""Texts of the types with a grammar of their own, or functions that draw one."""
KERNEL_NEEDS = {
    "adam8": {"plan.state.moments": "int8", "optimizer.name": "adamw", "optimizer.learning_rate": "0.003"},
    "quantize": {"plan.reduce": "int8"},
    "top_k": {"plan.reduce": "topk:0.25,warmup=0"},
}
"""What takes a kernel that is named."""
WHOLE = ("adafactor", "muon", "soap", "galore")
"""Optimizers whose updates are of whole tensors: the host makes those of weights that lie there."""
CODEC_VALUES: dict[str, Sequence[str]] = {"rank": ("1", "4"), "fraction": ("0.05", "0.25"), "bits": ("4", "8")}
"""What stands behind a codec's colon, by the field's name."""
TECHNIQUES = techniques()
"""Every technique, a row a value."""
AXES_DRAWN = [axis for axis in AXES if axis not in ("pipe", "expert")]
"""Axes of the mesh that are techniques of their own: pipe is a pipeline's, and no model here has experts."""
OPTIMIZERS = [name for name in get_args(field_types(Optimizer)["name"]) if name != "sgd"]
"""Every rule but the one of half of the draws."""
