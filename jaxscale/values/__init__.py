"""Frozen dataclasses as JSON and as text: conversion, fields set by `--model.embed 256`, and checks of declared types.

Type annotations have the same meaning (`annotations.py`) in experiment.json, plan.json, the command line and error
messages. The supported types are bool, int, float, str, paths, `Literal`, `X | None` and other unions, tuples, lists,
dicts, dataclasses, and classes with a text form: a `parse` classmethod and a `__str__` that invert each other
(`MeshSpec`, `MemoryPlan`). If a field is declared as a protocol, `Any` or a union of dataclasses, its JSON names the
value's class under "type", by its public name (`type_names.py`) or as MODULE:CLASS. Functions and classes are written
to JSON but not read, because code is rebuilt from its file. Enums and generic dataclasses are not supported.
"""

from jaxscale.values.annotations import describe, field_types, is_record
from jaxscale.values.as_json import from_json, has_code, read_json, to_json
from jaxscale.values.as_text import override, parse, paths, spell
from jaxscale.values.difference import ABSENT, Difference, difference
from jaxscale.values.earlier import changes
from jaxscale.values.fields import check_types

__all__ = [
    "ABSENT",
    "Difference",
    "changes",
    "check_types",
    "describe",
    "difference",
    "field_types",
    "from_json",
    "has_code",
    "is_record",
    "override",
    "parse",
    "paths",
    "read_json",
    "spell",
    "to_json",
]
