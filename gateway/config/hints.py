"""Keys of `msgspec.Meta.extra` in the type hints of the sections, beyond msgspec's own constraints:

EXPECTED   description of a valid value, for messages (for a section or a mapping: instead of "a mapping")
NAME       a name, which YAML may read as a number or as true: the message advises quotes
ALONE      a list whose single item may stand without the list
FALSE      the meaning of `false` (YAML reads `off` and `no` without quotes as false): a text; for a section, which may also be
           `"off"`, a mapping
READ       a function that normalizes a text, or raises ValueError
FIXED      it cannot change while the gateway runs: True, or the names of such keys of a section
CLASHES    for a section: a function from all valid values by key (`checks.py`) to the problems between some of them
DATABASE   a text that is the URL of a database, or may be one
SOURCES    for a section: a function from its value to the names of the sources of replicas to be watched
PROCESSES  the number of processes that serve together, and share the bounds of the configuration
SECRET     the value comes from the environment, never from the file
UNSHOWN    a wrong value may be a misplaced secret: messages do not quote it
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec.structs import FieldInfo

ALONE, EXPECTED, FALSE, NAME, READ, SECRET, UNSHOWN = "alone", "expected", "false", "name", "read", "secret", "unshown"
CLASHES, DATABASE, FIXED, PROCESSES, SOURCES = "clashes", "database", "fixed", "processes", "sources"

# Maximum of all configured numbers (tokens, seconds, MiB, USD): products of a few do not overflow.
MAX_NUMBER: Final = 10_000_000_000


def bare(hint: Any) -> Any:
    """A type hint without `Annotated`."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def section_of(hint: Any) -> Any:
    """A type hint without `Annotated`; for an optional section (a Struct, or null) or list the section or list."""
    kind = bare(hint)
    parts = typing.get_args(kind) if isinstance(kind, types.UnionType) else ()
    return next((part for part in parts if _has_parts(part)), kind)


def _has_parts(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))


def takes_bool(hint: Any) -> bool:
    """True if true and false are valid values, beside a section."""
    kind = bare(hint)
    return isinstance(kind, types.UnionType) and bool in typing.get_args(kind)


@lru_cache
def fields_of(kind: type[msgspec.Struct]) -> Mapping[str, FieldInfo]:
    """The fields of a section by name. msgspec evaluates all hints again at each call: half of the time of reading a file."""
    return {field.name: field for field in msgspec.structs.fields(kind)}


def extra_of(hint: Any) -> Mapping[str, Any]:
    """The merged `extra` of a type hint."""
    metas = typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()
    return {name: value for meta in metas for name, value in (meta.extra or {}).items()}


def default_of(field: FieldInfo) -> Any:
    """The default of a field that is not required."""
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
