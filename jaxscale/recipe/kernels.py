"""Kernels: which implementation of each kernel a plan asks for, as a value with a text form; and what a step took.

Reading either needs no JAX: `step/traced_checks.py` listens to the step being traced.
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
"""Implementations that can be named, of the kernels that a step takes by name: those of `pallas_kernels`."""
PLATFORMS = {"tpu": "tpu", "gpu": "gpu", "cudnn": "gpu", "splash": "tpu"}
"""Where an implementation runs that does not run everywhere."""
CODECS = ("quantize", "top_k")
"""Kernels that codecs take, of whichever layer: they are named by `pallas_kernels.dispatch.naming`."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Implementations by kernel: "auto", "reference", or "KERNEL=IMPLEMENTATION[,...]"; and "loss_chunk=POSITIONS".

    Args:
        default: "auto" takes the best that runs on the platform; "reference" takes plain JAX.
        named: (kernel, implementation), of kernels that are not to follow the default.
        loss_chunk: target positions of a row that the loss scores at a time; `None` scores all at once.

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
            raise UserError(f"kernels {self}: got a kernel twice, expected each once")
        if self.loss_chunk is not None and self.scores in ("tpu", "reference"):
            raise UserError(f"kernels {self}: cross_entropy {self.scores} takes no chunk; leave one out")

    @classmethod
    def parse(cls, text: str) -> "Kernels":
        """The value of its text form.

        Raises:
            UserError: an unknown kernel or implementation, with the near miss.
        """
        words = [word.strip() for word in text.split(",")]
        default = words.pop(0) if words[0] in ("auto", "reference") else "auto"
        pairs, chunk = [], None
        for word in words:
            kernel, equals, implementation = (part.strip() for part in word.partition("="))
            if kernel == "loss_chunk" and equals:
                if chunk is not None:
                    raise UserError(f"kernels {text!r}: got loss_chunk twice, expected it once")
                chunk = parse(implementation, int, f"kernels {text!r}: loss_chunk")
                continue
            if not equals:
                hint = near_miss(word, ("auto", "reference", "loss_chunk", *KNOWN))
                raise UserError(
                    f"kernels {text!r}: expected auto, reference, or KERNEL=IMPLEMENTATION such as "
                    f"attention=chunked{hint}"
                )
            pairs.append((kernel, implementation))
        return cls(default, tuple(pairs), chunk)

    def __str__(self) -> str:
        words = [f"{kernel}={implementation}" for kernel, implementation in self.named]
        words += [f"loss_chunk={self.loss_chunk}"] * (self.loss_chunk is not None)
        return ",".join([self.default, *words] if self.default != "auto" or not words else words)

    @property
    def names_attention(self) -> bool:
        """Whether it asks for an implementation of attention, which a model must then have."""
        return "attention" in dict(self.named)

    @property
    def attends(self) -> str:
        """The implementation of attention that layers take."""
        return {"reference": "plain"}.get(self.of("attention"), self.of("attention"))

    @property
    def scores(self) -> str:
        """The implementation of cross-entropy that a loss takes: by `loss_chunk` ("auto"), or by name."""
        return dict(self.named).get("cross_entropy", "auto")

    def of(self, kernel: str) -> str:
        """The implementation of a kernel: "auto", or a name of KNOWN."""
        return dict(self.named).get(kernel, self.default)

    def of_codecs(self) -> dict[str, str]:
        """The implementations of CODECS that are not left to the platform."""
        return {kernel: self.of(kernel) for kernel in CODECS if self.of(kernel) != "auto"}

    def check_platform(self, platform: str) -> None:
        """Refuse what is named and runs elsewhere alone, before anything is traced.

        Raises:
            UserError: as it says.
        """
        for kernel, name in self.named:
            if PLATFORMS.get(name, platform) != platform:
                plain = " or ".join(word for word in KNOWN[kernel] if word not in PLATFORMS)
                raise UserError(
                    f"kernels {kernel}={name}: a {PLATFORMS[name].upper()} kernel, and this runs on {platform}: take "
                    f"{plain}, or leave it out"
                )


AUTO = Kernels()


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a step took of a kernel, as its tracing met it.

    Args:
        kernel: its name.
        where: the platform, such as "tpu v5e".
        chosen: the implementation.
        why: why it is no kernel of the platform; `None` where it is one, or where nothing is better.
    """

    kernel: str
    where: str
    chosen: str
    why: str | None = None


def fields_of(taken: Sequence[Taken]) -> dict[str, Any]:
    """What a step took, as the fields of an event in metrics.jsonl.

    Example:
        >>> fields_of((Taken("attention", "cpu", "plain", "kernels are for TPU and GPU"),))
        {'platform': 'cpu', 'attention': 'plain', 'why': {'attention': 'kernels are for TPU and GPU'}}
    """
    fields: dict[str, Any] = {"platform": ", ".join(dict.fromkeys(choice.where for choice in taken))}
    why: dict[str, str] = {}
    for choice in taken:
        for texts, text in ((fields, choice.chosen), (why, choice.why)):
            kernel = choice.kernel
            if text is not None and text not in texts.get(kernel, "").split("; "):
                texts[kernel] = f"{texts[kernel]}; {text}" if kernel in texts else text
    return fields | ({"why": why} if why else {})


def said_of(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """Where and what a step took, in words, from `fields_of`; `None` where it took no kernel.

    Example:
        >>> said_of(fields_of((Taken("adam8", "tpu v5e", "tpu"), Taken("cross_entropy", "tpu v5e", "chunked"))))
        ('tpu v5e', 'adam8 tpu, cross_entropy chunked')
    """
    why = fields.get("why")
    why = why if isinstance(why, Mapping) else {}
    words = [
        f"{kernel} {fields[kernel]}" + (f" ({why[kernel]})" if kernel in why else "")
        for kernel in fields
        if kernel in KNOWN
    ]
    return (str(fields.get("platform", "")), ", ".join(words)) if words else None


def lines_of(taken: Sequence[Taken]) -> list[str]:
    """What a step took, as a line to show; nothing where it took no kernel.

    Example:
        >>> lines_of((Taken("attention", "cpu", "plain", "kernels are for TPU and GPU"),))
        ['kernels on cpu: attention plain (kernels are for TPU and GPU)']
    """
    words = said_of(fields_of(taken))
    return [] if words is None else [f"kernels on {words[0]}: {words[1]}"]
