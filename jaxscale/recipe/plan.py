"""Plan: how to train, as a value. Everything that changes speed and memory and should not change the result is here."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.recipe.combinations import check
from jaxscale.recipe.kernels import AUTO, Kernels
from jaxscale.recipe.plan_json import MOVED, OF_PIPELINE, upgraded
from jaxscale.recipe.requests import Facts
from jaxscale.replicas.diloco import Diloco
from jaxscale.replicas.named import NamedCodec
from jaxscale.scoped import scoped
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.sharding.rules import AxisRules
from jaxscale.values import check_types, from_json, read_json, to_json

T = TypeVar("T")
PLAN_VERSION = 2
"""Written to plan.json; a file of a newer version is refused by name, and one of version 1 is read."""


@dataclasses.dataclass(frozen=True)
class OffloadPlan:
    """Tensors in host memory.

    Args:
        weights: those that the passes read: on the device, or on the host, from where each block's come when it runs
            (L2L, ZeRO-Infinity).
        gradients: of streamed weights; the host's are read back slice by slice.
        optimizer_state: on the device; on the host and "streamed" through it in slices (ZeRO-Infinity); or on the
            "host", where its CPU updates it and the float32 weights (ZeRO-Offload).

    Example:
        >>> str(OffloadPlan(weights="host", optimizer_state="streamed"))
        'weights host, optimizer_state streamed'
    """

    weights: Literal["device", "host"] = "device"
    gradients: Literal["device", "host"] = "device"
    optimizer_state: Literal["device", "streamed", "host"] = "device"

    def __post_init__(self) -> None:
        check_types(self)

    def __str__(self) -> str:
        places = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return ", ".join(f"{name} {place}" for name, place in places.items() if place != "device")

    @property
    def masters(self) -> bool:
        """Whether the float32 weights lie on the host between steps."""
        return self.weights == "host" or self.optimizer_state == "host"

    @property
    def any(self) -> bool:
        """Whether weights or optimizer state lie on the host."""
        return self.masters or self.optimizer_state != "device"


@dataclasses.dataclass(frozen=True)
class StatePlan:
    """Numbers that an optimizer keeps between steps.

    Args:
        moments: int8 (softsign and square-root companding), dynamic8 (Dettmers' map), int4, fp8, in blocks with a
            scale; embeddings, heads, norms and small arrays stay float32.
        master: float32 weights; or "split": the bfloat16 that passes read, and 8 bits of correction.
    """

    moments: Literal["float32", "int8", "dynamic8", "int4", "fp8"] = "float32"
    master: Literal["float32", "split"] = "float32"

    def __post_init__(self) -> None:
        check_types(self)


_superseded: contextvars.ContextVar[bool] = contextvars.ContextVar("superseded", default=False)


def superseded() -> contextlib.AbstractContextManager[None]:
    """Inside, plans in the form of version 1 are made without their fields that have moved: another plan takes over.

    The file of an earlier run makes its plan so, and the plan that ran is in plan.json.
    """
    return scoped(_superseded, True)


def _refusing_moved(cls: type[T]) -> type[T]:
    """A class whose fields of version 1 are refused with the new ones named."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: T, *args: Any, **fields: Any) -> None:
        moved = [name for name in MOVED if name in fields and (name != "state" or isinstance(fields[name], str))]
        if moved and not _superseded.get():
            raise UserError(f"plan.{moved[0]} has moved: set plan.{MOVED[moved[0]]}")
        init(self, *args, **{name: value for name, value in fields.items() if name not in moved})

    cls.__init__ = checked
    return cls


@_refusing_moved
@dataclasses.dataclass(frozen=True)
class Plan:
    """A record of techniques.

    Args:
        mesh: devices per axis, such as "data:2,fsdp:4"; `None` takes the most local devices that divide the batch.
        zero: ZeRO stage over the fsdp axis: 1 shards optimizer state, 2 gradients too, 3 parameters too.
        sequence_parallel: Megatron's: norms and residuals are sharded over the tensor axis along the sequence.
        microbatches: parts a batch is processed in, one after the other, gradients added up.
        pipeline: the schedule by which stages of the model's blocks run on the devices of the pipe axis, such as
            "1f1b:4x8": 4 stages, 8 microbatches; it sets both. Options follow: "1f1b:4x8,stash=input".
        precision: type to compute in; parameters and optimizer state stay float32.
        matmul: precision of float32 matrix products, as in `jax.default_matmul_precision`; or what layers round their
            operands to, gradients too: fp8 (e4m3, e5m2), int8, int4 (radix-4 gradients, Sun et al.), all else as it is.
        reduce: type in which gradients are reduced across devices; `None` is the type computed in. Or a codec, which
            reduces those of replicas over the slow axis: "int8", "powersgd:4", "topk:0.01"; within a replica gradients
            are then reduced in the type computed in.
        diloco: replicas train alone and meet every so many steps, such as "every=100,lr=0.7,momentum=0.9,fragments=1":
            nothing but single numbers crosses the replica axis in between, and a codec of `reduce` is then for what is
            sent at a meeting; `None` has them step together.
        memory: what the backward pass keeps of each block: "none" (all), "dots", "full" (recompute all).
        offload: tensors in host memory.
        state: numbers that the optimizer keeps.
        kernels: implementations of kernels: "auto", the best that run on the platform; "reference", plain JAX; or by
            name, such as "attention=chunked,cross_entropy=tpu"; and "loss_chunk=128": target positions of a row that
            the loss scores at a time.
        unroll: layers per iteration of the scan over layers; 1 under a memory rule that treats one layer at a time, and
            on a CPU under any.
        rules: mesh axes per logical axis.

    Example:
        >>> Plan(mesh=MeshSpec.parse("fsdp:4"), zero=3).zero
        3
    """

    moved: ClassVar[Mapping[str, str]] = MOVED

    mesh: MeshSpec | None = None
    zero: Literal[0, 1, 2, 3] = 0
    sequence_parallel: bool = False
    microbatches: int = 1
    pipeline: PipelinePlan | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    matmul: Literal["default", "high", "highest", "fp8", "int8", "int4"] = "default"
    reduce: Literal["float32", "bfloat16"] | NamedCodec | None = None
    diloco: Diloco | None = None
    memory: MemoryPlan = MemoryPlan()
    offload: OffloadPlan = OffloadPlan()
    state: StatePlan = StatePlan()
    kernels: Kernels = AUTO
    unroll: int = 1
    rules: AxisRules = AxisRules()

    def __post_init__(self) -> None:
        check_types(self)
        if self.zero not in (0, 1, 2, 3):
            raise UserError(f"zero: got {self.zero!r}, expected a stage from 0 to 3")
        for name in ("microbatches", "unroll"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name}: got {value!r}, expected a whole number >= 1")
        if self.pipeline is not None and self.pipeline.name != "auto":  # which is settled when the platform is known
            ranks, _ = self.pipeline.shape()
            if self.mesh is not None and self.mesh.pipe not in (1, ranks):
                raise UserError(
                    f"pipeline {self.pipeline} takes {ranks} devices along pipe, and mesh {self.mesh} says "
                    f"{self.mesh.pipe}: leave pipe out of the mesh"
                )
        check(Facts(self))

    @property
    def asynchronous(self) -> bool:
        """Whether a pipeline updates its stages' weights on its way."""
        return self.pipeline is not None and self.pipeline.asynchronous

    @property
    def stages_keep(self) -> Literal["residuals", "input"]:
        """What stages keep of a forward for its backward; "residuals" without a pipeline."""
        return "residuals" if self.pipeline is None else self.pipeline.stash

    def without_pipeline(self) -> "Plan":
        """The plan of one stage's devices, were they alone."""
        mesh = None if self.mesh is None else dataclasses.replace(self.mesh, pipe=1)
        return dataclasses.replace(self, pipeline=None, mesh=mesh)

    @classmethod
    def upgraded_json(cls, data: Any) -> Any:
        """JSON of this class, from that of an earlier version."""
        return upgraded(data)


def read_plan(path: Any) -> Plan:
    """The plan of a plan.json; fields that it lacks take their defaults.

    Raises:
        UserError: no such file, cut short, of a newer version, or with an unknown field or a wrong value.
    """
    data = read_json(path)
    if not isinstance(data, dict):
        raise UserError(f"{path}: got a {type(data).__name__}, expected a plan: an object of fields")
    version = data.pop("version", PLAN_VERSION)
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= PLAN_VERSION:
        raise UserError(
            f"{path} is of plan version {version!r}, and this jaxscale reads up to {PLAN_VERSION}: "
            "read it with the jaxscale that wrote it, or a newer one"
        )
    return from_json(Plan, data, str(path))


def version_1(plan: Plan) -> dict[str, Any]:
    """The JSON of a plan as version 1 had it, which names what asynchronous pipelines had in flight.

    Example:
        >>> version_1(Plan(pipeline=PipelinePlan.parse("1f1b:2x4,stash=input")))["stash"]
        'input'
    """
    data = to_json(plan)
    offload, state, kernels = data.pop("offload"), data.pop("state"), plan.kernels
    attention = dict(kernels.named).get("attention", "auto")
    beside = attention in ("plain", "chunked", "splash")
    named = tuple(pair for pair in kernels.named if pair[0] != "attention" or not beside)
    pipeline = PipelinePlan("auto", 1) if plan.pipeline is None else plan.pipeline
    data |= {**offload, "state": state["moments"], "master": state["master"], "loss_chunk": kernels.loss_chunk}
    data |= {"attention": attention if beside else "auto", "kernels": str(Kernels(kernels.default, named))}
    data |= {name: getattr(pipeline, name) for name in OF_PIPELINE}
    return data | {"pipeline": None if plan.pipeline is None else pipeline.form}
