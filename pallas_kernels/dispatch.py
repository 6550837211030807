"""Which implementation of a kernel runs: always one that works, never a guess.

A kernel lists its implementations, best first; the last runs anywhere. `choose` asks each whether it can run a case on
a target. Where the target is not known while tracing (no mesh in force), a choice has one implementation per platform,
and `by_platform` lets lowering decide (`jax.lax.platform_dependent`): no backend is guessed, so a program compiled for
a machine that is not here has the kernels of that machine. A custom_vjp calls `by_platform` inside its forward and
inside its backward, with the same `Choice`: around it every branch's residuals would be kept.

An implementation that the caller names runs, or raises an error with the reason. Only a named one may be interpreted.
What calls inside a program take can be named from outside it (`naming`), and listened to (`noting`): the answer to "am
I on the fast path?" is what was chosen while the program was traced.
"""

import contextlib
import contextvars
import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from pallas_kernels.target import PROVED, Target

NAMES: Mapping[str, tuple[str, ...]] = {
    "adam8": ("tpu", "gpu", "reference"),
    "attention": ("tpu", "gpu", "cudnn", "reference", "chunked"),
    "cross_entropy": ("chunked", "tpu", "reference"),
    "grouped_matmul": ("gpu", "ragged", "reference"),
    "layer_norm": ("tpu", "gpu", "reference"),
    "quantize": ("tpu", "gpu", "reference"),
    "rms_norm": ("tpu", "gpu", "reference"),
    "top_k": ("tpu", "gpu", "reference"),
}
"""Names of implementations by kernel, which go by their public functions; they are known before a kernel is loaded."""


class CannotRun(NotImplementedError):
    """A named implementation cannot run a case on a target."""


def _always(target: Target, case: Any) -> str | None:
    return None


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute a kernel.

    Args:
        name: "tpu", "gpu", "chunked", "reference", ..
        platform: "tpu" or "gpu" where it runs there alone; None: anywhere.
        hopper: it needs a GPU of compute capability 9.0.
        chips: TPUs for which it was compiled, where it is for TPUs; it runs on no other.
        named: it runs where it is named, and is never chosen by itself.
        supports: of (target, case): why it cannot run the case there ("it needs ..., not ..."), None if it can. Asked
            after the platform is known to be right; shapes, dtypes and options alone decide.
    """

    name: str
    platform: str | None = None
    hopper: bool = False
    named: bool = False
    chips: Sequence[str] = PROVED
    supports: Callable[[Target, Any], str | None] = _always

    def why_not(self, target: Target, case: Any, *, interpret: bool = False) -> str | None:
        """Why this one cannot run a case on a target (of a known platform); None if it can.

        Args:
            target: where; when interpreting one of its own platform.
            case: what the kernel's `supports` functions read.
            interpret: it is to be interpreted.
        """
        if not interpret:
            if self.platform not in (None, target.platform):
                where = "TPUs" if self.platform == "tpu" else "GPUs"
                return f"it is for {where}, and the target is {target.platform}"
            if self.hopper and not target.hopper:
                if target.chip is None:
                    return "it needs compute capability 9.0 (H100, H200), and the chip is not known: pass platform="
                return f"it needs compute capability 9.0 (H100, H200), and the target is {target.chip}"
            if self.platform == "tpu" and target.chip not in (None, *self.chips):
                chips = f"{', '.join(self.chips[:-1])} and {self.chips[-1]}"
                return f"it was compiled for TPU {chips} alone, and the target is {target.chip}"
        return self.supports(target, case)


@dataclasses.dataclass(frozen=True)
class Choice:
    """Names of the implementations that run on TPU, on GPU and anywhere else; hashable, for a custom_vjp's statics.

    Args:
        tpu, gpu, default: names.
        kernel: that they are of, for messages.
    """

    tpu: str
    gpu: str
    default: str
    kernel: str = dataclasses.field(default="kernel", repr=False, compare=False)


def choose(
    kernel: str,
    implementations: Sequence[Implementation],
    case: Any,
    target: Target,
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> Choice:
    """The implementations that run a case.

    Args:
        kernel: its name, for messages.
        implementations: best first; the last that is not `named` runs anywhere.
        case: what `supports` reads.
        target: where it will run.
        implementation: None for the best one of each platform; a name for that one alone.
        interpret: the named one is to be interpreted, wherever this runs.

    Raises:
        ValueError: an unknown name; nothing named, and yet to be interpreted.
        CannotRun: the named one cannot run the case on the target.

    Example:
        >>> ways = (Implementation("tpu", "tpu"), Implementation("reference"))
        >>> choose("twice", ways, None, Target())
        Choice(tpu='tpu', gpu='reference', default='reference')
        >>> choose("twice", ways, None, Target("cpu"), implementation="tpu")
        Traceback (most recent call last):
        pallas_kernels.dispatch.CannotRun: twice: implementation 'tpu' cannot run: it is for TPUs, and the target is \
