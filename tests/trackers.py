"""Stand-ins for services that track runs, with the calls of W&B and trackio that `docs/start/own_loop.md` uses.

They accept the parameters of the services' documentation alone, and refuse what the services refuse.
"""

import sys
from types import ModuleType

import pytest

PARAMETERS = {
    # docs.wandb.ai/ref/python/init: a part of them
    "wandb": ("entity", "project", "dir", "id", "name", "notes", "tags", "config", "group", "mode", "resume"),
    # huggingface.co/docs/trackio, version 0.26: a part of them
    "trackio": ("project", "name", "group", "space_id", "dataset_id", "config", "resume", "private", "auto_log_gpu"),
}


class TrackedRun:
    """One run of a service.

    Attributes:
        settings: the arguments of `init`.
        logged: pairs of a step and the numbers by name.
    """

    def __init__(self, settings):
        self.settings, self.logged, self.is_finished = settings, [], False

    def log(self, data, step=None):
        assert not self.is_finished, "a run that is finished takes no numbers"
        assert isinstance(step, int)
        assert all(isinstance(name, str) and isinstance(value, int | float) for name, value in data.items())
        assert not self.logged or step >= self.logged[-1][0], "W&B drops a step below the last one"
        self.logged.append((step, dict(data)))

    def finish(self):
        self.is_finished = True


def install(name: str, patch: pytest.MonkeyPatch) -> list[TrackedRun]:
    """Make a stand-in what `import NAME` finds, and return the list to which `init` appends its runs."""
    runs: list[TrackedRun] = []

    def init(**settings):
        assert set(settings) <= set(PARAMETERS[name]), f"{name}.init has no such parameter: {settings}"
        assert settings.get("resume", "never") in ("allow", "never", "must")
        runs.append(TrackedRun(settings))
        return runs[-1]

    module = ModuleType(name)
    module.init = init  # pyright: ignore[reportAttributeAccessIssue]
    patch.setitem(sys.modules, name, module)
    return runs
