"""Describe a plan in words: the effect of each choice in plan.json on the run, and of a user's own schedule.

The descriptions are derived from the JSON and not from `Plan`, so that plans of older and newer versions can be
described. If no sentence describes a field, its name and value are shown.
"""

import math
from typing import Any

from jaxscale.values.limits import MAX_INT32
from jaxscale.values.read_files import whole_number

_AXIS_PHRASES = {
    "replica": "copies of the whole model across slices",
    "data": "data parallel: each holds the model and processes a part of the batch",
    "pipe": "pipeline stages",
    "fsdp": "each processes a part of the batch, and ZeRO shards over them",
    "expert": "experts are distributed over them",
    "sequence": "each sequence is split over them",
    "tensor": "heads, mlp and vocabulary are split over them",
}
_ZERO = {
    0: "Nothing is sharded: every device holds all parameters, gradients and optimizer state.",
    1: "Optimizer state{master} is sharded over {n}; parameters and gradients are whole on each device.",
    2: "Optimizer state{master} and gradients are sharded over {n}; parameters are whole on each device.",
    3: "Parameters, gradients and optimizer state are sharded over {n}; a layer is gathered when it is used.",
}
_MEMORY = {
    "none": "Every residual is kept for the backward pass, which needs the most memory and no recomputation.",
    "dots": "The results of matrix products are kept; the backward pass recomputes the operations between them.",
    "full": "Only each block's input is kept, and the backward pass recomputes the block.",
    "jax": "The residuals that one of JAX's policies selects are kept for the backward pass.",
    "sqrt": "The input of every sqrt(n)-th of n blocks is kept, and the backward pass recomputes the other blocks.",
    "periodic": "The input of one block in each period is kept, and the backward pass recomputes the blocks between.",
    "revolve": "Up to the given number of block inputs are kept, chosen for the fewest forward passes.",
    "chain": "Kept residuals and recomputed blocks are chosen for the least time within the given memory.",
    "save": "Each block keeps the residuals that make recomputation the cheapest within the given memory.",
    "greedy": "Each block keeps the residuals that a greedy rule chose within the given memory.",
    "dtr_static": "Each block keeps the residuals that DTR's score chose within the given memory.",
    "offload": "Some residuals stay in host memory until the backward pass; the given amount stays on the device.",
    "file": "The residuals that each block keeps were read from a file.",
}
_ATTENTION = {
    "auto": "The implementation depends on the device.",
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
    "fp8": "8-bit floating point (e4m3; e5m2 for gradients), with a scale for each operand",
    "int8": "8-bit integers, also for gradients, with a scale for each channel",
    "int4": "4-bit integers, and gradients to powers of four in two phases",
}


def axis_sizes_of_mesh(mesh: Any) -> dict[str, int]:
    """Return the number of devices along each axis of a mesh, without axes of one device.

    Args:
        mesh: text such as "data:2,fsdp:4", or a dict of axis sizes. For any other value, the result is empty, and also
            for a mesh of 2^31 devices or more.

    Example:
        >>> axis_sizes_of_mesh("data:2,fsdp:4"), axis_sizes_of_mesh({"data": 1, "tensor": 2}), axis_sizes_of_mesh(None)
        ({'data': 2, 'fsdp': 4}, {'tensor': 2}, {})
    """
    if isinstance(mesh, str):
        axis_parts = [axis_text.partition(":") for axis_text in mesh.split(",") if ":" in axis_text]
        axis_sizes = {axis.strip(): whole_number(size_text.strip()) for axis, _, size_text in axis_parts}
    else:
        axis_sizes = mesh if isinstance(mesh, dict) else {}
    sizes_above_one = {str(axis): size for axis, size in axis_sizes.items() if type(size) is int and size > 1}
    return sizes_above_one if math.prod(sizes_above_one.values()) <= MAX_INT32 else {}


