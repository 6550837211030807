"""The run-time check of annotations that the tests switch on: of what goes into a function and of what comes out.

It asks what `jaxtyping.install_import_hook` asks, dims that one call binds among it, and costs a sixth as much: one
wrapper holds both checks, and that of a function defined inside another is written once, however often the outer runs.

Constructors of values are left out: what a user gives them is checked by the values themselves, whose errors are
tested. So are quoted annotations of what is not defined yet where they are read.
"""

import ast
import functools
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from types import CellType, CodeType, FunctionType
from typing import Any, get_type_hints

from beartype import BeartypeConf, beartype
from jaxtyping import jaxtyped

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))
CHECK = "__check__"
FUNCTION = "__beartype_func"
"""How a wrapper of beartype's names what it wraps, among its keyword defaults."""


def install(*packages: str) -> None:
    """Check the annotated functions of what is imported of these packages from now on."""
    sys.meta_path.insert(0, _Finder(packages))


class _Finder(MetaPathFinder):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in self.packages:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name != "__init__" and _annotated(node):
                # next to the function, below decorators that take its annotations away
                node.decorator_list.append(ast.copy_location(ast.Name(CHECK, ast.Load()), node))
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: Any) -> None:
        setattr(module, CHECK, check)
        super().exec_module(module)


def _annotated(node: ast.FunctionDef) -> bool:
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return node.returns is not None or any(arg is not None and arg.annotation is not None for arg in every)


def check(function: FunctionType) -> Callable[..., Any]:
    """The function, whose annotations are checked at every call."""
    wrapper = _wrapper(function.__code__, function.__module__, tuple(function.__annotations__.items()), function)
    if wrapper is None:
        return function
    checked = FunctionType(wrapper.__code__, wrapper.__globals__, function.__name__)
    checked.__kwdefaults__ = {**wrapper.__kwdefaults__, FUNCTION: function}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jaxtyped("context"):
            return checked(*args, **kwargs)

    return call


_wrappers: dict[Any, FunctionType | None] = {}


def _wrapper(code: CodeType, module: str, hints: tuple[tuple[str, Any], ...], function: FunctionType) -> Any:
    """What checks functions of this code with these annotations; `None` where they allow everything."""
    key = code, module, hints
    if key not in _wrappers:
        # of a twin that closes over nothing, as wrappers are kept
        twin = FunctionType(
            code, function.__globals__, function.__name__, None, tuple(CellType() for _ in code.co_freevars)
        )
        twin.__module__, twin.__qualname__ = module, function.__qualname__
        twin.__annotations__ = {name: _read(hint, function.__globals__) for name, hint in hints}
        wrapper = _beartype(twin)
        _wrappers[key] = None if wrapper is twin else wrapper
    return _wrappers[key]


def _read(hint: Any, names: dict[str, Any]) -> Any:
    """An annotation without quotes."""

    def holder() -> None: ...

    holder.__annotations__ = {"it": hint}
    try:
        return get_type_hints(holder, names, include_extras=True)["it"]
    except NameError:
        return Any if isinstance(hint, str) else hint