cpu. Pass implementation=None to take one that can.
    """
    if implementation is None and not interpret:
        implementation = _names.get().get(kernel)
    choice = _choose(kernel, implementations, case, target, implementation, interpret)
    if listening():
        note(_explained(kernel, implementations, case, target, implementation, choice), case)
    return choice


def _choose(
    kernel: str,
    implementations: Sequence[Implementation],
    case: Any,
    target: Target,
    implementation: str | None,
    interpret: bool = False,
) -> Choice:
    names = [candidate.name for candidate in implementations]
    if implementation is None:
        if interpret:
            raise ValueError(f"{kernel}: interpret needs a named implementation, one of {', '.join(names)}")
        where = {name: target if target.platform else target.on(name) for name in ("tpu", "gpu", "cpu")}
        return Choice(*(_best(implementations, case, where[name]) for name in ("tpu", "gpu", "cpu")), kernel=kernel)
    if implementation not in names:
        near = _near(implementation, names)
        raise ValueError(f"{kernel}: unknown implementation {implementation!r}: expected None or one of {names}{near}")
    candidate = implementations[names.index(implementation)]
    place = target if target.platform and not interpret else target.on(candidate.platform or "cpu")
    reason = candidate.why_not(place, case, interpret=interpret)
    if reason:
        raise CannotRun(
            f"{kernel}: implementation {implementation!r} cannot run: {reason}. "
            "Pass implementation=None to take one that can."
        )
    return Choice(implementation, implementation, implementation, kernel)


def _near(given: Any, names: Sequence[str]) -> str:
    """The end of a message on a name that is not known."""
    near = difflib.get_close_matches(str(given), names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _best(implementations: Sequence[Implementation], case: Any, target: Target) -> str:
    return next(one.name for one in implementations if not one.named and one.why_not(target, case) is None)


def by_platform(choice: Choice, branches: Mapping[str, Callable[..., Any]], *args: Any) -> Any:
    """Run the chosen implementation; where it depends on the platform, lowering picks.

    Args:
        choice: of `choose`.
        branches: by name, functions of `args` that return alike arrays; only the chosen ones are traced.
        args: arrays, and trees of them.

    Raises:
        CannotRun: under `jax.vmap`, where JAX cannot map what was chosen.
    """
    names = {"tpu": choice.tpu, "cuda": choice.gpu}
    special = {platform: branches[name] for platform, name in names.items() if name != choice.default}
    try:
        if not special:
            return branches[choice.default](*args)
        return lax.platform_dependent(*args, default=branches[choice.default], **special)
    except NotImplementedError as error:
        if isinstance(error, CannotRun) or not _mapped(args):
            raise
        chosen = " or ".join(dict.fromkeys((*names.values(), choice.default)))
        raise CannotRun(
            f"{choice.kernel}: JAX {jax.__version__} cannot map implementation {chosen} by jax.vmap: {error}. Give the "
            "mapped dim as one of the arrays', or pass implementation='reference'"
        ) from error


def _mapped(args: Any) -> bool:
    """Whether `jax.vmap` maps any of the arrays."""
    return any(type(leaf).__name__ == "BatchTracer" for leaf in jax.tree.leaves(args))


def first_order(
    kernel: str, run: Callable[..., Any], lacks: str = "second derivatives (nor forward-mode ones)"
) -> Callable[..., Any]:
    """A pass of a kernel that refuses to be differentiated itself.

    Args:
        kernel: its name, for the message.
        run: a function of arrays.
        lacks: what there is not, for the message.
    """

    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(f"{kernel}: kernels have no {lacks}; pass implementation='reference'")

    wrapped = jax.custom_jvp(run)
    wrapped.defjvp(refuse)
    return wrapped


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What runs a case on a target, and why each other implementation does not; print it.

    Args:
        kernel: its name.
        target: where.
        chosen: the implementation that runs.
        reasons: by name, of every other one.
        why: why no kernel of the platform runs; None where one does, or where plain JAX is the best there is.
    """

    kernel: str
    target: Target
    chosen: str
    reasons: Mapping[str, str]
    why: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.kernel} on {self.target}: {self.chosen}"]
        return "\n".join([*lines, *(f"  not {name}: {reason}" for name, reason in self.reasons.items())])


