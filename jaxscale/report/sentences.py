"""A plan in words, with the effect of each choice of plan.json on the run.

It is made from the JSON and not from `Plan`, so that plans of older or newer versions can be described. A field without
a sentence is shown as name and value.
"""

import math
from typing import Any

_AXES = {
    "replica": "copies of the whole model across slices",
    "data": "data parallel: each holds the model and takes a part of the batch",
    "pipe": "pipeline stages",
    "fsdp": "each takes a part of the batch and ZeRO shards over them",
    "expert": "experts are spread over them",
    "sequence": "each sequence is split over them",
    "tensor": "heads, mlp and vocabulary are split over them",
}
_ZERO = {
    0: "Nothing is sharded: every device holds all parameters, gradients and optimizer state.",
    1: "Optimizer state{master} is sharded over {n}; parameters and gradients are whole on each.",
    2: "Optimizer state{master} and gradients are sharded over {n}; parameters are whole on each.",
    3: "Parameters, gradients and optimizer state are sharded over {n}; a layer is gathered where it is used.",
}
_MEMORY = {
    "none": "The backward pass keeps every residual: most memory, no recomputation.",
    "dots": "The backward pass keeps the results of matrix products and recomputes the operations between them.",
    "full": "The backward pass keeps each block's input alone and recomputes the block.",
    "jax": "The backward pass keeps the residuals that one of JAX's policies selects.",
    "sqrt": "The backward pass keeps the input of every so many blocks, the square root of their number.",
    "periodic": "The backward pass keeps the input of one block in each period, and recomputes the blocks between.",
    "revolve": "The backward pass keeps up to the given number of block inputs, placed for the fewest forward passes.",
    "chain": "The residuals kept and the blocks recomputed are cheapest for a chain of blocks in the given memory.",
    "save": "Each block keeps the residuals that make recomputation the cheapest in the given memory.",
    "greedy": "Each block keeps the residuals that a greedy rule chose, in the given memory.",
    "dtr_static": "Each block keeps the residuals that DTR's score chose, in the given memory.",
    "offload": "Some residuals wait in host memory for the backward pass; the given amount stays on the device.",
    "file": "The residuals that each block keeps were read from a file.",
}
_ATTENTION = {
    "auto": "The implementation is chosen by the device.",
    "plain": "The scores of all pairs of positions are computed at once.",
    "chunked": "Computed in chunks: the scores of all pairs of positions never exist at once.",
    "splash": "JAX's splash kernel for TPU.",
}
_MATMUL = {
    "default": "as fast as the device offers",
    "high": "in three bfloat16 passes where the device would use one",
    "highest": "in full float32",
}
_PRODUCTS = {
    "fp8": "8-bit floating point (e4m3, gradients e5m2), a scale for each operand",
    "int8": "8-bit whole numbers, gradients too, a scale for each channel",
    "int4": "4-bit whole numbers, gradients to powers of four in two phases",
}


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Number of devices along each axis of a mesh, which is text or a dict; axes of one device are left out.

    Example:
        >>> mesh_sizes("data:2,fsdp:4"), mesh_sizes({"data": 1, "tensor": 2}), mesh_sizes(None)
        ({'data': 2, 'fsdp': 4}, {'tensor': 2}, {})
    """
    if isinstance(mesh, str):
        pairs = [size_text.partition(":") for size_text in mesh.split(",") if ":" in size_text]
        mesh = {axis.strip(): int(size) for axis, _, size in pairs if size.strip().isdigit()}
    if not isinstance(mesh, dict):
        return {}
    return {str(axis): size for axis, size in mesh.items() if isinstance(size, int) and size > 1}


def mesh_of(plan: dict[str, Any], layout: dict[str, Any]) -> dict[str, int]:
    """Number of devices along each axis of the run's mesh, from layout.json, or from the plan if that has none.

    Example:
        >>> mesh_of({"mesh": "data:2"}, {"mesh": {"fsdp": 4}}), mesh_of({"mesh": "data:2"}, {})
        ({'fsdp': 4}, {'data': 2})
    """
    return mesh_sizes(layout["mesh"] if layout.get("mesh") is not None else plan.get("mesh"))


def plan_in_words(plan: dict[str, Any], layout: dict[str, Any], experiment: dict[str, Any]) -> list[tuple[str, str]]:
    """The effects of a plan, as pairs of a topic and its sentences.

    Args:
        plan: plan.json, whole or with fields missing.
        layout: layout.json, whose mesh replaces that of the plan.
        experiment: experiment.json, which has the batch.

    Example:
        >>> for topic, words in plan_in_words({"mesh": "data:4", "memory": "full"}, {}, {"batch": 64}):
        ...     print(topic, "|", words)
        Mesh | 4 devices along data (data parallel: each holds the model and takes a part of the batch).
        Batch | 64 rows, 16 for each of 4 parts.
        Memory: full | The backward pass keeps each block's input alone and recomputes the block.
    """
    sizes = mesh_of(plan, layout)
    topics: list[tuple[str, str]] = []
    if plan or layout:
        topics.append(("Mesh", _mesh(sizes, is_automatic="mesh" in plan and plan["mesh"] is None)))
    batch = experiment.get("batch")
    microbatches = plan.get("microbatches", 1)
    if isinstance(batch, int) and isinstance(microbatches, int) and microbatches > 0:
        topics.append(("Batch", _batch(batch, sizes, microbatches)))
    zero = plan.get("zero")
    if zero in _ZERO and not (zero == 0 and not sizes):
        fsdp = sizes.get("fsdp", 1)
        master = " (the float32 master parameters with it)" if plan.get("precision") == "bfloat16" else ""
        topics.append(
            (f"ZeRO {zero}", _ZERO[zero].format(n=f"{fsdp} devices" if fsdp > 1 else "a single device", master=master))
        )
    if plan.get("sequence_parallel"):
        topics.append(("Sequence parallel", "Norms and residuals are split along the sequence over the tensor axis."))
    if plan.get("pipeline"):
        topics.append((f"Pipeline: {plan['pipeline']}", _pipeline(str(plan["pipeline"]))))
    if "precision" in plan:
        topics.append(("Precision", _precision(plan)))
    memory = plan.get("memory")
    if isinstance(memory, str):
        topics.append((f"Memory: {memory}", _MEMORY.get(memory.partition(":")[0], "As the name implies.")))
    if "kernels" in plan:
        topics += _kernels(str(plan["kernels"]))
    if plan.get("diloco"):
        topics.append((f"DiLoCo: {plan['diloco']}", _DILOCO))
    offload = plan.get("offload", {})
    sentences = [sentence for field, sentence in _OFFLOADED.items() if offload.get(field, "device") != "device"]
    if offload.get("optimizer_state") == "streamed":
        sentences.append("Optimizer state passes through the device slice by slice.")
    if offload.get("optimizer_state") == "host":
        sentences.append("The host's CPU updates the master weights.")
    if sentences:
        topics.append(("In host memory", " ".join(sentences)))
    state = plan.get("state", {})
    moments = str(state.get("moments", "float32"))
    if moments != "float32":
        topics.append((f"Optimizer state: {moments}", _STATE.get(moments, "As the name implies.")))
    if state.get("master") == "split":
        topics.append(("Master weights", "Kept as bfloat16, which both passes read, and 8 bits of correction."))
    if plan.get("unroll", 1) != 1:
        topics.append(("Layers", f"The scan over layers takes {plan['unroll']} at a time."))
    other_fields = {name: value for name, value in plan.items() if name not in _DESCRIBED}
    if other_fields:
        topics.append(("Also", ", ".join(f"{name} = {value}" for name, value in other_fields.items())))
    return topics


_OFFLOADED = {
    "weights": "Master weights stay on the host; each block's come to the device when it runs.",
    "gradients": "Gradients of those weights go to the host as they are computed.",
    "optimizer_state": "Optimizer state stays on the host.",
}
_DILOCO = (
    "Each replica trains alone, with its own optimizer; every so many steps the shared weights move by the replicas' "
    "mean change, and all replicas continue from there."
)
_STATE = {
    "int8": "Moments are kept in 8 bits (softsign and square-root companding), a scale for each block of a column.",
    "dynamic8": "Moments are kept in 8 bits by Dettmers' dynamic map, a scale for each block of a column.",
    "int4": "Moments are kept in 4 bits, the second without a zero, a scale for each block of a column.",
    "fp8": "Moments are kept as 8-bit floating point (e4m3), a scale for each block of a column.",
}
_DESCRIBED = (
    "version", "type", "mesh", "zero", "sequence_parallel", "microbatches", "pipeline", "precision", "matmul", "reduce",
    "diloco", "memory", "offload", "state", "kernels", "unroll", "rules",
)  # fmt: skip
"""Fields that sentences describe, or that have no effect by themselves."""


def _options(text: str) -> dict[str, str]:
    """The NAME=VALUE pairs of a choice's text, such as "stages=4,stash=input"; words without a value are left out."""
    pairs = (pair.partition("=") for pair in text.split(","))
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def _kernels(text: str) -> list[tuple[str, str]]:
    """Topics and sentences about loss, attention and other kernels, from a plan's `kernels`."""
    options = _options(text)
    sentences = []
    chunk = options.pop("loss_chunk", None)
    if chunk is not None:
        sentence = f"{chunk} positions of a row are scored at a time: the logits of all never exist at once."
        sentences.append(("Loss", sentence))
    elif "cross_entropy" not in options:
        sentences.append(("Loss", "The logits of all positions exist at once."))
    attention = options.get("attention", "auto")
    sentences.append((f"Attention: {attention}", _ATTENTION.get(attention, "As the name implies.")))
    if set(options) - {"attention"} or text.startswith("reference"):
        sentences.append((f"Kernels: {text}", "Implementations by name; others are the best for the device."))
    return sentences


