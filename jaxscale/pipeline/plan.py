"""Pipeline plans: a schedule's name, its numbers of devices and microbatches, and options, with a short text form."""

import dataclasses
import functools
import re
from typing import Any, Literal

from jaxscale.errors import UserError, near_miss, unknown
from jaxscale.pipeline.csv import read_csv
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.schedules import METHODS
from jaxscale.values import check_types, parse
from jaxscale.values.annotations import field_types
from jaxscale.values.drawn import drawn
from jaxscale.values.limits import MAX_AXIS_DEVICES, MAX_LAYERS, check_at_most


def _form_template(method: Method) -> str:
    """Return the template of a method's text form, such as `1f1b:PxM`."""
    size_template = "P" if method.streams else "PxM"
    return f"{method.name}:{size_template}" + ("[,v=V]" if method.interleaves else "")


def forms() -> dict[str, str]:
    """Return a dict from the name of each schedule to the template of its text form."""
    return {**{name: _form_template(method) for name, method in METHODS.items()}, "auto": "auto:P", "file": "file:PATH"}


OPTIONS = ("v", "stages", "stash", "lowering", "anneal", "correction", "synchronous_steps")
"""Names of the options of the text form: `v` is the number of stages per device; the other names are fields."""
_SIZE = re.compile(r"([0-9]{1,18})(?:x([0-9]{1,18}))?")


