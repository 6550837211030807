"""Earlier forms of a plan: version 1 had the fields of pipeline, offload, state and kernels side by side."""

from collections.abc import Mapping
from typing import Any

OF_PIPELINE = ("stages", "stash", "lowering", "anneal", "correction", "synchronous_steps")
"""Fields of version 1 that are options of `pipeline` now."""
MOVED = {
    **{
        name: f"pipeline, as an option: such as 1f1b:4x8,{name}={example}"
        for name, example in zip(OF_PIPELINE, ("3+2+2+1", "input", "phased", "100", "0.1", "50"), strict=True)
    },
    **{name: f"offload.{name}" for name in ("weights", "gradients", "optimizer_state")},
    "state": "state.moments",
    "master": "state.master",
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
    old = {name: value for name, value in data.items() if name in MOVED and not isinstance(value, Mapping)}
    new = {name: value for name, value in data.items() if name not in old}
    pipeline = new.get("pipeline")
    if isinstance(pipeline, str):
        options = {"stash": "residuals", "lowering": "switch", "synchronous_steps": 0}
        options = {name: old[name] for name in OF_PIPELINE if name in old and old[name] != options.get(name)}
        texts = ("+".join(map(str, value)) if isinstance(value, list | tuple) else value for value in options.values())
        words = [f"{name}={text}" for name, text in zip(options, texts, strict=True)]
        new["pipeline"] = ",".join([pipeline, *words])
    groups = {
        "offload": {name: old[name] for name in ("weights", "gradients", "optimizer_state") if name in old},
        "state": {new: old[name] for name, new in (("state", "moments"), ("master", "master")) if name in old},
    }
    new |= {name: group for name, group in groups.items() if group}
    attention, chunk = old.get("attention"), old.get("loss_chunk")
    words = [f"attention={attention}"] * (attention not in (None, "auto"))
    words += [f"loss_chunk={chunk}"] * (chunk is not None)
    if words:
        kernels = new.get("kernels", "auto")
        new["kernels"] = ",".join([kernels, *words] if kernels != "auto" else words)
    return new
