"""Plan: how to train, as a value. Everything that changes speed and memory and should not change the result is here."""

import dataclasses
from typing import Any, Literal

from jaxscale.compression.named import NamedCodec
from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.optim.diloco import Diloco
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.sharding.rules import AxisRules
from jaxscale.step.combinations import check
from jaxscale.step.kernels import AUTO, Kernels
from jaxscale.step.requests import Facts
from jaxscale.values import check_types, from_json, read_json

PLAN_VERSION = 1
"""Written to plan.json; a file of a newer version is refused by name."""
OF_A_PIPELINE = ("stages", "stash", "lowering", "anneal", "correction", "synchronous_steps")
"""Fields that mean something beside a pipeline alone."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A record of techniques.

    Args:
        mesh: devices per axis, such as "data:2,fsdp:4"; `None` takes the most local devices that divide the batch.
        zero: ZeRO stage over the fsdp axis: 1 shards optimizer state, 2 gradients too, 3 parameters too.
        sequence_parallel: Megatron's: norms and residuals are sharded over the tensor axis along the sequence.
        microbatches: parts a batch is processed in, one after the other, gradients added up.
        pipeline: the schedule by which stages of the model's blocks run on the devices of the pipe axis, such as
            "1f1b:4x8": 4 stages, 8 microbatches; it sets both.
        stages: blocks of each stage, in order; `None` gives every stage as many.
        stash: what a stage keeps of a forward for its backward: what the memory plan says of each block, or its "input"
            alone, and it runs again.
        lowering: of a pipeline's table: "switch", a branch for each kind of action, so that idle devices do nothing; or
            "phased", kinds written out one after the other without any branch, where every tick is of one kind
            (lockstep, gpipe): idle devices then compute on zeros, and what they compute is dropped.
        anneal: updates over which the smaller rates of an asynchronous pipeline's stale stages fade (PipeMare's
            rescheduling); 0: none; `None`: a quarter of the run for pipemare, else none.
        correction: of the weights that pipemare's backwards read, what is left of a change after the delay, below 1; 0:
            none; `None`: exp(-2) = 0.135.
        synchronous_steps: of an asynchronous pipeline, to begin with: a warm-up, after which the pipe fills.
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
        weights: where the weights are that the passes read: on the device, or on the host, from where each block's come
            when it runs (L2L, ZeRO-Infinity).
        gradients: where those of streamed weights go; the host's are read back slice by slice.
        optimizer_state: on the device; on the host and "streamed" through it in slices (ZeRO-Infinity); or on the
            "host", where its CPU updates it and the float32 weights (ZeRO-Offload).
        state: bits of the optimizer's moments: int8 (softsign and square-root companding), dynamic8 (Dettmers' map),
            int4, fp8, in blocks with a scale; embeddings, heads, norms and small arrays stay float32.
        master: what weights are kept in between steps: float32, or "split": the bfloat16 that passes read, and 8 bits
            of correction.
        loss_chunk: target positions of a row scored at a time by the loss; `None` scores all at once.
        attention: implementation of attention: auto, plain, chunked (never holds S x S), splash (TPU).
        kernels: implementations of kernels: "auto", the best that run on the platform; "reference", plain JAX; or by
            name, such as "attention=chunked,cross_entropy=tpu".
        unroll: layers per iteration of the scan over layers; 1 under a memory rule that treats one layer at a time, and
            on a CPU under any.
        rules: mesh axes per logical axis.

    Example:
        >>> Plan(mesh=MeshSpec.parse("fsdp:4"), zero=3).zero
        3
    """

    mesh: MeshSpec | None = None
    zero: Literal[0, 1, 2, 3] = 0
    sequence_parallel: bool = False
    microbatches: int = 1
    pipeline: PipelinePlan | None = None
    stages: tuple[int, ...] | None = None
    stash: Literal["residuals", "input"] = "residuals"
    lowering: Literal["switch", "phased"] = "switch"
    anneal: int | None = None
    correction: float | None = None
    synchronous_steps: int = 0
    precision: Literal["float32", "bfloat16"] = "float32"
    matmul: Literal["default", "high", "highest", "fp8", "int8", "int4"] = "default"
    reduce: Literal["float32", "bfloat16"] | NamedCodec | None = None
    diloco: Diloco | None = None
    memory: MemoryPlan = MemoryPlan()
    weights: Literal["device", "host"] = "device"
    gradients: Literal["device", "host"] = "device"
    optimizer_state: Literal["device", "streamed", "host"] = "device"
    state: Literal["float32", "int8", "dynamic8", "int4", "fp8"] = "float32"
    master: Literal["float32", "split"] = "float32"
    loss_chunk: int | None = None
    attention: Literal["auto", "plain", "chunked", "splash"] = "auto"
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
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise UserError(f"loss_chunk: got {self.loss_chunk!r}, expected a whole number >= 1, or none")
        self._check_pipeline()
        check(Facts(self))

    @property
    def asynchronous(self) -> bool:
        """Whether a pipeline updates its stages' weights on its way."""
        return self.pipeline is not None and self.pipeline.asynchronous

    @property
    def names_attention(self) -> bool:
        """Whether it asks for an implementation of attention, which a model must then have."""
        return self.attention != "auto" or "attention" in dict(self.kernels.named)

    @property
    def attends(self) -> str:
        """The implementation of attention that layers are told: `attention`, or what `kernels` names."""
        named = self.kernels.of("attention")
        return self.attention if named == "auto" else {"reference": "plain"}.get(named, named)

    @property
    def scores(self) -> str:
        """The implementation of cross-entropy that a loss is told: by `loss_chunk` ("auto"), or as `kernels` says."""
        return dict(self.kernels.named).get("cross_entropy", "auto")

    def without_pipeline(self) -> "Plan":
        """The plan of one stage's devices, were they alone."""
        mesh = None if self.mesh is None else dataclasses.replace(self.mesh, pipe=1)
        return dataclasses.replace(
            self, pipeline=None, mesh=mesh, **{name: getattr(Plan, name) for name in OF_A_PIPELINE}
        )

    def _check_pipeline(self) -> None:
        pipeline = self.pipeline
        if pipeline is None:
            return
        for name in ("anneal", "synchronous_steps"):
            if (getattr(self, name) or 0) < 0:
                raise UserError(f"{name}: got {getattr(self, name)}, expected 0 or more")
        if self.correction is not None and not 0 <= self.correction < 1:
            raise UserError(f"correction: got {self.correction}, expected 0 (none) or more, and less than 1")
        if pipeline.name == "auto":  # the rest is settled when the platform is known
            return
        ranks, _ = pipeline.shape()
        if self.mesh is not None and self.mesh.pipe not in (1, ranks):
            raise UserError(
                f"pipeline {pipeline} takes {ranks} devices along pipe, and mesh {self.mesh} says "
                f"{self.mesh.pipe}: leave pipe out of the mesh"
            )


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
