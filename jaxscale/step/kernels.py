"""Kernels: which implementation of each kernel a plan asks for, as a value with a text form."""

import dataclasses

from jaxscale.errors import UserError, near_miss, unknown

KNOWN = {"attention": ("tpu", "gpu", "cudnn", "chunked", "reference"), "adam8": ("reference",)}
"""Implementations that can be named, of the kernels that a step takes by name: those of `pallas_kernels`."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Implementations by kernel: "auto", "reference", or "KERNEL=IMPLEMENTATION[,...]".

    Args:
        default: "auto" takes the best that runs on the platform; "reference" takes plain JAX.
        named: (kernel, implementation), of kernels that are not to follow the default.

    Example:
        >>> Kernels.parse("attention=chunked").of("attention"), Kernels.parse("reference").of("attention")
        ('chunked', 'reference')
        >>> Kernels.parse("atention=chunked")
        Traceback (most recent call last):
        jaxscale.errors.UserError: unknown kernel 'atention': expected one of adam8, attention; did you mean \
'attention'?
    """

    default: str = "auto"
    named: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.default not in ("auto", "reference"):
            raise unknown("choice of kernels", self.default, ("auto", "reference"))
        for kernel, implementation in self.named:
            if kernel not in KNOWN:
                raise unknown("kernel", kernel, KNOWN)
            if implementation not in KNOWN[kernel]:
                raise unknown(f"implementation of {kernel}", implementation, KNOWN[kernel])
        if len(dict(self.named)) < len(self.named):
            raise UserError(f"kernels {self}: got a kernel twice, expected each once")

    @classmethod
    def parse(cls, text: str) -> "Kernels":
        """The value of its text form.

        Raises:
            UserError: an unknown kernel or implementation, with the near miss.
        """
        words = [word.strip() for word in text.split(",")]
        if words in (["auto"], ["reference"]):
            return cls(words[0])
        pairs = []
        for word in words:
            kernel, equals, implementation = (part.strip() for part in word.partition("="))
            if not equals:
                hint = near_miss(word, ("auto", "reference", *KNOWN))
                raise UserError(
                    f"kernels {text!r}: expected auto, reference, or KERNEL=IMPLEMENTATION such as "
                    f"attention=chunked{hint}"
                )
            pairs.append((kernel, implementation))
        return cls(named=tuple(pairs))

    def __str__(self) -> str:
        return ",".join(f"{kernel}={implementation}" for kernel, implementation in self.named) or self.default

    def of(self, kernel: str) -> str:
        """The implementation of a kernel: "auto", or a name of KNOWN."""
        return dict(self.named).get(kernel, self.default)


AUTO = Kernels()
