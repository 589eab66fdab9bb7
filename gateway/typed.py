"""Parsed YAML -> frozen dataclasses. Whatever is wrong is a `ConfigError` that names the place and says what is right."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

_SCIENTIFIC = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")


class ConfigError(ValueError):
    """The configuration cannot be used; the message says where and what to do."""


class _Loader(yaml.SafeLoader):
    """YAML in which a key is given once; PyYAML lets the last one win. It looks before merge keys (`<<`) are put in."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in lines:
                raise ConfigError(f"line {line}: the key {shown(key.value)} is given twice, first in line {lines[name]}")
            lines[name] = line
        return node


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.load(path.read_text("utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or a date such as 2026-99-99
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: the file holds a {type(raw).__name__}, a mapping of keys is expected")
    return raw


def convert(kind: Any, value: Any, where: str) -> Any:
    """`value` (parsed YAML) as `kind` (a type hint of the dataclasses above), or a ConfigError that names `where`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _convert_dataclass(kind, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where}: a list is expected, got {shown(value)}")
        return tuple(convert(args[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: a mapping is expected, got {shown(value)}")
        return {convert(str, key, f"{where}.{key}"): convert(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is types.UnionType:
        return None if value is None else convert(args[0], value, where)
    return _convert_scalar(kind, value, where)


def _convert_scalar(kind: Any, value: Any, where: str) -> Any:
    # YAML 1.1 takes 1e-05, which is how Helm writes small numbers, for a text.
    scientific = isinstance(value, str) and _SCIENTIFIC.fullmatch(value)
    if kind is float and not isinstance(value, bool) and (isinstance(value, int) or scientific):
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    wrong = isinstance(value, bool) is not (kind is bool)  # True is no number
    if wrong or not isinstance(value, kind) or (kind is float and not math.isfinite(value)):
        raise ConfigError(f"{where}: {_NAMES[kind]} is expected, got {shown(value)}")
    return value


_NAMES: Mapping[Any, str] = types.MappingProxyType(
    {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text"}
)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _convert_dataclass(kind: Any, value: Any, where: str) -> Any:
    if isinstance(value, str) and hasattr(kind, "SHORT"):
        value = {kind.SHORT: value}
    if not isinstance(value, dict):
        raise ConfigError(f"{where or 'configuration'}: a mapping is expected, got {shown(value)}")
    hints = typing.get_type_hints(kind)
    for key in value:
        if key not in hints:
            known = [item.name for item in dataclasses.fields(kind) if "env" not in item.metadata]
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(known)}"
            raise ConfigError(f"{_join(where, key)}: unknown key{hint}")
    for item in dataclasses.fields(kind):
        if item.name not in value and _required(item):
            raise ConfigError(f"{_join(where, item.name)}: missing")
    parts = {key: convert(hints[key], item, _join(where, key)) for key, item in value.items()}
    return _build(kind, parts, where)


def _required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _build(kind: Callable[..., Any], parts: Mapping[str, Any], where: str) -> Any:
    try:
        return kind(**parts)
    except ConfigError as error:
        raise ConfigError(_join(where, str(error))) from error


def _join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)
