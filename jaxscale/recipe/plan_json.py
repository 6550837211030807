"""Upgrade of plans of version 1, whose fields of `pipeline`, `offload`, `state` and `kernels` were on the top level."""

from collections.abc import Mapping
from typing import Any

PIPELINE_FIELDS = ("stages", "stash", "lowering", "anneal", "correction", "synchronous_steps")
"""Fields of version 1 that are now options of `pipeline`."""
OFFLOAD_FIELDS = ("weights", "gradients", "optimizer_state")
"""Fields of version 1 that are now fields of `offload`."""
STATE_FIELDS = {"state": "moments", "master": "master"}
"""The field of `state` that replaces each field of version 1, by the name of the old field."""
MOVED_FIELDS = {
    **{
        name: f"pipeline, as an option: such as 1f1b:4x8,{name}={example}"
        for name, example in zip(PIPELINE_FIELDS, ("3+2+2+1", "input", "phased", "100", "0.1", "50"), strict=True)
    },
    **{name: f"offload.{name}" for name in OFFLOAD_FIELDS},
    **{name: f"state.{new_name}" for name, new_name in STATE_FIELDS.items()},
    "attention": "kernels, such as attention=chunked",
    "loss_chunk": "kernels, such as loss_chunk=128",
}
"""A text about the field or option that replaces each field of version 1, by the name of the old field."""


def upgrade(data: Any) -> Any:
    """Return the JSON of a plan in version 2, from the JSON in version 1; any other JSON is returned unchanged.

    Example:
        >>> upgrade({"pipeline": "1f1b:2x4", "stash": "input", "stages": [3, 1], "weights": "host", "state": "int8"})
        {'pipeline': '1f1b:2x4,stages=3+1,stash=input', 'offload': {'weights': 'host'}, 'state': {'moments': 'int8'}}
    """
    if not isinstance(data, Mapping):
        return data
    old_fields = {
        name: value for name, value in data.items() if name in MOVED_FIELDS and not isinstance(value, Mapping)
    }
    new_fields = {name: value for name, value in data.items() if name not in old_fields}
    pipeline_text = new_fields.get("pipeline")
    if isinstance(pipeline_text, str):
        default_by_field = {"stash": "residuals", "lowering": "switch", "synchronous_steps": 0}
        option_texts = []
        for name in PIPELINE_FIELDS:
            value = old_fields.get(name)
            if name in old_fields and value != default_by_field.get(name):
                value_text = "+".join(map(str, value)) if isinstance(value, list | tuple) else value
                option_texts.append(f"{name}={value_text}")
        new_fields["pipeline"] = ",".join([pipeline_text, *option_texts])
    new_groups = {
        "offload": {name: old_fields[name] for name in OFFLOAD_FIELDS if name in old_fields},
        "state": {new_name: old_fields[name] for name, new_name in STATE_FIELDS.items() if name in old_fields},
    }
    new_fields |= {name: group for name, group in new_groups.items() if group}
    attention, loss_chunk = old_fields.get("attention"), old_fields.get("loss_chunk")
    kernel_texts = [f"attention={attention}"] * (attention not in (None, "auto"))
    kernel_texts += [f"loss_chunk={loss_chunk}"] * (loss_chunk is not None)
    if kernel_texts:
        kernels_text = str(new_fields.get("kernels", "auto"))
        new_fields["kernels"] = ",".join([kernels_text, *kernel_texts] if kernels_text != "auto" else kernel_texts)
    return new_fields
