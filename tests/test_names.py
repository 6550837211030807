"""Every global name that code reads is bound in its module. Linters here skip names, for dims of arrays are unbound."""

import builtins
import dis
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("jaxscale", "pallas_kernels", "experiments", "tests")
OPERATIONS = {dis.opmap[name]: name for name in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "STORE_NAME")}
IMPLICIT = {"__annotations__", "__file__", "__name__", "__doc__", "__path__", "__spec__", "__package__"}


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def names_by_operation(code: CodeType) -> Iterator[tuple[str, str]]:
    """Each operation on a global name, or on a name of the module: (operation, name).

    `dis.get_instructions` takes ten times as long.
    """
    high_bits = 0
    for operation, low_bits in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        number = high_bits | low_bits
        high_bits = number << 8 if operation == dis.EXTENDED_ARG else 0
        if (name := OPERATIONS.get(operation)) is not None:
            yield name, code.co_names[number >> 1 if name == "LOAD_GLOBAL" else number]


def unbound(source: str) -> set[str]:
    """Global names that a module's code reads and nothing binds."""
    module = compile(source, "module", "exec", dont_inherit=True)
    bound, read = {*dir(builtins), *IMPLICIT}, set()
    for code in codes(module):
        for operation, name in names_by_operation(code):
            if code is module or "GLOBAL" in operation:
                (bound if "STORE" in operation else read).add(name)
    return read - bound


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_name_is_bound(folder: str) -> None:
    missing = {str(path): unbound(path.read_text()) for path in (ROOT / folder).rglob("*.py")}
    assert {path: names for path, names in missing.items() if names} == {}


def test_a_name_that_nothing_binds_is_found() -> None:
    assert unbound("import math\ndef area(r):\n    return maths.pi * r**2 + math.tau + len([r])\n") == {"maths"}
    assert unbound("from x import y\nclass A:\n    z = y\n    def f(self): return A, __file__\n") == set()
