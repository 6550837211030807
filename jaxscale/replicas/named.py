"""The text form of codecs, such as "powersgd:4,start=100".

The computation is in `codec.py`, so that a plan can be parsed and checked without JAX.
"""

import abc
import dataclasses
from typing import Any, ClassVar

from jaxscale import values
from jaxscale.errors import UserError, unknown


@dataclasses.dataclass(frozen=True)
class NamedCodec(abc.ABC):
    """A codec's options and its text form, `NAME[:VALUE][,FIELD=VALUE...]`.

    Args:
        feedback: whether the error of a message is kept and added to the next gradient.
        start: number of steps that send the exact mean before the first compressed step.

    Example:
        >>> codec = NamedCodec.parse("powersgd:4,start=100")
        >>> codec, str(codec)
        (PowerSGD(feedback=True, start=100, rank=4), 'powersgd:4,start=100')
        >>> NamedCodec.parse("powersgd:4,strat=100")
        Traceback (most recent call last):
        jaxscale.errors.UserError: unknown option of codec powersgd 'strat': expected one of feedback, rank, start; \
did you mean 'start'?
    """

    name: ClassVar[str]
    """The name that begins the text form."""
    value: ClassVar[str | None] = None
    """Name of the field whose value follows the colon; `None` for a codec without such a value."""
    unit: ClassVar[str] = ""
    """Optional suffix of the value after the colon, such as "bit" in `qsgd:4bit`."""
    late: ClassVar[bool] = False
    """Whether most elements of a gradient are sent many steps late; momentum in the optimizer then does harm."""
    feedback: bool = dataclasses.field(default=True, kw_only=True)
    start: int = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        values.check_types(self)
        if self.start < 0:
            raise UserError(f"start: got {self.start}, expected a number of steps >= 0")

    @classmethod
    def parse(cls, text: str) -> Any:
        """Return the codec that a text form describes.

        Raises:
            UserError: a codec or an option is unknown (the message suggests the nearest name), or a value is invalid.
        """
        from jaxscale.replicas.codecs import CODECS

        head_text, *option_texts = (word.strip() for word in text.strip().split(","))
        name, colon, value_text = head_text.partition(":")
        if name.lower() not in CODECS:
            raise unknown("codec", name, CODECS)
        codec_type = CODECS[name.lower()]
        if bool(colon) != (codec_type.value is not None):
            raise UserError(f"codec {text!r}: expected the form {codec_type.form()}")
        text_by_field = {} if codec_type.value is None else {codec_type.value: value_text.removesuffix(codec_type.unit)}
        type_by_field = values.field_types(codec_type)
        for option_text in option_texts:
            field, equals, field_text = (word.strip() for word in option_text.partition("="))
            if field not in type_by_field:
                raise unknown(f"option of codec {codec_type.name}", field, type_by_field)
            if not equals or field in text_by_field:
                raise UserError(f"codec {text!r}: got {option_text!r}, expected each option once: {codec_type.form()}")
            text_by_field[field] = field_text
        try:
            return codec_type(**{f: values.parse(text_by_field[f], type_by_field[f], f) for f in text_by_field})
        except UserError as error:
            raise UserError(f"codec {text!r}: {error}") from None

    def __str__(self) -> str:
        value_text = f":{values.spell(getattr(self, self.value))}{self.unit}" if self.value else ""
        option_texts = [
            f",{field.name}={values.spell(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if field.name != self.value and getattr(self, field.name) != field.default
        ]
        return f"{self.name}{value_text}{''.join(option_texts)}"

    @classmethod
    def form(cls) -> str:
        """Return the template of the text form, for error messages.

        Example:
            >>> from jaxscale.replicas.codecs import CODECS
            >>> CODECS["qsgd"].form()
            'qsgd:BITSbit[,feedback=...][,start=...][,block=...]'
        """
        value_text = f":{cls.value.upper()}{cls.unit}" if cls.value else ""
        return f"{cls.name}{value_text}" + "".join(f"[,{f}=...]" for f in values.field_types(cls) if f != cls.value)