@functools.lru_cache(maxsize=128)
def _cached_schedule(method: Method, ranks: int, microbatches: int, chunks: int | None, updates: int) -> Schedule:
    """Return the schedule of a method; equal arguments get the schedule from a cache."""
    return method.schedule(ranks, microbatches, chunks, updates)


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """A schedule's name, its numbers of devices and microbatches, and options, with a text form.

    | text form | schedule |
    |---|---|
    | `NAME:PxM` | a synchronous schedule of `METHODS` with P devices on the pipe axis and M microbatches |
    | `interleaved:PxM,v=V`, `lockstep:PxM,v=V` | a synchronous schedule with V stages on each device |
    | `pipedream:P`, `pipemare:P` | an asynchronous schedule with an update for each microbatch |
    | `2bw:PxM` | an asynchronous schedule with an update for every M microbatches |
    | `auto:P` | the fastest schedule, number of microbatches and partition for P devices, chosen by simulation |
    | `file:PATH` | the schedule of a file in PyTorch's CSV format, which sets the devices and microbatches |

    Options come at the end of the text form, for example `1f1b:4x8,stash=input,stages=3+2+2+1`.

    Args:
        name: name of a method, or `auto` or `file`.
        ranks: P, number of devices on the pipe axis; `None` for a file.
        microbatches: M, number of microbatches per update of the weights; `None` if the text form has no M.
        chunks: V, number of stages per device; `None`: the default of the method.
        path: path of the file.
        stages: number of blocks of each stage, in order; `None`: every stage has the same number of blocks.
        stash: what a stage keeps from a forward to its backward. "residuals": the residuals that the memory plan of
            each block selects. "input": only the stage's input; the backward runs the forward again.
        lowering: how the schedule becomes a program. "switch": each tick has a branch for each kind of action, and idle
            devices do nothing. "phased": the program has no branches, and its ticks have fixed kinds. Idle devices
            compute on zeros and drop the results. Each tick must have only one kind (lockstep, gpipe).
        anneal: number of updates over which PipeMare's rescheduling fades. Rescheduling gives stages with stale weights
            smaller learning rates. 0: no rescheduling; `None`: a quarter of the run for pipemare, otherwise 0.
        correction: strength of PipeMare's correction of the weights that backwards read, at least 0 and below 1. It is
            the share of a weight change that is left in the correction after the delay of the stage. 0: no correction;
            `None`: exp(-2) = 0.135.
        synchronous_steps: number of synchronous training steps before an asynchronous pipeline is filled.

    Example:
        >>> plan = PipelinePlan.parse("interleaved:4x8,v=2")
        >>> str(plan), plan.schedule().stages
        ('interleaved:4x8,v=2', 8)
        >>> PipelinePlan.parse("1f1b:2x4,stages=3+1,stash=input").stages
        (3, 1)
        >>> PipelinePlan.parse("chimera:3x6")
        Traceback (most recent call last):
        jaxscale.errors.UserError: schedule chimera: got 3 devices, expected an even number: two directions share them
    """

    name: str
    ranks: int | None = None
    microbatches: int | None = None
    chunks: int | None = None
    path: str | None = None
    stages: tuple[int, ...] | None = None
    stash: Literal["residuals", "input"] = "residuals"
    lowering: Literal["switch", "phased"] = "switch"
    anneal: int | None = None
    correction: float | None = None
    synchronous_steps: int = 0

    _repr_html_ = drawn

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("anneal", "synchronous_steps"):
            if (getattr(self, name) or 0) < 0:
                raise UserError(f"pipeline {name}: got {getattr(self, name)}, expected 0 or more")
        if self.correction is not None and not 0 <= self.correction < 1:
            raise UserError(f"pipeline correction: got {self.correction}, expected 0 (none) or more, and less than 1")
        if self.name not in forms():
            raise unknown("pipeline schedule", self.name, forms())
        method = METHODS.get(self.name)
        is_field_required = {
            "ranks": self.name != "file",
            "microbatches": method is not None and not method.streams,
            "path": self.name == "file",
        }
        for field, is_required in is_field_required.items():
            if (getattr(self, field) is not None) != is_required:
                verb = "needs" if is_required else "takes no"
                hint = ". Each microbatch is an update; only 2bw takes several" if method and method.streams else ""
                raise UserError(f"pipeline {self.name} {verb} {field}: write {forms()[self.name]}{hint}")
        if method is not None:
            assert self.ranks is not None
            method.check(self.ranks, 1 if self.microbatches is None else self.microbatches, self.chunks)
        elif self.chunks is not None:
            raise UserError(f"pipeline {self.name} takes no v: write {forms()[self.name]}")
        elif self.ranks is not None:
            if self.ranks < 1:
                raise UserError(f"pipeline {self.name}: got {self.ranks} devices, expected 1 or more")
            check_at_most(f"pipeline {self.name}: number of devices", self.ranks, MAX_AXIS_DEVICES)
        if self.stages is not None:
            check_at_most(f"pipeline {self.name}: number of stages", len(self.stages), MAX_LAYERS)

    @classmethod
    def parse(cls, text: str) -> "PipelinePlan":
        """Parse the text form of a plan.

        Raises:
            UserError: the name or an option is unknown (the message suggests the nearest name), numbers are missing or
                superfluous, or the method has no schedule for these numbers.
        """
        name_text, colon, arguments = text.strip().partition(":")
        name = name_text.lower()
        if name not in forms():
            raise unknown("pipeline schedule", name, forms())
        size_text, *option_words = arguments.split(",")
        if name == "file":  # the text is a path, which may contain commas
            while option_words and option_words[0].partition("=")[0].strip() not in OPTIONS:
                size_text += f",{option_words.pop(0)}"
        options: dict[str, Any] = {}
        for option_word in option_words:
            option, _, setting_text = (part.strip() for part in option_word.partition("="))
            if option in options or option not in OPTIONS:
                hint = "" if option in options else near_miss(option, OPTIONS)
                raise UserError(
                    f"pipeline {text!r}: got {option_word.strip()!r}, expected {forms()[name]}, with "
                    f"{', '.join(OPTIONS[1:])} as options, each once{hint}"
                )
            option_type = int | None if option == "v" else field_types(cls)[option]
            options[option] = parse(setting_text.replace("+", ","), option_type, f"pipeline {text!r}: {option}")
        chunks = options.pop("v", None)
        if name == "file":
            return cls(name, path=size_text or None, chunks=chunks, **options)
        size_match = _SIZE.fullmatch(size_text.strip().lower())
        if not size_match:
            reason = f"got {size_text!r}" if colon else "got no numbers"
            raise UserError(f"pipeline {text!r}: {reason}, expected {forms()[name]}: P devices, M microbatches")
        ranks_text, microbatches_text = size_match.groups()
        microbatches = None if microbatches_text is None else int(microbatches_text)
        return cls(name, int(ranks_text), microbatches, chunks, **options)

    def __str__(self) -> str:
        options_text = ""
        for name in OPTIONS[1:]:
            setting = getattr(self, name)
            if setting != getattr(type(self), name):
                options_text += f",{name}={'+'.join(map(str, setting)) if isinstance(setting, tuple) else setting}"
        return self.form + options_text

    @property
    def form(self) -> str:
        """The text form of the plan without its options."""
        if self.path is not None:
            return f"file:{self.path}"
        size_text = str(self.ranks) if self.microbatches is None else f"{self.ranks}x{self.microbatches}"
        return f"{self.name}:{size_text}" + ("" if self.chunks is None else f",v={self.chunks}")

    @property
    def asynchronous(self) -> bool:
        """Whether the weights are updated inside the schedule."""
        return self.name in METHODS and METHODS[self.name].steps

    def shape(self) -> tuple[int, int]:
        """Return (ranks, microbatches): the number of devices on the pipe axis, and of microbatches in a batch.

        Raises:
            UserError: the file is missing or invalid, or the schedule of `auto` has not been chosen yet.

        Example:
            >>> PipelinePlan.parse("pipedream:4").shape()
            (4, 1)
        """
        if self.path is None and self.ranks is not None and self.name != "auto":
            return self.ranks, self.microbatches or 1
        schedule = self.schedule()
        return schedule.ranks, schedule.microbatches

    def schedule(self, updates: int = 1, ranks: int | None = None) -> Schedule:
        """Make the schedule of the plan.

        Args:
            updates: number of updates of an asynchronous schedule.
            ranks: number of devices on the mesh's pipe axis; the schedule must be for this number. `None`: not checked.

        Raises:
            UserError: the file is missing or invalid, the schedule is for another number of devices, or the schedule of
                `auto` has not been chosen yet.
        """
        if self.name == "auto":
            raise UserError(f"pipeline {self}: its schedule is not chosen yet; name a schedule, such as 1f1b:4x8")
        if self.path is not None:
            schedule = read_csv(self.path)
        else:
            assert self.ranks is not None
            microbatches = 1 if self.microbatches is None else self.microbatches
            schedule = _cached_schedule(METHODS[self.name], self.ranks, microbatches, self.chunks, updates)
        if ranks not in (None, schedule.ranks):
            raise UserError(
                f"pipeline {self} is a schedule for {schedule.ranks} devices, but the pipe axis has {ranks}. "
                f"Give the axis {schedule.ranks} devices, or choose another schedule"
            )
        return schedule


def schedule_of(schedule: Schedule | str) -> Schedule:
    """Return a given schedule unchanged, or the schedule that a text such as "1f1b:4x8" specifies.

    Raises:
        UserError: the text is not the text form of a plan, or the plan has no schedule yet (`auto`).

    Example:
        >>> schedule_of("1f1b:2x4").live
        (2, 1)
    """
    return PipelinePlan.parse(schedule).schedule() if isinstance(schedule, str) else schedule
