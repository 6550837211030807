"""The choice of the implementation of a kernel: always one that works, never a guess.

A kernel lists its implementations, best first; the last one runs anywhere. `choose` takes the first that can run a case
on a target. If the target is not known during tracing (no mesh is in force), a choice has one implementation per
platform, and `by_platform` leaves the decision to lowering (`jax.lax.platform_dependent`). No backend is guessed, so a
program that is compiled for another machine has the kernels for that machine. A custom_vjp calls `by_platform` with the
same `Choice` in its forward pass and in its backward pass. If `by_platform` surrounded the custom_vjp instead, JAX
would keep the residuals of every branch.

An implementation that the caller names either runs or raises an error with the reason. Only a named implementation may
be interpreted. The caller of a program can name implementations for all calls inside it (`naming`) and can record every
choice (`noting`): the choices that were made during tracing show whether the program is on the fast path.
"""

import contextlib
import contextvars
import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from pallas_kernels.target import COMPILED_TPUS, Target

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
"""Names of each kernel's implementations, by name of its public function; known before the kernel is loaded."""


class CannotRun(NotImplementedError):
    """A named implementation cannot run a case on a target."""


def _refuse_nothing(target: Target, case: Any) -> str | None:
    return None


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute a kernel.

    Args:
        name: "tpu", "gpu", "chunked", "reference", ..
        platform: "tpu" or "gpu" if it runs on that platform only; None if it runs anywhere.
        needs_hopper: whether it needs a GPU of compute capability 9.0.
        needs_name: whether it runs only if the caller names it.
        chips: for a TPU implementation, the chips for which it was compiled; it runs on no other TPU.
        why_unsupported: a function of (target, case) that returns the reason why this implementation cannot run the
            case on the target ("it needs ..., not ..."), or None if it can. The function is called only for targets of
            the right platform, and looks only at shapes, dtypes and options.
    """

    name: str
    platform: str | None = None
    needs_hopper: bool = False
    needs_name: bool = False
    chips: Sequence[str] = COMPILED_TPUS
    why_unsupported: Callable[[Target, Any], str | None] = _refuse_nothing

    def why_not(self, target: Target, case: Any, *, interpret: bool = False) -> str | None:
        """Return the reason why this implementation cannot run a case on a target, or None if it can.

        Args:
            target: where the case would run; a target of a known platform (with `interpret`, this implementation's).
            case: the shapes, dtypes and options that `why_unsupported` looks at.
            interpret: whether the implementation would run in Pallas' interpreter.
        """
        if not interpret:
            if self.platform not in (None, target.platform):
                devices = "TPUs" if self.platform == "tpu" else "GPUs"
                return f"it is for {devices}, and the target is {target.platform}"
            if self.needs_hopper and not target.hopper:
                if target.chip is None:
                    return "it needs compute capability 9.0 (H100, H200), and the chip is not known: pass platform="
                return f"it needs compute capability 9.0 (H100, H200), and the target is {target.chip}"
            if self.platform == "tpu" and target.chip not in (None, *self.chips):
                chips_text = f"{', '.join(self.chips[:-1])} and {self.chips[-1]}"
                return f"it was compiled for TPU {chips_text} alone, and the target is {target.chip}"
        return self.why_unsupported(target, case)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementations that run a case; hashable, so that a custom_vjp can take it as a static argument.

    Args:
        tpu, gpu, default: names of the implementations that run on TPU, on GPU and anywhere else.
        kernel: name of the kernel, for error messages.
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
    """Choose the implementations that run a case.

    Args:
        kernel: name of the kernel, for error messages.
        implementations: best first; the last one without `needs_name` runs anywhere.
        case: the shapes, dtypes and options that `why_unsupported` looks at.
        target: where the case will run.
        implementation: name of the only implementation to use; None for the best one on each platform.
        interpret: whether to run the named implementation in Pallas' interpreter, on any machine.

    Raises:
        ValueError: the name is unknown, or `interpret` is set and no implementation is named.
        CannotRun: the named implementation cannot run the case on the target.

    Example:
        >>> implementations = (Implementation("tpu", "tpu"), Implementation("reference"))
        >>> choose("twice", implementations, None, Target())
        Choice(tpu='tpu', gpu='reference', default='reference')
        >>> choose("twice", implementations, None, Target("cpu"), implementation="tpu")
        Traceback (most recent call last):
        pallas_kernels.dispatch.CannotRun: twice: implementation 'tpu' cannot run: it is for TPUs, and the target is \
cpu. Pass implementation=None to take one that can.
    """
    if implementation is None and not interpret:
        implementation = _implementation_by_kernel.get().get(kernel)
    choice = _choose(kernel, implementations, case, target, implementation, interpret)
    if is_noting():
        note(_explanation(kernel, implementations, case, target, implementation, choice), case)
    return choice


def _choose(
    kernel: str,
    implementations: Sequence[Implementation],
    case: Any,
    target: Target,
    implementation: str | None,
    interpret: bool = False,
) -> Choice:
    """Do what `choose` does, without recording the choice."""
    names = [candidate.name for candidate in implementations]
    if implementation is None:
        if interpret:
            raise ValueError(f"{kernel}: interpret needs a named implementation, one of {', '.join(names)}")
        targets = [target if target.platform else target.on(platform) for platform in ("tpu", "gpu", "cpu")]
        tpu, gpu, default = (_best(implementations, case, platform_target) for platform_target in targets)
        return Choice(tpu, gpu, default, kernel)
    if implementation not in names:
        hint = _suggestion(implementation, names)
        raise ValueError(f"{kernel}: unknown implementation {implementation!r}: expected None or one of {names}{hint}")
    candidate = implementations[names.index(implementation)]
    candidate_target = target if target.platform and not interpret else target.on(candidate.platform or "cpu")
    reason = candidate.why_not(candidate_target, case, interpret=interpret)
    if reason:
        raise CannotRun(
            f"{kernel}: implementation {implementation!r} cannot run: {reason}. "
            "Pass implementation=None to take one that can."
        )
    return Choice(implementation, implementation, implementation, kernel)


def _suggestion(unknown_name: Any, names: Sequence[str]) -> str:
    """The end of an error message about an unknown name: "; did you mean ..?", or "" if no name is similar."""
    similar_names = difflib.get_close_matches(str(unknown_name), names, n=1)
    return f"; did you mean {similar_names[0]!r}?" if similar_names else ""


def _best(implementations: Sequence[Implementation], case: Any, target: Target) -> str:
    """Name of the first implementation that can run the case on the target and need not be named by the caller."""
    return next(
        candidate.name
        for candidate in implementations
        if not candidate.needs_name and candidate.why_not(target, case) is None
    )


def by_platform(choice: Choice, branches: Mapping[str, Callable[..., Any]], *args: Any) -> Any:
    """Run the chosen implementation; if the choice depends on the platform, lowering picks the branch.

    Args:
        choice: the result of `choose`.
        branches: functions of `args`, by implementation name; all return arrays of the same shapes and dtypes. Only
            the functions of the chosen implementations are traced.
        args: arrays, or trees of arrays.

    Returns:
        The result of the branch that runs.

    Raises:
        CannotRun: the call is under `jax.vmap`, and JAX cannot map a chosen implementation.
    """
    name_by_platform = {"tpu": choice.tpu, "cuda": choice.gpu}
    branch_by_platform = {
        platform: branches[name] for platform, name in name_by_platform.items() if name != choice.default
    }
    try:
        if not branch_by_platform:
            return branches[choice.default](*args)
        return lax.platform_dependent(*args, default=branches[choice.default], **branch_by_platform)
    except NotImplementedError as error:
        if isinstance(error, CannotRun) or not _is_mapped(args):
            raise
        names_text = " or ".join(dict.fromkeys((*name_by_platform.values(), choice.default)))
        raise CannotRun(
            f"{choice.kernel}: JAX {jax.__version__} cannot map implementation {names_text} by jax.vmap: {error}. Make "
            "the mapped dim a dim of the arrays, or pass implementation='reference'"
        ) from error


def _is_mapped(args: Any) -> bool:
    """Whether `jax.vmap` maps any of the arrays."""
    return any(type(leaf).__name__ == "BatchTracer" for leaf in jax.tree.leaves(args))


def without_derivatives(
    kernel: str, function: Callable[..., Any], missing: str = "second derivatives (nor forward-mode ones)"
) -> Callable[..., Any]:
    """Wrap one pass of a kernel in a function that raises an error if JAX differentiates it.

    Args:
        kernel: name of the kernel, for the error message.
        function: the pass, a function of arrays.
        missing: the derivatives that the kernel does not have, for the error message.

    Raises:
        NotImplementedError: raised by the wrapped function when it is differentiated.
    """

    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(f"{kernel}: kernels have no {missing}; pass implementation='reference'")

    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(refuse)
    return wrapped


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation runs a case on a target, and why the others do not; `print` shows it in full.

    Args:
        kernel: name of the kernel.
        target: where the case runs.
        chosen: name of the implementation that runs.
        reasons: the reason why each other implementation does not run, by name of the implementation.
        why: why no kernel for the platform runs; None if a kernel runs, or if none would be better than plain JAX.
    """

    kernel: str
    target: Target
    chosen: str
    reasons: Mapping[str, str]
    why: str | None = None

    def __str__(self) -> str:
        reason_lines = [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join([f"{self.kernel} on {self.target}: {self.chosen}", *reason_lines])


def explain(
    kernel: str, implementations: Sequence[Implementation], case: Any, target: Target, implementation: str | None = None
) -> Explanation:
    """Explain which implementation would run a case on a target of a known platform.

    If no implementation is named, the explanation is also added to the notes that are being taken (`noting`), because
    code that asks for an explanation during tracing acts on the answer.

    Args:
        kernel: name of the kernel.
        implementations: best first.
        case: the shapes, dtypes and options that `why_unsupported` looks at.
        target: where the case would run; its platform must be known.
        implementation: name of the implementation to use; None for the best one.

    Raises:
        ValueError: the target has no platform, or the name is unknown.
        CannotRun: the named implementation cannot run the case on the target.

    Example:
        >>> implementations = (Implementation("gpu", "gpu", needs_hopper=True), Implementation("reference"))
        >>> print(explain("twice", implementations, None, Target("gpu", "a100")))
        twice on gpu a100: reference
          not gpu: it needs compute capability 9.0 (H100, H200), and the target is a100
    """
    if target.platform is None:
        raise ValueError(f"{kernel}: explain needs a platform, such as 'gpu h200' or 'tpu v5e'")
    choice = _choose(kernel, implementations, case, target, implementation)
    explanation = _explanation(kernel, implementations, case, target, implementation, choice)
    if implementation is None:
        note(explanation, case)
    return explanation


def _explanation(
    kernel: str,
    implementations: Sequence[Implementation],
    case: Any,
    target: Target,
    implementation: str | None,
    choice: Choice,
) -> Explanation:
    """The explanation of a choice that was made."""
    if target.platform is None and len({choice.tpu, choice.gpu, choice.default}) > 1:
        return Explanation(kernel, target, f"{choice.tpu} on TPU, {choice.gpu} on GPU, else {choice.default}", {})
    chosen_name, reasons = choice.default, {}
    for candidate in implementations:
        if candidate.name != chosen_name:
            candidate_target = target if target.platform else target.on(candidate.platform or "cpu")
            reason = candidate.why_not(candidate_target, case)
            if reason is None and candidate.needs_name:
                reason = "it runs only where it is named"
            order_text = f"{chosen_name} is named" if implementation else f"{chosen_name} comes before it"
            reasons[candidate.name] = reason or order_text
    kernels = [candidate for candidate in implementations if candidate.platform is not None]
    if chosen_name in [candidate.name for candidate in kernels]:
        return Explanation(kernel, target, chosen_name, reasons)
    automatic_kernels = [candidate for candidate in kernels if not candidate.needs_name]
    usable_names = [candidate.name for candidate in automatic_kernels if target.platform in (None, candidate.platform)]
    why = reasons[usable_names[0]] if usable_names else None
    if automatic_kernels and not usable_names:
        platforms = {f"{candidate.platform}".upper() for candidate in kernels}
        why = "kernels are for " + " and ".join(sorted(platforms, reverse=True))
    return Explanation(kernel, target, chosen_name, reasons, why)


Notes = list[tuple[Explanation, Any]]
"""Pairs of a choice's explanation and the case that it is for, without duplicates."""

_notes: contextvars.ContextVar[Notes | None] = contextvars.ContextVar("notes", default=None)
_NO_NAMES: Mapping[str, str] = {}
_implementation_by_kernel: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar(
    "implementation_by_kernel", default=_NO_NAMES
)


@contextlib.contextmanager
def noting(notes: Notes) -> Iterator[None]:
    """Add every choice that is made inside the context to `notes`.

    Example:
        >>> notes, implementations = [], (Implementation("tpu", "tpu"), Implementation("reference"))
        >>> with noting(notes):
        ...     _ = choose("twice", implementations, (128, 128), Target("cpu"))
        >>> [(explanation.kernel, explanation.chosen, explanation.why, case) for explanation, case in notes]
        [('twice', 'reference', 'kernels are for TPU', (128, 128))]
    """
    token = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(token)


def is_noting() -> bool:
    """Whether choices are being recorded (`noting`)."""
    return _notes.get() is not None


def note(explanation: Explanation, case: Any = None) -> None:
    """Add an explanation to the notes that are being taken, if any; for callers that do not use `choose`.

    Args:
        explanation: which implementation runs.
        case: the shapes, dtypes and options for which the implementation runs.
    """
    notes = _notes.get()
    if notes is not None and (explanation, case) not in notes:
        notes.append((explanation, case))


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Name the implementation for all calls inside the context that name none themselves.

    Args:
        names: name of the implementation for each kernel, by name of the kernel; both are names in `NAMES`.

    Raises:
        ValueError: a kernel or an implementation is unknown.

    Example:
        >>> implementations = (Implementation("tpu", "tpu"), Implementation("reference"))
        >>> with naming({"top_k": "reference"}):
        ...     choose("top_k", implementations, None, Target("tpu", "v5e")).default
        'reference'
    """
    for kernel, name in names.items():
        if kernel not in NAMES:
            raise ValueError(
                f"unknown kernel {kernel!r}: expected one of {list(NAMES)}{_suggestion(kernel, list(NAMES))}"
            )
        if name not in NAMES[kernel]:
            raise ValueError(
                f"{kernel}: unknown implementation {name!r}: expected one of {list(NAMES[kernel])}"
                f"{_suggestion(name, NAMES[kernel])}"
            )
    token = _implementation_by_kernel.set(names)
    try:
        yield
    finally:
        _implementation_by_kernel.reset(token)
