"""Describe a plan in words: the effect of each choice in plan.json on the run.

The description is made from the JSON and not from `Plan`, so that plans of older or newer versions can be described. A
field without a sentence is shown as its name and its value.
"""

import math
from typing import Any

_AXIS_PHRASES = {
    "replica": "copies of the whole model across slices",
    "data": "data parallel: each holds the model and takes a part of the batch",
    "pipe": "pipeline stages",
    "fsdp": "each takes a part of the batch, and ZeRO shards over them",
    "expert": "experts are distributed over them",
    "sequence": "each sequence is split over them",
    "tensor": "heads, mlp and vocabulary are split over them",
}
_ZERO = {
    0: "Nothing is sharded: every device holds all parameters, gradients and optimizer state.",
    1: "Optimizer state{master} is sharded over {n}; parameters and gradients are whole on each.",
    2: "Optimizer state{master} and gradients are sharded over {n}; parameters are whole on each.",
    3: "Parameters, gradients and optimizer state are sharded over {n}; a layer is gathered when it is used.",
}
_MEMORY = {
    "none": "Every residual is kept for the backward pass: this takes the most memory and no recomputation.",
    "dots": "The results of matrix products are kept; the backward pass recomputes the operations between them.",
    "full": "Only each block's input is kept, and the backward pass recomputes the block.",
    "jax": "The residuals that one of JAX's policies selects are kept for the backward pass.",
    "sqrt": "Of n blocks, the input of every sqrt(n)-th one is kept, and the backward pass recomputes the others.",
    "periodic": "The input of one block in each period is kept, and the backward pass recomputes the blocks between.",
    "revolve": "Up to the given number of block inputs are kept, chosen for the fewest forward passes.",
    "chain": "Kept residuals and recomputed blocks are chosen for the least time in the given memory.",
    "save": "Each block keeps the residuals with which recomputation is the cheapest in the given memory.",
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
    "high": "in three bfloat16 passes on devices that would use one",
    "highest": "in full float32",
}
_PRODUCTS = {
    "fp8": "8-bit floating point (e4m3, for gradients e5m2), with a scale for each operand",
    "int8": "8-bit whole numbers, gradients too, with a scale for each channel",
    "int4": "4-bit whole numbers, and gradients to powers of four in two phases",
}


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Return the number of devices along each axis of a mesh, which is text or a dict, without axes of one device.

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
    """Return the number of devices along each axis of the run's mesh, from layout.json, or else from the plan.

    Example:
        >>> mesh_of({"mesh": "data:2"}, {"mesh": {"fsdp": 4}}), mesh_of({"mesh": "data:2"}, {})
        ({'fsdp': 4}, {'data': 2})
    """
    return mesh_sizes(layout["mesh"] if layout.get("mesh") is not None else plan.get("mesh"))


