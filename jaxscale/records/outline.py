"""Checks of an experiment file, and its variants, without running it. Nothing heavy is imported."""

import ast
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

from jaxscale.errors import UserError, near_miss


@dataclasses.dataclass(frozen=True)
class Outline:
    """An experiment file that was read and not run.

    Args:
        path: absolute path of the file.
        text: its content.
        summary: first line of its docstring.
        variants: first line of the docstring of each function in `VARIANTS`, by name; `None` if `VARIANTS` is no
            literal dict.
    """

    path: Path
    text: str
    summary: str
    variants: dict[str, str] | None


def outline(path: str | Path, variant: str | None = None) -> Outline:
    """Read an experiment file, and check it as far as possible without running it.

    Raises:
        UserError: the path is no file, the file is not Python, or it lacks `experiment()` or the variant.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(_no_file(path))
    try:
        text = path.read_text("utf-8")
        tree = ast.parse(text, str(path))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is no experiment file: expected Python, got bytes that are not UTF-8 ({error})"
        ) from None
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(f"{path}{line} is not Python: {error}") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    names = {*functions, *(name for node in tree.body for name in _bound_names(node))}
    if "experiment" not in names:
        hint = near_miss("experiment", names)
        raise UserError(f"{path} has no experiment(): define a function of that name that returns an Experiment{hint}")
    variants = _variants(tree, functions)
    if variant is not None and variants is not None and variant not in variants:
        raise no_variant(path, variant, variants)
    return Outline(path.absolute(), text, _first_line(ast.get_docstring(tree)), variants)


def no_variant(path: object, variant: str, variants: Iterable[str]) -> UserError:
    """The error for a variant that the file does not have."""
    names = list(variants)
    choices = f"there are {', '.join(names)}" if names else "it has no VARIANTS; leave the name out"
    return UserError(f"{path} has no variant {variant!r}: {choices}{near_miss(variant, names)}")


def _no_file(path: Path) -> str:
    """The error message for a path that is no file, with files of similar names."""
    if path.is_dir():
        names = ", ".join(sorted(file.name for file in path.glob("*.py"))[:8])
        return f"{path} is a folder: expected an experiment file" + (f", such as one of {names} there" if names else "")
    files = [*path.parent.glob("*.py"), *Path("experiments").glob("*.py")]
    file_of_path = {str(file): file for file in files}
    path_of_stem = {file.stem: str(file) for file in files}
    hint = near_miss(str(path), file_of_path) or near_miss(str(path.with_suffix(".py")), file_of_path)
    if not hint and (stem_hint := near_miss(path.stem, path_of_stem)):
        hint = f"; did you mean {path_of_stem[stem_hint.split(chr(39))[1]]!r}?"
    choices = f"; there are {', '.join(sorted(file_of_path)[:8])}" if file_of_path and not hint else ""
    return f"there is no file {path}: expected an experiment file{hint}{choices}"


def _bound_names(node: ast.stmt) -> list[str]:
    """Names that a top-level assignment or import binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    targets = [*node.targets] if isinstance(node, ast.Assign) else []
    targets += [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _variants(tree: ast.Module, functions: Mapping[str, ast.FunctionDef]) -> dict[str, str] | None:
    """First line of the docstring of each function in `VARIANTS`, by name; `None` if it is no literal dict."""
    for node in tree.body:
        if "VARIANTS" not in _bound_names(node):
            continue
        variants_node = getattr(node, "value", None)
        if not isinstance(variants_node, ast.Dict):
            return None
        summaries = {}
        for key, function_node in zip(variants_node.keys, variants_node.values, strict=True):
            if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                return None
            function = functions.get(function_node.id) if isinstance(function_node, ast.Name) else None
            summaries[key.value] = _first_line(ast.get_docstring(function)) if function else ""
        return summaries
    return {}


def _first_line(text: str | None) -> str:
    """First line of a docstring; empty without one."""
    return (text or "").strip().partition("\n")[0]
