"""Public names of classes in JSON, under the key "type". The names stay valid if a class moves to another module.

A field is open if its declared type does not determine the class of the field's value. Every class of jaxscale that an
open field of an experiment accepts is listed here. For a user's class, JSON has MODULE:CLASS. Reading JSON never
imports such a module, because an import executes code. So the running program must have imported the module before.
"""

import dataclasses
import functools
import importlib
import os
import sys
import sysconfig

from jaxscale.errors import UserError, near_miss

_MODULE_BY_NAME = {
    "data.Arrays": "jaxscale.data.rows",
    "data.Chats": "jaxscale.data.chat.chats",
    "data.ImageFolder": "jaxscale.data.image_folder",
    "data.Images": "jaxscale.data.images",
    "data.Mixture": "jaxscale.data.text",
    "data.Rows": "jaxscale.data.rows",
    "data.Stream": "jaxscale.data.stream",
    "data.Table": "jaxscale.data.table",
    "data.Text": "jaxscale.data.text",
    "models.CrossEntropy": "jaxscale.models.foreign",
    "models.Decoder": "jaxscale.models.decoder",
    "models.ForeignModel": "jaxscale.models.foreign",
    "models.FromLinen": "jaxscale.models.foreign_linen",
    "models.LoRA": "jaxscale.models.lora",
    "models.Pretrained": "jaxscale.models.huggingface",
    "models.ResNet": "jaxscale.models.resnet",
    "models.ViT": "jaxscale.models.vit",
}
"""The module that defines each class, by the class's public name."""
_PUBLIC = {f"{module}:{name.rpartition('.')[2]}": name for name, module in _MODULE_BY_NAME.items()}
"""The public name of each class, by its current MODULE:CLASS."""
_EARLIER = {
    "jaxscale.data.images:Images": "data.Images",
    "jaxscale.data.text:Mixture": "data.Mixture",
    "jaxscale.data.text:Text": "data.Text",
    "jaxscale.models.decoder:Decoder": "models.Decoder",
    "jaxscale.models.foreign:CrossEntropy": "models.CrossEntropy",
    "jaxscale.models.foreign:ForeignModel": "models.ForeignModel",
    "jaxscale.models.foreign:FromLinen": "models.FromLinen",
    "jaxscale.models.foreign_linen:FromLinen": "models.FromLinen",
    "jaxscale.models.huggingface:Pretrained": "models.Pretrained",
    "jaxscale.models.resnet:ResNet": "models.ResNet",
    "jaxscale.models.vit:ViT": "models.ViT",
}
"""The public name of each class, by its MODULE:CLASS in files of earlier versions. Lines must never be removed."""


def type_name(path: str) -> str:
    """Return the public name of a class, or `path` itself if the class has none.

    Args:
        path: a current MODULE:CLASS, a name in a file of an earlier version, or a public name.

    Example:
        >>> type_name("jaxscale.models.decoder:Decoder"), type_name("models.Decoder"), type_name("mine:Net")
        ('models.Decoder', 'models.Decoder', 'mine:Net')
    """
    return _PUBLIC.get(path) or _EARLIER.get(path, path)


def public_class(name: str) -> type | None:
    """Return the class with this name, such as "Experiment", in the imported modules of jaxscale, or else `None`.

    Example:
        >>> public_class("UserError").__module__, public_class("Nothing")
        ('jaxscale.errors', None)
    """
    for module_name, module in tuple(sys.modules.items()):
        candidate = vars(module).get(name) if module_name.startswith("jaxscale.") else None
        if isinstance(candidate, type):
            return candidate
    return None


def is_user_module(name: str) -> bool:
    """Return whether an imported module is the user's: the main program, or a file outside of installed packages.

    A class of an installed package, such as a lazy module, may execute code when it is created from a stranger's JSON.

    Example:
        >>> is_user_module("__main__"), is_user_module("json"), is_user_module("jaxscale.errors")
        (True, False, False)
    """
    if name == "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    if not isinstance(file, str):
        return False
    path = os.path.realpath(file)
    install_folders = {"site-packages", "dist-packages"} & set(path.split(os.sep))
    return not install_folders and not path.startswith(_package_folders())


@functools.cache
def _package_folders() -> tuple[str, ...]:
    """Return the resolved paths of the folders of jaxscale, its kernels, Python's library and installed packages."""
    package_folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    kernels_folder = os.path.join(os.path.dirname(package_folder), "pallas_kernels")
    library_folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(os.path.realpath(folder) + os.sep for folder in (package_folder, kernels_folder, *library_folders))


def type_of(name: str, path: str) -> type:
    """Return the dataclass that the JSON key "type" names.

    Args:
        name: a public name, MODULE:CLASS, or a name in a file of an earlier version.
        path: dotted path of the value, for messages.

    Raises:
        UserError: there is no such dataclass.
    """
    public_name = type_name(name)
    if public_name in _MODULE_BY_NAME:
        return getattr(importlib.import_module(_MODULE_BY_NAME[public_name]), public_name.rpartition(".")[2])
    module_name, _, qualname = public_name.partition(":")
    # the module, then an object inside it
    candidate: object = sys.modules.get(module_name) if is_user_module(module_name) else None
    for attribute_name in qualname.split("."):
        candidate = getattr(candidate, "__dict__", {}).get(attribute_name)  # a lazy module may import on `getattr`
    if (
        not isinstance(candidate, type)
        or not dataclasses.is_dataclass(candidate)
        or not is_user_module(candidate.__module__)  # a user's module may contain other modules
    ):
        expected_text = (
            "expected MODULE:CLASS of a dataclass in a module of yours that this program has imported: import it, in "
            "Python. A file cannot make a program import a module, or use an installed one, since that may execute code"
            if qualname
            else f"expected one of {', '.join(_MODULE_BY_NAME)}{near_miss(name, _MODULE_BY_NAME)}"
        )
        raise UserError(f"{path}.type: got {name!r}, {expected_text}")
    return candidate
