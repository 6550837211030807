"""Plan: the techniques of a training run, as a value. They affect speed and memory, and should not affect results."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.platforms.compiler_options import DEFAULT, CompilerOptions
from jaxscale.recipe.combinations import check
from jaxscale.recipe.kernels import AUTO, Kernels
from jaxscale.recipe.plan_json import MOVED_FIELDS, PIPELINE_FIELDS, upgrade
from jaxscale.recipe.requests import Facts
from jaxscale.replicas.low_communication import Diloco
from jaxscale.replicas.named import NamedCodec
from jaxscale.scoped import scoped
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.sharding.rules import AxisRules
from jaxscale.values import check_types, from_json, read_json, to_json
from jaxscale.values.drawn import drawn
from jaxscale.values.limits import MAX_LAYERS, MAX_MICROBATCHES, check_at_most
from jaxscale.values.short_repr import short_repr

T = TypeVar("T")
PLAN_VERSION = 2
"""The version that is written to plan.json. Files of version 1 can be read; files of newer versions are refused."""


@dataclasses.dataclass(frozen=True)
class OffloadPlan:
    """Which memory holds weights, gradients and optimizer state: the memory of the device, or that of the host.

    Args:
        weights: memory of the weights that the forward and backward passes read. If it is the host's, each block's
            weights are copied to the device when the block runs (L2L, ZeRO-Infinity).
        gradients: memory of the gradients, if the weights lie on the host. If the gradients also lie on the host, an
            update reads them slice by slice.
        optimizer_state: memory of the optimizer state. "device": on the device. "streamed": on the host; the device
            updates it in slices (ZeRO-Infinity). "host": on the host; the host's CPU updates the state and the float32
            weights (ZeRO-Offload).

    Example:
        >>> str(OffloadPlan(weights="host", optimizer_state="streamed"))
        'weights host, optimizer_state streamed'
    """

    weights: Literal["device", "host"] = "device"
    gradients: Literal["device", "host"] = "device"
    optimizer_state: Literal["device", "streamed", "host"] = "device"

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_types(self)

    def __str__(self) -> str:
        memory_by_field = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return ", ".join(f"{name} {memory}" for name, memory in memory_by_field.items() if memory != "device")

    @property
    def masters(self) -> bool:
        """Whether the float32 master weights lie on the host between steps."""
        return self.weights == "host" or self.optimizer_state == "host"

    @property
    def any(self) -> bool:
        """Whether weights or optimizer state lie on the host."""
        return self.masters or self.optimizer_state != "device"


@dataclasses.dataclass(frozen=True)
class StatePlan:
    """Number formats of the weights and of the optimizer's moments between steps.

    Args:
        moments: number format of the moments: float32, int8 (softsign and square-root companding), dynamic8 (Dettmers'
            map), int4 or fp8. In all formats but float32, each block of moments has a scale. The moments of embeddings,
            heads, norms and small arrays stay float32.
        master: format of the weights between steps: "float32" or "split". With "split", the weights are stored as
            bfloat16 weights, which the forward and backward passes read, and an 8-bit correction for each weight.
    """

    moments: Literal["float32", "int8", "dynamic8", "int4", "fp8"] = "float32"
    master: Literal["float32", "split"] = "float32"

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_types(self)


_ignores_moved: contextvars.ContextVar[bool] = contextvars.ContextVar("ignores_moved", default=False)
"""Whether `Plan` ignores fields of version 1 that have moved."""


def ignoring_moved_fields() -> contextlib.AbstractContextManager[None]:
    """Return a context in which `Plan` ignores fields of version 1 that have moved, instead of refusing them.

    The context is for loading the experiment file of an earlier run. The plan of that run is read from plan.json.
    """
    return scoped(_ignores_moved, True)


def _refuse_moved_fields(cls: type[T]) -> type[T]:
    """Make a class refuse fields of version 1 that have moved, with an error that names their replacement."""
    init = cls.__init__

    @functools.wraps(init)
    def checked_init(self: T, *args: Any, **fields: Any) -> None:
        """Refuse fields that have moved, or ignore them inside `ignoring_moved_fields`; then initialize the value."""
        moved_names = [
            name for name in MOVED_FIELDS if name in fields and (name != "state" or isinstance(fields[name], str))
        ]
        if moved_names and not _ignores_moved.get():
            name = moved_names[0]
            example = f", as in Plan(state=StatePlan(moments={fields[name]!r}))" if name == "state" else ""
            raise UserError(f"plan.{name} has moved: set plan.{MOVED_FIELDS[name]}{example}")
        init(self, *args, **{name: value for name, value in fields.items() if name not in moved_names})

    cls.__init__ = checked_init
    return cls


@_refuse_moved_fields
@dataclasses.dataclass(frozen=True)
class Plan:
    """The techniques with which to train.

    Args:
        mesh: number of devices along each axis, such as "data:2,fsdp:4"; `None` takes the largest number of devices
            over which the rows of a batch can be split evenly.
        zero: ZeRO stage over the fsdp axis: 1 shards optimizer state, 2 also gradients, 3 also parameters; 0 for none.
        sequence_parallel: whether to use Megatron's sequence parallelism, which shards norms and residuals along the
            sequence over the tensor axis.
        microbatches: number of parts of a batch, which are processed one after the other; their gradients are summed.
        pipeline: the schedule by which stages of the model's blocks run on the devices of the pipe axis, such as
            "1f1b:4x8", which sets 4 stages and 8 microbatches. Options may be appended: "1f1b:4x8,stash=input".
        precision: number format to compute in; parameters and optimizer state stay float32.
        matmul: precision of float32 matrix products, as in `jax.default_matmul_precision`; or the format to which
            layers round their operands and gradients: fp8 (e4m3, e5m2), int8, int4 (radix-4 gradients, Sun et al.).
        reduce: number format in which gradients are reduced across devices; `None` takes the format of `precision`. Or
            a codec that compresses gradients between replicas, over the replica axis: "int8", "powersgd:4",
            "topk:0.01". With a codec, gradients within a replica are reduced in the format of `precision`.
        diloco: settings of DiLoCo, such as "every=100,lr=0.7,momentum=0.9,fragments=1": replicas train independently,
            and synchronize their weights every few steps. Between synchronizations, replicas exchange only scalars. A
            codec in `reduce` compresses the messages of a synchronization. With `None`, replicas take every step
            together.
        memory: rule for the values that each block keeps for the backward pass: "none" (all values), "dots" (matrix
            products), "full" (no value, so that all values are recomputed), and others.
        offload: which of the weights, gradients and optimizer state are kept in host memory.
        state: number formats of the weights and of the optimizer's moments between steps.
        kernels: implementations of kernels: "auto", the best that run on the platform; "reference", plain JAX; or by
            name, such as "attention=chunked,cross_entropy=tpu". In addition, "loss_chunk=128" sets the number of target
            positions of a row for which the loss is computed at a time.
        unroll: number of layers per iteration of the scan over layers. It is reduced to 1 if the memory rule treats one
            layer at a time, and on a CPU under every memory rule but `none`.
        rules: mesh axes of each logical axis.
        compiler: options of XLA for the train step: "default"; names of option sets for the chip, such as "overlap";
            and single options, such as "xla_gpu_enable_triton_gemm=false".

    A field with a text form accepts the text or the value: `mesh="fsdp:4"` is `mesh=MeshSpec(fsdp=4)`.

    Example:
        >>> Plan(mesh="fsdp:4", zero=3).mesh.fsdp
        4
    """

    moved: ClassVar[Mapping[str, str]] = MOVED_FIELDS

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
    compiler: CompilerOptions = DEFAULT

    __repr__ = short_repr
    _repr_html_ = drawn

    if TYPE_CHECKING:  # with the types that the constructor accepts, which include the text forms

        def __init__(
            self,
            mesh: MeshSpec | str | None = None,
            zero: Literal[0, 1, 2, 3] = 0,
            sequence_parallel: bool = False,
            microbatches: int = 1,
            pipeline: PipelinePlan | str | None = None,
            precision: Literal["float32", "bfloat16"] = "float32",
            matmul: Literal["default", "high", "highest", "fp8", "int8", "int4"] = "default",
            reduce: NamedCodec | str | None = None,
            diloco: Diloco | str | None = None,
            memory: MemoryPlan | str = MemoryPlan(),
            offload: OffloadPlan = OffloadPlan(),
            state: StatePlan = StatePlan(),
            kernels: Kernels | str = AUTO,
            unroll: int = 1,
            rules: AxisRules = AxisRules(),
            compiler: CompilerOptions | str = DEFAULT,
        ) -> None: ...

    def __post_init__(self) -> None:
        check_types(self)
        if self.zero not in (0, 1, 2, 3):
            raise UserError(f"zero: got {self.zero!r}, expected a stage from 0 to 3")
        for name in ("microbatches", "unroll"):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise UserError(f"{name}: got {count!r}, expected a whole number >= 1")
            check_at_most(name, count, MAX_MICROBATCHES if name == "microbatches" else MAX_LAYERS)
        if self.pipeline is not None and self.pipeline.name != "auto":  # "auto" is resolved when the platform is known
            rank_count, _ = self.pipeline.shape()
            if self.mesh is not None and self.mesh.pipe not in (1, rank_count):
                raise UserError(
                    f"pipeline {self.pipeline} takes {rank_count} devices along pipe, but mesh {self.mesh} has "
                    f"{self.mesh.pipe}; leave pipe out of the mesh"
                )
        check(Facts(self))  # refuses combinations of settings

    @property
    def asynchronous(self) -> bool:
        """Whether the plan has a pipeline whose stages update their weights at different times."""
        return self.pipeline is not None and self.pipeline.asynchronous

    @property
    def stages_keep(self) -> Literal["residuals", "input"]:
        """The kind of values that stages keep for the backward pass; "residuals" without a pipeline."""
        return "residuals" if self.pipeline is None else self.pipeline.stash

    def without_pipeline(self) -> "Plan":
        """Return the plan without its pipeline, for the devices of one stage."""
        mesh = None if self.mesh is None else dataclasses.replace(self.mesh, pipe=1)
        return dataclasses.replace(self, pipeline=None, mesh=mesh)

    @classmethod
    def upgraded_json(cls, data: Any) -> Any:
        """Return the JSON of a plan in the current version, from the JSON of an earlier version."""
        return upgrade(data)


def read_plan(path: Any) -> Plan:
    """Read and return the plan in a plan.json file; fields that the file lacks take their defaults.

    Raises:
        UserError: the file does not exist, is incomplete or of a newer version, or has an unknown field or wrong value.
    """
    fields = read_json(path)
    if not isinstance(fields, dict):
        raise UserError(f"{path}: got a {type(fields).__name__}, expected a JSON object with the fields of a plan")
    version = fields.pop("version", PLAN_VERSION)
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= PLAN_VERSION:
        raise UserError(
            f"{path}: got plan version {version!r}, expected a version from 1 to {PLAN_VERSION}; read the file with "
            "the jaxscale that wrote it, or with a newer one"
        )
    return from_json(Plan, fields, str(path))


def version_1_fields(plan: Plan) -> dict[str, Any]:
    """Return the JSON of a plan in version 1.

    A checkpoint of an asynchronous pipeline names the arrays that are in flight by a hash of this JSON.

    Example:
        >>> version_1_fields(Plan(pipeline=PipelinePlan.parse("1f1b:2x4,stash=input")))["stash"]
        'input'
    """
    fields = to_json(plan)
    offload, state, kernels = fields.pop("offload"), fields.pop("state"), plan.kernels
    attention = dict(kernels.named).get("attention", "auto")
    has_field = attention in ("plain", "chunked", "splash")  # version 1 had a field for these implementations
    kernels_and_names = tuple(
        kernel_and_name for kernel_and_name in kernels.named if kernel_and_name[0] != "attention" or not has_field
    )
    pipeline = PipelinePlan("auto", 1) if plan.pipeline is None else plan.pipeline
    fields |= {**offload, "state": state["moments"], "master": state["master"], "loss_chunk": kernels.loss_chunk}
    fields |= {
        "attention": attention if has_field else "auto",
        "kernels": str(Kernels(kernels.default, kernels_and_names)),
    }
    fields |= {name: getattr(pipeline, name) for name in PIPELINE_FIELDS}
    return fields | {"pipeline": None if plan.pipeline is None else pipeline.form}