def explain(
    kernel: str, implementations: Sequence[Implementation], case: Any, target: Target, implementation: str | None = None
) -> Explanation:
    """What would run a case on a target of a known platform.

    Where nothing is named and notes are taken it is one of them: who asks while tracing goes by the answer.

    Args:
        kernel: its name.
        implementations: best first.
        case: what `supports` reads.
        target: where; its platform must be known.
        implementation: the named one, if any.

    Raises:
        ValueError: the target's platform is not known; an unknown name.
        CannotRun: the named one cannot run there.

    Example:
        >>> ways = (Implementation("gpu", "gpu", hopper=True), Implementation("reference"))
        >>> print(explain("twice", ways, None, Target("gpu", "a100")))
        twice on gpu a100: reference
          not gpu: it needs compute capability 9.0 (H100, H200), and the target is a100
    """
    if target.platform is None:
        raise ValueError(f"{kernel}: explain needs a platform, such as 'gpu h200' or 'tpu v5e'")
    choice = _choose(kernel, implementations, case, target, implementation)
    explanation = _explained(kernel, implementations, case, target, implementation, choice)
    if implementation is None:
        note(explanation, case)
    return explanation


def _explained(
    kernel: str,
    implementations: Sequence[Implementation],
    case: Any,
    target: Target,
    implementation: str | None,
    choice: Choice,
) -> Explanation:
    """A choice, and why it was not another."""
    if target.platform is None and len({choice.tpu, choice.gpu, choice.default}) > 1:
        return Explanation(kernel, target, f"{choice.tpu} on TPU, {choice.gpu} on GPU, else {choice.default}", {})
    chosen, reasons = choice.default, {}
    for one in implementations:
        if one.name != chosen:
            place = target if target.platform else target.on(one.platform or "cpu")
            reason = one.why_not(place, case) or ("it runs only where it is named" if one.named else None)
            reasons[one.name] = reason or (f"{chosen} is named" if implementation else f"{chosen} comes before it")
    kernels = [one for one in implementations if one.platform is not None]
    if chosen in [one.name for one in kernels]:
        return Explanation(kernel, target, chosen, reasons)
    platform_kernels = [one.name for one in kernels if target.platform in (None, one.platform) and not one.named]
    why = reasons[platform_kernels[0]] if platform_kernels else None
    if not platform_kernels and any(not one.named for one in kernels):
        why = "kernels are for " + " and ".join(sorted({f"{one.platform}".upper() for one in kernels})[::-1])
    return Explanation(kernel, target, chosen, reasons, why)


Notes = list[tuple[Explanation, Any]]
"""What was chosen, and for which case, each pair once."""

_notes: contextvars.ContextVar[Notes | None] = contextvars.ContextVar("notes", default=None)
_nothing: Mapping[str, str] = {}
_names: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar("names", default=_nothing)


@contextlib.contextmanager
def noting(notes: Notes) -> Iterator[None]:
    """While tracing inside, every choice is added to `notes`.

    Example:
        >>> notes, ways = [], (Implementation("tpu", "tpu"), Implementation("reference"))
        >>> with noting(notes):
        ...     _ = choose("twice", ways, (128, 128), Target("cpu"))
        >>> [(found.kernel, found.chosen, found.why, case) for found, case in notes]
        [('twice', 'reference', 'kernels are for TPU', (128, 128))]
    """
    token = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(token)


def listening() -> bool:
    """Whether notes are being taken."""
    return _notes.get() is not None


def note(found: Explanation, case: Any = None) -> None:
    """Add a choice to the notes that are being taken, if any: one that no `choose` has made.

    Args:
        found: what runs.
        case: of which shapes and options.
    """
    notes = _notes.get()
    if notes is not None and (found, case) not in notes:
        notes.append((found, case))


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """While tracing inside, calls that name no implementation take the one that is named for their kernel here.

    Args:
        names: implementation by kernel, of `NAMES`.

    Raises:
        ValueError: an unknown kernel, or an unknown implementation of it.

    Example:
        >>> ways = (Implementation("tpu", "tpu"), Implementation("reference"))
        >>> with naming({"top_k": "reference"}):
        ...     choose("top_k", ways, None, Target("tpu", "v5e")).default
        'reference'
    """
    for kernel, name in names.items():
        if kernel not in NAMES:
            raise ValueError(f"unknown kernel {kernel!r}: expected one of {list(NAMES)}{_near(kernel, list(NAMES))}")
        if name not in NAMES[kernel]:
            raise ValueError(
                f"{kernel}: unknown implementation {name!r}: expected one of {list(NAMES[kernel])}"
                f"{_near(name, NAMES[kernel])}"
            )
    token = _names.set(names)
    try:
        yield
    finally:
        _names.reset(token)