def axis_sizes_of_run(plan: dict[str, Any], layout: dict[str, Any]) -> dict[str, int]:
    """Return the number of devices along each axis of a run's mesh. If `layout` has no mesh, it is that of the plan.

    Example:
        >>> axis_sizes_of_run({"mesh": "data:2"}, {"mesh": {"fsdp": 4}}), axis_sizes_of_run({"mesh": "data:2"}, {})
        ({'fsdp': 4}, {'data': 2})
    """
    return axis_sizes_of_mesh(layout["mesh"] if layout.get("mesh") is not None else plan.get("mesh"))


def plan_in_words(plan: dict[str, Any], layout: dict[str, Any], experiment: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the effects of a plan as pairs (topic, sentences).

    Args:
        plan: content of plan.json; fields may be missing.
        layout: content of layout.json; if it has a mesh, the plan's mesh is ignored.
        experiment: content of experiment.json, with the number of rows in a batch and the optimizer.

    Example:
        >>> for topic, words in plan_in_words({"mesh": "data:4", "memory": "full"}, {}, {"batch": 64}):
        ...     print(topic, "|", words)
        Mesh | 4 devices along data (data parallel: each holds the model and processes a part of the batch).
        Batch | 64 rows, 16 for each of 4 parts.
        Memory: full | Only each block's input is kept, and the backward pass recomputes the block.
    """
    axis_sizes = axis_sizes_of_run(plan, layout)
    topics_and_sentences: list[tuple[str, str]] = []
    if plan or layout:
        topics_and_sentences.append(
            ("Mesh", _mesh_sentence(axis_sizes, is_automatic="mesh" in plan and plan["mesh"] is None))
        )
    row_count, microbatch_count = experiment.get("batch"), plan.get("microbatches", 1)
    if isinstance(row_count, int) and isinstance(microbatch_count, int) and microbatch_count > 0:
        topics_and_sentences.append(("Batch", _batch_sentence(row_count, axis_sizes, microbatch_count)))
    zero_stage = plan.get("zero")
    if isinstance(zero_stage, int) and zero_stage in _ZERO and not (zero_stage == 0 and not axis_sizes):
        fsdp_count = axis_sizes.get("fsdp", 1)
        master_text = " (with the float32 master parameters)" if plan.get("precision") == "bfloat16" else ""
        devices_text = f"{fsdp_count} devices" if fsdp_count > 1 else "a single device"
        topics_and_sentences.append(
            (f"ZeRO {zero_stage}", _ZERO[zero_stage].format(n=devices_text, master=master_text))
        )
    if plan.get("sequence_parallel"):
        topics_and_sentences.append(
            ("Sequence parallel", "Norms and residuals are split along the sequence over the tensor axis.")
        )
    if plan.get("pipeline"):
        topics_and_sentences.append((f"Pipeline: {plan['pipeline']}", _pipeline_sentences(str(plan["pipeline"]))))
    if "precision" in plan:
        topics_and_sentences.append(("Precision", _precision_sentences(plan)))
    rate_sentences = _rate_sentences(_object(experiment.get("optimizer")))
    if rate_sentences:
        topics_and_sentences.append(("Learning rate", " ".join(rate_sentences)))
    memory_text = plan.get("memory")
    if isinstance(memory_text, str):
        topics_and_sentences.append((f"Memory: {memory_text}", _MEMORY.get(memory_text.partition(":")[0], _UNKNOWN)))
    if "kernels" in plan:
        topics_and_sentences += _kernel_topics(str(plan["kernels"]))
    if plan.get("diloco"):
        topics_and_sentences.append((f"DiLoCo: {plan['diloco']}", _DILOCO))
    offload_fields = _object(plan.get("offload"))
    offload_sentences = [
        sentence for field, sentence in _OFFLOAD_SENTENCES.items() if offload_fields.get(field, "device") != "device"
    ]
    if offload_fields.get("optimizer_state") == "streamed":
        offload_sentences.append("Optimizer state passes through the device slice by slice.")
    if offload_fields.get("optimizer_state") == "host":
        offload_sentences.append("The host's CPU updates the master weights.")
    if offload_sentences:
        topics_and_sentences.append(("In host memory", " ".join(offload_sentences)))
    state_fields = _object(plan.get("state"))
    moment_format = str(state_fields.get("moments", "float32"))
    if moment_format != "float32":
        topics_and_sentences.append(
            (f"Optimizer state: {moment_format}", _MOMENT_SENTENCES.get(moment_format, _UNKNOWN))
        )
    if state_fields.get("master") == "split":
        topics_and_sentences.append(
            ("Master weights", "Kept as bfloat16, which both passes read, and 8 bits of correction.")
        )
    if plan.get("unroll", 1) != 1:
        topics_and_sentences.append(("Layers", f"The scan over layers runs {plan['unroll']} layers in each iteration."))
    if plan.get("compiler", "default") != "default":
        topics_and_sentences.append(("Compiler", f"XLA compiles the step with these options: {plan['compiler']}."))
    other_fields = {name: value for name, value in plan.items() if name not in _DESCRIBED_FIELDS}
    if other_fields:
        topics_and_sentences.append(("Also", ", ".join(f"{name} = {value}" for name, value in other_fields.items())))
    return topics_and_sentences


_UNKNOWN = "This version of jaxscale has no description of this choice."
_OFFLOAD_SENTENCES = {
    "weights": "Master weights stay on the host; a block's weights are copied to the device when the block runs.",
    "gradients": "Gradients of the offloaded weights are copied to the host as they are computed.",
    "optimizer_state": "Optimizer state stays on the host.",
}
_DILOCO = (
    "Each replica trains independently, with its own optimizer. After a fixed number of steps, the shared weights move "
    "by the replicas' mean change, and all replicas continue from the new weights."
)
_MOMENT_SENTENCES = {
    "int8": "Moments are kept in 8 bits (softsign and square-root companding) with a scale for each block of a column.",
    "dynamic8": "Moments are kept in 8 bits by Dettmers' dynamic map, with a scale for each block of a column.",
    "int4": "Moments are kept in 4 bits, the second without a zero, with a scale for each block of a column.",
    "fp8": "Moments are kept as 8-bit floating point (e4m3), with a scale for each block of a column.",
}
_DESCRIBED_FIELDS = (
    "version", "type", "mesh", "zero", "sequence_parallel", "microbatches", "pipeline", "precision", "matmul", "reduce",
    "diloco", "memory", "offload", "state", "kernels", "unroll", "rules", "compiler",
)  # fmt: skip
"""Fields that the sentences describe, or that have no effect by themselves."""


def _object(value: Any) -> dict[str, Any]:
    """Return a JSON object unchanged; for any other JSON value, return an empty dict."""
    return value if isinstance(value, dict) else {}


def _rate_sentences(optimizer: dict[str, Any]) -> list[str]:
    """Return a sentence for each schedule that is the user's own function, given the JSON of an optimizer."""
    groups = _object(optimizer.get("groups"))
    owners_and_fields = [
        ("", optimizer),
        *((f" of the group {name}", _object(group)) for name, group in groups.items()),
    ]
    owners_and_function_names = (
        (owner, _object(fields.get("schedule")).get("callable")) for owner, fields in owners_and_fields
    )
    return [
        f"The learning rate{owner} is what the function {function_name} returns for the number of updates made."
        for owner, function_name in owners_and_function_names
        if isinstance(function_name, str)
    ]


def _option_values(text: str) -> dict[str, str]:
    """Return the values in a text such as "stages=4,stash=input", by name. Words without a value are left out."""
    option_parts = (option_text.partition("=") for option_text in text.split(","))
    return {name.strip(): value.strip() for name, equals_sign, value in option_parts if equals_sign}


def _kernel_topics(kernels_text: str) -> list[tuple[str, str]]:
    """Return pairs (topic, sentence) about loss, attention and other kernels, from the text of a plan's `kernels`."""
    option_values = _option_values(kernels_text)
    topics_and_sentences = []
    chunk_text = option_values.pop("loss_chunk", None)
    if chunk_text is not None:
        sentence = f"Computed for {chunk_text} positions of a row at a time: not all logits are in memory at once."
        topics_and_sentences.append(("Loss", sentence))
    elif "cross_entropy" not in option_values:
        topics_and_sentences.append(("Loss", "The logits of all positions are in memory at once."))
    attention = option_values.get("attention", "auto")
    topics_and_sentences.append((f"Attention: {attention}", _ATTENTION.get(attention, _UNKNOWN)))
    if set(option_values) - {"attention"} or kernels_text.startswith("reference"):
        sentence = "These kernels have the implementations named here; the others have the best one for the device."
        topics_and_sentences.append((f"Kernels: {kernels_text}", sentence))
    return topics_and_sentences


def _pipeline_sentences(pipeline_text: str) -> str:
    """Return sentences about the effects of a pipeline's options, given the text of the pipeline."""
    option_values = _option_values(pipeline_text)
    stages_text = option_values.get("stages")
    blocks_text = "with equal numbers of" if stages_text is None else f"of {stages_text.replace('+', ', ')}"
    sentences = [f"Stages {blocks_text} blocks run by this schedule."]
    if option_values.get("stash") == "input":
        sentences.append("A stage keeps only its input, and is recomputed before its backward pass.")
    if option_values.get("anneal", "0") != "0":
        sentences.append(f"Stale stages learn more slowly for the first {option_values['anneal']} updates.")
    if option_values.get("lowering") == "phased":
        sentences.append("The program has no branches: idle devices compute on zeros.")
    if "synchronous_steps" in option_values:
        sentences.append(f"The first {option_values['synchronous_steps']} steps are synchronous.")
    if option_values.get("correction", "0") not in ("0", "0.0"):
        sentences.append(f"Backward passes read weights corrected for the delay, by {option_values['correction']}.")
    return " ".join(sentences)


def _mesh_sentence(axis_sizes: dict[str, int], *, is_automatic: bool) -> str:
    """Return a sentence about the devices along each axis. `is_automatic`: whether the plan did not specify a mesh."""
    device_count = math.prod(axis_sizes.values())
    axis_phrases = [f"along {axis} ({_AXIS_PHRASES.get(axis, 'a custom axis')})" for axis in axis_sizes]
    if not axis_sizes:
        text = "A single device."
    elif len(axis_sizes) == 1:
        text = f"{device_count} devices {axis_phrases[0]}."
    else:
        shape_text = " \N{MULTIPLICATION SIGN} ".join(map(str, axis_sizes.values()))
        axis_texts = [f"{size} {phrase}" for size, phrase in zip(axis_sizes.values(), axis_phrases, strict=True)]
        text = f"{device_count} devices as {shape_text}: {'; '.join(axis_texts)}."
    return text + (" The plan specified no mesh: these are the devices of the machine." if is_automatic else "")


def _batch_sentence(row_count: int, axis_sizes: dict[str, int], microbatch_count: int) -> str:
    """Return a sentence about the global batch: its rows, their division over devices, and the microbatches."""
    part_count = axis_sizes.get("replica", 1) * axis_sizes.get("data", 1) * axis_sizes.get("fsdp", 1)
    text = f"{row_count:,} rows"
    if part_count > 1 and row_count % part_count == 0:
        text += f", {row_count // part_count:,} for each of {part_count} parts"
    if microbatch_count > 1:
        text += f", in {microbatch_count} successive microbatches with their gradients added"
    return text + "."


def _precision_sentences(plan: dict[str, Any]) -> str:
    """Return sentences about the dtypes of the computation, the matrix products and the gradient reduction."""
    precision, matmul = plan["precision"], str(plan.get("matmul"))
    pass_text = _MATMUL.get(matmul)
    products_text = f" Layers round the operands of products to {_PRODUCTS[matmul]}." if matmul in _PRODUCTS else ""
    reduction = str(plan.get("reduce") or "bfloat16")
    codec_text = "" if reduction in ("float32", "bfloat16") else f", encoded as {reduction} between replicas"
    if precision == "bfloat16":
        dtype = reduction if reduction in ("float32", "bfloat16") else "bfloat16"
        return (
            "Computes in bfloat16; master parameters, optimizer state, norms and the loss stay float32. "
            f"Gradients are reduced across devices in {dtype}{codec_text}.{products_text}"
        )
    text = f"Everything is {precision}" + (f"; matrix products run {pass_text}." if pass_text else ".") + products_text
    return text + f" Gradients are summed{codec_text}." * bool(codec_text)
