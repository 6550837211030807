"""Check an experiment file and list its variants, without running the file or importing JAX."""

import ast
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

from jaxscale.errors import UserError, near_miss
from jaxscale.records.examples import example_file, example_names
from jaxscale.values.read_files import is_folder, is_regular, read_bytes

MAX_SOURCE_BYTES = 2**24
"""Largest size of an experiment file, in bytes."""


@dataclasses.dataclass(frozen=True)
class Outline:
    """The content of an experiment file that was read but not run.

    Args:
        path: absolute path of the file.
        text: content of the file.
        summary: first line of the file's docstring.
        variants: first line of the docstring of each function in `VARIANTS`, by the variant's name; `None` if
            `VARIANTS` is not a literal dict.
    """

    path: Path
    text: str
    summary: str
    variants: dict[str, str] | None


def outline(path: str | Path, variant: str | None = None) -> Outline:
    """Read an experiment file, and check the file as far as possible without running it.

    If `path` is not a file, it may be the name of an example of the package, such as "shakespeare".

    Raises:
        UserError: the file does not exist, is not Python, or lacks `experiment()` or the variant.
    """
    file = Path(path)
    if not is_regular(file):
        example = None if is_folder(file) else example_file(path)
        if example is None:
            raise UserError(_missing_file_message(file))
        file = path = example
    try:
        text = read_bytes(file, MAX_SOURCE_BYTES).decode("utf-8")
        tree = ast.parse(text, str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not Python: the file has bytes that are not UTF-8 ({error})") from None
    except (RecursionError, MemoryError):
        raise UserError(f"{path}: its expressions are nested too deeply for Python's parser") from None
    except UserError:
        raise
    except (SyntaxError, ValueError) as error:
        line_text = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(f"{path}{line_text} is not Python: {error}") from None
    function_by_name = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    bound_names = {*function_by_name, *(name for node in tree.body for name in _bound_names(node))}
    for node in tree.body:
        if isinstance(node, ast.AsyncFunctionDef) and node.name == "experiment":
            raise UserError(f"{path}, line {node.lineno}: experiment is an async function, expected def experiment()")
    if "experiment" not in bound_names:
        hint = near_miss("experiment", bound_names)
        raise UserError(f"{path} has no experiment(): define a function experiment that returns an Experiment{hint}")
    summary_by_variant = _variant_summaries(tree, function_by_name)
    if variant is not None and summary_by_variant is not None and variant not in summary_by_variant:
        raise no_variant_error(path, variant, summary_by_variant)
    return Outline(file.absolute(), text, _first_line(ast.get_docstring(tree)), summary_by_variant)


def no_variant_error(path: object, variant: str, variants: Iterable[str]) -> UserError:
    """Return the error for a name that is not among the variants of the file at `path`."""
    variant_names = list(variants)
    choices_text = f"there are {', '.join(variant_names)}" if variant_names else "it has no VARIANTS; omit the name"
    return UserError(f"{path} has no variant {variant!r}: {choices_text}{near_miss(variant, variant_names)}")


def _missing_file_message(path: Path) -> str:
    """Return the error message for a path that is not a file. The message suggests similar file names."""
    if is_folder(path):
        file_names = sorted(file.name for file in path.glob("*.py"))[:8]
        hint = f", such as one of {', '.join(file_names)} there" if file_names else ""
        return f"{path} is a folder: expected an experiment file{hint}"
    files = [*path.parent.glob("*.py"), *Path("experiments").glob("*.py")]
    file_by_path = {str(file): file for file in files}
    path_by_stem = {file.stem: str(file) for file in files}
    hint = near_miss(str(path), file_by_path) or near_miss(str(path.with_suffix(".py")), file_by_path)
    if not hint and (stem_hint := near_miss(path.stem, path_by_stem)):  # "; did you mean 'STEM'?"
        hint = f"; did you mean {path_by_stem[stem_hint.split(chr(39))[1]]!r}?"
    known_examples = example_names()
    if not hint and not path.suffix:
        hint = near_miss(str(path), known_examples)
    choices_text = f"; there are {', '.join(sorted(file_by_path)[:8])}" if file_by_path and not hint else ""
    if not file_by_path and not hint:
        choices_text = f", or an example: {', '.join(known_examples)}"
    return f"there is no file {path}: expected an experiment file{hint}{choices_text}"


def _bound_names(node: ast.stmt) -> list[str]:
    """Return the names that a top-level assignment or import binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    targets = [*node.targets] if isinstance(node, ast.Assign) else []
    targets += [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _variant_summaries(tree: ast.Module, function_by_name: Mapping[str, ast.FunctionDef]) -> dict[str, str] | None:
    """Return the first line of the docstring of each function in `VARIANTS`, by the variant's name.

    Args:
        tree: the syntax tree of an experiment file.
        function_by_name: syntax-tree nodes of the functions that the file defines, by name.

    Returns:
        The lines, by name; `None` if `VARIANTS` is not a literal dict; and an empty dict if the file has no `VARIANTS`.
    """
    for node in tree.body:
        if "VARIANTS" not in _bound_names(node):
            continue
        variants_node = getattr(node, "value", None)
        if not isinstance(variants_node, ast.Dict):
            return None
        summary_by_variant = {}
        for key_node, value_node in zip(variants_node.keys, variants_node.values, strict=True):
            if not (isinstance(key_node, ast.Constant) and isinstance(key_node.value, str)):
                return None
            function_node = function_by_name.get(value_node.id) if isinstance(value_node, ast.Name) else None
            docstring = ast.get_docstring(function_node) if function_node else None
            summary_by_variant[key_node.value] = _first_line(docstring)
        return summary_by_variant
    return {}


def _first_line(docstring: str | None) -> str:
    """Return the first line of a docstring; "" if there is none."""
    return (docstring or "").strip().partition("\n")[0]