def _pipeline(text: str) -> str:
    """The effects of the options in a pipeline's text."""
    options = _options(text)
    stages = options.get("stages")
    blocks = "of as many blocks each" if stages is None else f"of {stages.replace('+', ', ')} blocks"
    sentences = [f"Stages {blocks} run by this schedule."]
    if options.get("stash") == "input":
        sentences.append("A stage keeps only its input and is recomputed for its backward pass.")
    if options.get("anneal", "0") != "0":
        sentences.append(f"Stale stages learn more slowly for the first {options['anneal']} updates.")
    if options.get("lowering") == "phased":
        sentences.append("The program has no branches: idle devices compute on zeros.")
    if "synchronous_steps" in options:
        sentences.append(f"The first {options['synchronous_steps']} steps are synchronous.")
    if float(options.get("correction", "0")):
        sentences.append(f"Backward passes read weights corrected for the delay, by {options['correction']}.")
    return " ".join(sentences)


def _mesh(sizes: dict[str, int], *, is_automatic: bool) -> str:
    """A sentence about the devices along each axis; `is_automatic` if the plan named no mesh."""
    devices = math.prod(sizes.values())
    axes = [f"along {axis} ({_AXES.get(axis, 'an axis of its own')})" for axis in sizes]
    if not sizes:
        text = "A single device."
    elif len(sizes) == 1:
        text = f"{devices} devices {axes[0]}."
    else:
        shape = " \N{MULTIPLICATION SIGN} ".join(map(str, sizes.values()))
        parts = "; ".join(f"{size} {axis}" for size, axis in zip(sizes.values(), axes, strict=True))
        text = f"{devices} devices as {shape}: {parts}."
    return text + (" The plan named no mesh: these are the devices of the machine." if is_automatic else "")