def plan_in_words(plan: dict[str, Any], layout: dict[str, Any], experiment: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the effects of a plan, as pairs of a topic and its sentences.

    Args:
        plan: content of plan.json; fields may be missing.
        layout: content of layout.json, whose mesh replaces that of the plan.
        experiment: content of experiment.json, which has the batch.

    Example:
        >>> for topic, words in plan_in_words({"mesh": "data:4", "memory": "full"}, {}, {"batch": 64}):
        ...     print(topic, "|", words)
        Mesh | 4 devices along data (data parallel: each holds the model and takes a part of the batch).
        Batch | 64 rows, 16 for each of 4 parts.
        Memory: full | Only each block's input is kept, and the backward pass recomputes the block.
    """
    sizes = mesh_of(plan, layout)
    topics: list[tuple[str, str]] = []
    if plan or layout:
        topics.append(("Mesh", _mesh_sentence(sizes, is_automatic="mesh" in plan and plan["mesh"] is None)))
    batch = experiment.get("batch")
    microbatches = plan.get("microbatches", 1)
    if isinstance(batch, int) and isinstance(microbatches, int) and microbatches > 0:
        topics.append(("Batch", _batch_sentence(batch, sizes, microbatches)))
    zero = plan.get("zero")
    if zero in _ZERO and not (zero == 0 and not sizes):
        fsdp_count = sizes.get("fsdp", 1)
        master_text = " (the float32 master parameters with it)" if plan.get("precision") == "bfloat16" else ""
        devices_text = f"{fsdp_count} devices" if fsdp_count > 1 else "a single device"
        topics.append((f"ZeRO {zero}", _ZERO[zero].format(n=devices_text, master=master_text)))
    if plan.get("sequence_parallel"):
        topics.append(("Sequence parallel", "Norms and residuals are split along the sequence over the tensor axis."))
    if plan.get("pipeline"):
        topics.append((f"Pipeline: {plan['pipeline']}", _pipeline_sentences(str(plan["pipeline"]))))
    if "precision" in plan:
        topics.append(("Precision", _precision_sentences(plan)))
    memory = plan.get("memory")
    if isinstance(memory, str):
        topics.append((f"Memory: {memory}", _MEMORY.get(memory.partition(":")[0], "As the name implies.")))
    if "kernels" in plan:
        topics += _kernel_topics(str(plan["kernels"]))
    if plan.get("diloco"):
        topics.append((f"DiLoCo: {plan['diloco']}", _DILOCO))
    offload = plan.get("offload", {})
    sentences = [sentence for field, sentence in _OFFLOAD_SENTENCES.items() if offload.get(field, "device") != "device"]
    if offload.get("optimizer_state") == "streamed":
        sentences.append("Optimizer state passes through the device slice by slice.")
    if offload.get("optimizer_state") == "host":
        sentences.append("The host's CPU updates the master weights.")
    if sentences:
        topics.append(("In host memory", " ".join(sentences)))
    state = plan.get("state", {})
    moments = str(state.get("moments", "float32"))
    if moments != "float32":
        topics.append((f"Optimizer state: {moments}", _MOMENT_SENTENCES.get(moments, "As the name implies.")))
    if state.get("master") == "split":
        topics.append(("Master weights", "Kept as bfloat16, which both passes read, and 8 bits of correction."))
    if plan.get("unroll", 1) != 1:
        topics.append(("Layers", f"The scan over layers takes {plan['unroll']} at a time."))
    other_fields = {name: value for name, value in plan.items() if name not in _DESCRIBED_FIELDS}
    if other_fields:
        topics.append(("Also", ", ".join(f"{name} = {value}" for name, value in other_fields.items())))
    return topics


_OFFLOAD_SENTENCES = {
    "weights": "Master weights stay on the host; those of a block are copied to the device when the block runs.",
    "gradients": "Gradients of those weights are copied to the host as they are computed.",
    "optimizer_state": "Optimizer state stays on the host.",
}
_DILOCO = (
    "Each replica trains alone, with its own optimizer. After a fixed number of steps, the shared weights move by the "
    "replicas' mean change, and all replicas continue from the new weights."
)
_MOMENT_SENTENCES = {
    "int8": "Moments are kept in 8 bits (softsign and square-root companding) with a scale for each block of a column.",
    "dynamic8": "Moments are kept in 8 bits by Dettmers' dynamic map, with a scale for each block of a column.",
    "int4": "Moments are kept in 4 bits, the second without a zero, with a scale for each block of a column.",
    "fp8": "Moments are kept as 8-bit floating point (e4m3), with a scale for each block of a column.",
}
_DESCRIBED_FIELDS = (
    "version", "type", "mesh", "zero", "sequence_parallel", "microbatches", "pipeline", "precision", "matmul", "reduce",
    "diloco", "memory", "offload", "state", "kernels", "unroll", "rules",
)  # fmt: skip
"""Fields that sentences describe, or that have no effect by themselves."""


def _option_values(text: str) -> dict[str, str]:
    """Return the values by name in a text such as "stages=4,stash=input"; words without a value are left out."""
    pairs = (pair.partition("=") for pair in text.split(","))
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def _kernel_topics(text: str) -> list[tuple[str, str]]:
    """Return pairs of a topic and its sentence about loss, attention and other kernels, from a plan's `kernels`."""
    option_values = _option_values(text)
    topics = []
    chunk = option_values.pop("loss_chunk", None)
    if chunk is not None:
        sentence = f"{chunk} positions of a row are scored at a time: the logits of all positions never exist at once."
        topics.append(("Loss", sentence))
    elif "cross_entropy" not in option_values:
        topics.append(("Loss", "The logits of all positions exist at once."))
    attention = option_values.get("attention", "auto")
    topics.append((f"Attention: {attention}", _ATTENTION.get(attention, "As the name implies.")))
    if set(option_values) - {"attention"} or text.startswith("reference"):
        topics.append((f"Kernels: {text}", "The named kernels are as chosen; the others are the best for the device."))
    return topics


def _pipeline_sentences(text: str) -> str:
    """Return sentences about the effects of the options in a pipeline's text."""
    option_values = _option_values(text)
    stages = option_values.get("stages")
    blocks_text = "of as many blocks each" if stages is None else f"of {stages.replace('+', ', ')} blocks"
    sentences = [f"Stages {blocks_text} run by this schedule."]
    if option_values.get("stash") == "input":
        sentences.append("A stage keeps only its input and is recomputed for its backward pass.")
    if option_values.get("anneal", "0") != "0":
        sentences.append(f"Stale stages learn more slowly for the first {option_values['anneal']} updates.")
    if option_values.get("lowering") == "phased":
        sentences.append("The program has no branches: idle devices compute on zeros.")
    if "synchronous_steps" in option_values:
        sentences.append(f"The first {option_values['synchronous_steps']} steps are synchronous.")
    if float(option_values.get("correction", "0")):
        sentences.append(f"Backward passes read weights corrected for the delay, by {option_values['correction']}.")
    return " ".join(sentences)


def _mesh_sentence(sizes: dict[str, int], *, is_automatic: bool) -> str:
    """Return a sentence about the devices along each axis; `is_automatic` if the plan named no mesh."""
    device_count = math.prod(sizes.values())
    axis_phrases = [f"along {axis} ({_AXIS_PHRASES.get(axis, 'an axis of its own')})" for axis in sizes]
    if not sizes:
        text = "A single device."
    elif len(sizes) == 1:
        text = f"{device_count} devices {axis_phrases[0]}."
    else:
        shape_text = " \N{MULTIPLICATION SIGN} ".join(map(str, sizes.values()))
        parts_text = "; ".join(f"{size} {axis}" for size, axis in zip(sizes.values(), axis_phrases, strict=True))
        text = f"{device_count} devices as {shape_text}: {parts_text}."
    return text + (" The plan named no mesh: these are the devices of the machine." if is_automatic else "")


def _batch_sentence(batch: int, sizes: dict[str, int], microbatches: int) -> str:
    """Return a sentence about the rows of the global batch, its parts and its microbatches."""
    part_count = sizes.get("replica", 1) * sizes.get("data", 1) * sizes.get("fsdp", 1)
    text = f"{batch:,} rows"
    if part_count > 1 and batch % part_count == 0:
        text += f", {batch // part_count:,} for each of {part_count} parts"
    if microbatches > 1:
        text += f", in {microbatches} microbatches one after the other, their gradients added"
    return text + "."


def _precision_sentences(plan: dict[str, Any]) -> str:
    """Return sentences about the dtypes of the computation, of matrix products and of the reduction of gradients."""
    precision, matmul = plan["precision"], str(plan.get("matmul"))
    pass_text = _MATMUL.get(matmul)
    products_text = f" Layers round the operands of products to {_PRODUCTS[matmul]}." if matmul in _PRODUCTS else ""
    reduction = str(plan.get("reduce") or "bfloat16")
    codec_text = "" if reduction in ("float32", "bfloat16") else f", between replicas as {reduction} codes them"
    if precision == "bfloat16":
        dtype = reduction if reduction in ("float32", "bfloat16") else "bfloat16"
        return (
            "Computes in bfloat16; master parameters, optimizer state, norms and the loss stay float32. "
            f"Gradients are reduced across devices in {dtype}{codec_text}.{products_text}"
        )
    text = f"Everything is {precision}" + (f"; matrix products run {pass_text}." if pass_text else ".") + products_text
    return text + f" Gradients are added up{codec_text}." * bool(codec_text)
