"""What the type hints of `schema.py` say beyond msgspec's own bounds, in the `extra` of a `msgspec.Meta`:

EXPECTED   what a message calls a right value
FALSE      the text that `false` stands for (YAML reads `off` and `no` without quotes as false)
READ       a function that brings a text into its final form, or raises ValueError with what is wrong with it
SECRET     the value comes from the environment, never from the file
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec.structs import FieldInfo

EXPECTED, FALSE, READ, SECRET = "expected", "false", "read", "secret"

# Of anything that is configured: tokens, seconds, MiB, USD. Products of a few such numbers do not overflow.
MAX_NUMBER: Final = 10_000_000_000


def bare(hint: Any) -> Any:
    """A type hint without `Annotated`."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def extra_of(hint: Any) -> Mapping[str, Any]:
    """The `extra` of a type hint ."""
    metas = typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()
    return {name: value for meta in metas for name, value in (meta.extra or {}).items()}


def default_of(field: FieldInfo) -> Any:
    """Of a field that has one."""
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
