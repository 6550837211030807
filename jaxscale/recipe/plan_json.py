"""Earlier forms of a plan: version 1 had the fields of pipeline, offload, state and kernels side by side."""

from collections.abc import Mapping
from typing import Any

OF_PIPELINE = ("stages", "stash", "lowering", "anneal", "correction", "synchronous_steps")
"""Fields of version 1 that are options of `pipeline` now."""
OF_OFFLOAD = ("weights", "gradients", "optimizer_state")
"""Fields of version 1 that are fields of `offload` now."""
OF_STATE = {"state": "moments", "master": "master"}
"""The field of `state` that replaces each of these fields of version 1."""
MOVED = {
    **{
        name: f"pipeline, as an option: such as 1f1b:4x8,{name}={example}"
        for name, example in zip(OF_PIPELINE, ("3+2+2+1", "input", "phased", "100", "0.1", "50"), strict=True)
    },
    **{name: f"offload.{name}" for name in OF_OFFLOAD},
    **{name: f"state.{new_name}" for name, new_name in OF_STATE.items()},
    "attention": "kernels, such as attention=chunked",
    "loss_chunk": "kernels, such as loss_chunk=128",
}
"""The field or option that replaces each field of version 1, by the old field's name."""


def upgraded(data: Any) -> Any:
    """The JSON of a plan in version 2, from that in version 1; other JSON is returned unchanged.

    Example:
        >>> upgraded({"pipeline": "1f1b:2x4", "stash": "input", "stages": [3, 1], "weights": "host", "state": "int8"})
        {'pipeline': '1f1b:2x4,stages=3+1,stash=input', 'offload': {'weights': 'host'}, 'state': {'moments': 'int8'}}
    """
    if not isinstance(data, Mapping):
        return data
    old_fields = {name: value for name, value in data.items() if name in MOVED and not isinstance(value, Mapping)}
    new_fields = {name: value for name, value in data.items() if name not in old_fields}
    pipeline_text = new_fields.get("pipeline")
    if isinstance(pipeline_text, str):
        defaults = {"stash": "residuals", "lowering": "switch", "synchronous_steps": 0}
        names = [name for name in OF_PIPELINE if name in old_fields and old_fields[name] != defaults.get(name)]
        options = {name: old_fields[name] for name in names}
        values = ("+".join(map(str, value)) if isinstance(value, list | tuple) else value for value in options.values())
        option_texts = [f"{name}={value}" for name, value in zip(options, values, strict=True)]
        new_fields["pipeline"] = ",".join([pipeline_text, *option_texts])
    new_groups = {
        "offload": {name: old_fields[name] for name in OF_OFFLOAD if name in old_fields},
        "state": {new_name: old_fields[name] for name, new_name in OF_STATE.items() if name in old_fields},
    }
    new_fields |= {name: group for name, group in new_groups.items() if group}
    attention, loss_chunk = old_fields.get("attention"), old_fields.get("loss_chunk")
    words = [f"attention={attention}"] * (attention not in (None, "auto"))
    words += [f"loss_chunk={loss_chunk}"] * (loss_chunk is not None)
    if words:
        kernels_text = new_fields.get("kernels", "auto")
        new_fields["kernels"] = ",".join([kernels_text, *words] if kernels_text != "auto" else words)
    return new_fields
