"""Kernels: the implementations of kernels that a plan requests, as a value with a text form.

This module does not import JAX. A `KernelChoice` is an implementation that a step actually uses.
`step/traced_checks.py` records these choices while it traces the step.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.errors import UserError, near_miss, unknown
from jaxscale.values import check_types, parse

KNOWN = {
    "attention": ("tpu", "gpu", "cudnn", "splash", "chunked", "plain", "reference"),
    "adam8": ("reference",),
    "cross_entropy": ("tpu", "chunked", "reference"),
    "quantize": ("tpu", "gpu", "reference"),
    "top_k": ("tpu", "gpu", "reference"),
}
"""The implementations that a plan can name, by kernel. The names are those of `pallas_kernels`."""
PLATFORMS = {"tpu": "tpu", "gpu": "gpu", "cudnn": "gpu", "splash": "tpu"}
"""The platform of each implementation that does not run on all platforms."""
CODECS = ("quantize", "top_k")
"""Kernels that codecs use. The step passes the plan's choice of their implementations to `pallas_kernels.dispatch`."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The implementation of each kernel, and the chunk size of the loss.

    The text form is "auto", "reference" or "KERNEL=IMPLEMENTATION[,...]", with or without "loss_chunk=POSITIONS".

    Args:
        default: "auto" takes, for each kernel, the best implementation that runs on the platform; "reference" takes
            plain JAX.
        named: (kernel, implementation) for each kernel that does not follow the default.
        loss_chunk: number of target positions of a row for which the loss is computed at a time; `None` for all.

    Example:
        >>> Kernels.parse("attention=chunked").of("attention"), Kernels.parse("reference").of("attention")
        ('chunked', 'reference')
        >>> str(Kernels.parse("reference,loss_chunk=128"))
        'reference,loss_chunk=128'
        >>> Kernels.parse("atention=chunked")
        Traceback (most recent call last):
        jaxscale.errors.UserError: unknown kernel 'atention': expected one of adam8, attention, \