def _batch(batch: int, sizes: dict[str, int], microbatches: int) -> str:
    """A sentence about the rows of the global batch, its parts and its microbatches."""
    part_count = sizes.get("replica", 1) * sizes.get("data", 1) * sizes.get("fsdp", 1)
    text = f"{batch:,} rows"
    if part_count > 1 and batch % part_count == 0:
        text += f", {batch // part_count:,} for each of {part_count} parts"
    if microbatches > 1:
        text += f", in {microbatches} microbatches one after the other, their gradients added"
    return text + "."


def _precision(plan: dict[str, Any]) -> str:
    """Sentences about the dtypes of the computation, of matrix products and of the reduction of gradients."""
    precision, matmul = plan["precision"], str(plan.get("matmul"))
    pass_text = _MATMUL.get(matmul)
    products = f" Layers round the operands of products to {_PRODUCTS[matmul]}." if matmul in _PRODUCTS else ""
    reduce = str(plan.get("reduce") or "bfloat16")
    codec = "" if reduce in ("float32", "bfloat16") else f", between replicas as {reduce} codes them"
    if precision == "bfloat16":
        dtype = reduce if reduce in ("float32", "bfloat16") else "bfloat16"
        return (
            "Computes in bfloat16; master parameters, optimizer state, norms and the loss stay float32. "
            f"Gradients are reduced across devices in {dtype}{codec}.{products}"
        )
    text = f"Everything is {precision}" + (f"; matrix products run {pass_text}." if pass_text else ".") + products
    return text + f" Gradients are added up{codec}." * bool(codec)
