"""Check an experiment file and list its variants, without running the file or importing JAX."""

import ast
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

from jaxscale.errors import UserError, near_miss


@dataclasses.dataclass(frozen=True)
class Outline:
    """The content of an experiment file that was read but not run.

    Args:
        path: absolute path of the file.
        text: its content.
        summary: first line of its docstring.
        variants: first line of the docstring of each function in `VARIANTS`, by the variant's name; `None` if
            `VARIANTS` is not a literal dict.
    """

    path: Path
    text: str
    summary: str
    variants: dict[str, str] | None


def outline(path: str | Path, variant: str | None = None) -> Outline:
    """Read an experiment file, and check it as far as possible without running it.

    Raises:
        UserError: there is no such file, it is not Python, or it lacks `experiment()` or the variant.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(_missing_file_message(path))
    try:
        text = path.read_text("utf-8")
        tree = ast.parse(text, str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not Python: it has bytes that are not UTF-8 ({error})") from None
    except (SyntaxError, ValueError) as error:
        line_text = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(f"{path}{line_text} is not Python: {error}") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    bound_names = {*functions, *(name for node in tree.body for name in _bound_names(node))}
    if "experiment" not in bound_names:
        hint = near_miss("experiment", bound_names)
        raise UserError(f"{path} has no experiment(): define a function of that name that returns an Experiment{hint}")
    variants = _variant_summaries(tree, functions)
    if variant is not None and variants is not None and variant not in variants:
        raise no_variant(path, variant, variants)
    return Outline(path.absolute(), text, _first_line(ast.get_docstring(tree)), variants)


def no_variant(path: object, variant: str, variants: Iterable[str]) -> UserError:
    """Return the error for a variant that the file does not have."""
    variant_names = list(variants)
    choices_text = f"there are {', '.join(variant_names)}" if variant_names else "it has no VARIANTS; omit the name"
    return UserError(f"{path} has no variant {variant!r}: {choices_text}{near_miss(variant, variant_names)}")


def _missing_file_message(path: Path) -> str:
    """Return the error message for a path at which there is no file, with files of similar names."""
    if path.is_dir():
        names = sorted(file.name for file in path.glob("*.py"))[:8]
        hint = f", such as one of {', '.join(names)} there" if names else ""
        return f"{path} is a folder: expected an experiment file{hint}"
    files = [*path.parent.glob("*.py"), *Path("experiments").glob("*.py")]
    file_by_path = {str(file): file for file in files}
    path_by_stem = {file.stem: str(file) for file in files}
    hint = near_miss(str(path), file_by_path) or near_miss(str(path.with_suffix(".py")), file_by_path)
    if not hint and (stem_hint := near_miss(path.stem, path_by_stem)):
        hint = f"; did you mean {path_by_stem[stem_hint.split(chr(39))[1]]!r}?"
    choices_text = f"; there are {', '.join(sorted(file_by_path)[:8])}" if file_by_path and not hint else ""
    return f"there is no file {path}: expected an experiment file{hint}{choices_text}"


def _bound_names(node: ast.stmt) -> list[str]:
    """Return the names that a top-level assignment or import binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    targets = [*node.targets] if isinstance(node, ast.Assign) else []
    targets += [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _variant_summaries(tree: ast.Module, functions: Mapping[str, ast.FunctionDef]) -> dict[str, str] | None:
    """Return the first line of the docstring of each function in `VARIANTS`, by the variant's name.

    It is `None` if `VARIANTS` is not a literal dict, and empty without `VARIANTS`.
    """
    for node in tree.body:
        if "VARIANTS" not in _bound_names(node):
            continue
        variants_node = getattr(node, "value", None)
        if not isinstance(variants_node, ast.Dict):
            return None
        summary_by_variant = {}
        for key, function_node in zip(variants_node.keys, variants_node.values, strict=True):
            if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                return None
            function = functions.get(function_node.id) if isinstance(function_node, ast.Name) else None
            summary_by_variant[key.value] = _first_line(ast.get_docstring(function)) if function else ""
        return summary_by_variant
    return {}


def _first_line(text: str | None) -> str:
    """Return the first line of a docstring; empty without one."""
    return (text or "").strip().partition("\n")[0]