cross_entropy, quantize, top_k; did you mean 'attention'?
    """

    default: str = "auto"
    named: tuple[tuple[str, str], ...] = ()
    loss_chunk: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise UserError(f"kernels loss_chunk: got {self.loss_chunk}, expected a whole number >= 1")
        if self.default not in ("auto", "reference"):
            raise unknown("choice of kernels", self.default, ("auto", "reference"))
        for kernel, implementation in self.named:
            if kernel not in KNOWN:
                raise unknown("kernel", kernel, KNOWN)
            if implementation not in KNOWN[kernel]:
                raise unknown(f"implementation of {kernel}", implementation, KNOWN[kernel])
        if len(dict(self.named)) < len(self.named):
            raise UserError(f"kernels {self}: got a kernel twice, expected each kernel once")
        if self.loss_chunk is not None and self.scores in ("tpu", "reference"):
            raise UserError(
                f"kernels {self}: the {self.scores} implementation of cross_entropy does not support loss_chunk; "
                "remove loss_chunk, or choose another implementation"
            )

    @classmethod
    def parse(cls, text: str) -> "Kernels":
        """Return the `Kernels` that a text form specifies.

        Raises:
            UserError: the text names an unknown kernel or implementation (the message suggests a similar name).
        """
        entries = [entry.strip() for entry in text.split(",")]
        default = entries.pop(0) if entries[0] in ("auto", "reference") else "auto"
        kernels_and_names, loss_chunk = [], None
        for entry in entries:
            name, equals_sign, value = (part.strip() for part in entry.partition("="))
            if name == "loss_chunk" and equals_sign:
                if loss_chunk is not None:
                    raise UserError(f"kernels {text!r}: got loss_chunk twice, expected it once")
                loss_chunk = parse(value, int, f"kernels {text!r}: loss_chunk")
                continue
            if not equals_sign:
                suggestion = near_miss(entry, ("auto", "reference", "loss_chunk", *KNOWN))
                raise UserError(
                    f"kernels {text!r}: expected auto, reference, or KERNEL=IMPLEMENTATION such as "
                    f"attention=chunked{suggestion}"
                )
            kernels_and_names.append((name, value))
        return cls(default, tuple(kernels_and_names), loss_chunk)

    def __str__(self) -> str:
        entries = [f"{kernel}={implementation}" for kernel, implementation in self.named]
        entries += [f"loss_chunk={self.loss_chunk}"] * (self.loss_chunk is not None)
        return ",".join([self.default, *entries] if self.default != "auto" or not entries else entries)

    @property
    def names_attention(self) -> bool:
        """Whether an implementation of attention is named, which requires a model with attention."""
        return "attention" in dict(self.named)

    @property
    def attends(self) -> str:
        """The implementation of attention that the plan requests, under the name that the layers use."""
        return {"reference": "plain"}.get(self.of("attention"), self.of("attention"))

    @property
    def scores(self) -> str:
        """The implementation of cross-entropy that the plan requests; "auto" leaves the choice to `loss_chunk`."""
        return dict(self.named).get("cross_entropy", "auto")

    def of(self, kernel: str) -> str:
        """Return the implementation that the plan requests for a kernel: "auto", or a name in `KNOWN`."""
        return dict(self.named).get(kernel, self.default)

    def of_codecs(self) -> dict[str, str]:
        """Return the requested implementation of each kernel in `CODECS`, by kernel; leave out kernels with "auto"."""
        return {kernel: self.of(kernel) for kernel in CODECS if self.of(kernel) != "auto"}

    def check_platform(self, platform: str) -> None:
        """Raise an error if a named implementation does not run on a platform. Call this before anything is traced.

        Args:
            platform: kind of the devices: "cpu", "gpu" or "tpu".

        Raises:
            UserError: an implementation runs only on another platform.
        """
        for kernel, implementation in self.named:
            if PLATFORMS.get(implementation, platform) != platform:
                alternatives_text = " or ".join(
                    alternative for alternative in KNOWN[kernel] if alternative not in PLATFORMS
                )
                raise UserError(
                    f"kernels {kernel}={implementation}: a {PLATFORMS[implementation].upper()} kernel, but the step "
                    f"runs on {platform}; take {alternatives_text}, or leave {kernel} out"
                )


AUTO = Kernels()
"""The best implementation of every kernel that runs on the platform."""


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """The implementation of a kernel that was chosen while a step was traced.

    Args:
        kernel: name of the kernel.
        platform_name: platform and chip, such as "tpu v5e".
        implementation: name of the chosen implementation.
        why: the reason for not using a kernel that is specific to the platform; `None` if such a kernel is used, or if
            no better one exists.
    """

    kernel: str
    platform_name: str
    implementation: str
    why: str | None = None


def fields_of(choices: Sequence[KernelChoice]) -> dict[str, Any]:
    """Return the kernels of a step as fields of an event in metrics.jsonl: platform, implementations and reasons.

    Args:
        choices: the chosen implementations.

    Example:
        >>> fields_of((KernelChoice("attention", "cpu", "plain", "kernels are for TPU and GPU"),))
        {'platform': 'cpu', 'attention': 'plain', 'why': {'attention': 'kernels are for TPU and GPU'}}
    """
    fields: dict[str, Any] = {"platform": ", ".join(dict.fromkeys(choice.platform_name for choice in choices))}
    reason_by_kernel: dict[str, str] = {}
    for choice in choices:
        kernel = choice.kernel
        for text_by_kernel, text in ((fields, choice.implementation), (reason_by_kernel, choice.why)):
            if text is not None and text not in text_by_kernel.get(kernel, "").split("; "):
                text_by_kernel[kernel] = f"{text_by_kernel[kernel]}; {text}" if kernel in text_by_kernel else text
    return fields | ({"why": reason_by_kernel} if reason_by_kernel else {})


def platform_and_kernels(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the platform of a step, and a text about the step's kernels; `None` if the step used no kernel.

    Args:
        fields: fields of an event, from `fields_of`.

    Example:
        >>> choices = (KernelChoice("adam8", "tpu v5e", "tpu"), KernelChoice("cross_entropy", "tpu v5e", "chunked"))
        >>> platform_and_kernels(fields_of(choices))
        ('tpu v5e', 'adam8 tpu, cross_entropy chunked')
    """
    why_json = fields.get("why")
    reason_by_kernel = why_json if isinstance(why_json, Mapping) else {}
    kernel_texts = [
        f"{kernel} {fields[kernel]}" + (f" ({reason_by_kernel[kernel]})" if kernel in reason_by_kernel else "")
        for kernel in fields
        if kernel in KNOWN
    ]
    return (str(fields.get("platform", "")), ", ".join(kernel_texts)) if kernel_texts else None


def lines_of(choices: Sequence[KernelChoice]) -> list[str]:
    """Return a list with one line about the kernels of a step, for the user; `[]` if the step used no kernel.

    Args:
        choices: the chosen implementations.

    Example:
        >>> lines_of((KernelChoice("attention", "cpu", "plain", "kernels are for TPU and GPU"),))
        ['kernels on cpu: attention plain (kernels are for TPU and GPU)']
    """
    platform_and_text = platform_and_kernels(fields_of(choices))
    if platform_and_text is None:
        return []
    platform_name, kernels_text = platform_and_text
    return [f"kernels on {platform_name}: {kernels_text}"]
