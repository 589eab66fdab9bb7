"""The configuration as JSON Schema: for editors (`warmroute check --schema`) and the Helm chart (`scripts/chart_schema.py`).

msgspec makes the schema of the Structs. Further forms that `parse.py` accepts are added here: plain text for a Struct with a
SHORT key, one price for a list of them, and `false`. Secrets are omitted. References are inlined, because validators of all
versions of JSON Schema agree on that.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gateway.config.hints import ALONE, FALSE, SECRET, bare, extra_of
from gateway.config.listen import OFF
from gateway.config.schema import Config

_DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]


def editor_schema(kind: type[Config]) -> Schema:
    """The schema of the file, as a standalone document."""
    return {"$schema": _DIALECT, "title": "Configuration of the warmroute gateway", **config_schema(kind)}


def config_schema(kind: type[Config]) -> Schema:
    """The schema of the file. kind: its type, with the sections of features."""
    _, parts = msgspec.json.schema_components((kind,), ref_template="{name}")
    for section in _structs(kind):
        _adapt(section, parts[section.__name__]["properties"])
        if hasattr(section, "SHORT"):
            whole = parts[section.__name__]
            parts[section.__name__] = {"anyOf": [whole["properties"][section.SHORT], whole]}
    schema: Schema = _inlined(parts[kind.__name__], parts)
    return schema


def _adapt(section: type[msgspec.Struct], properties: Schema) -> None:
    """Add the further forms of the values in a section."""
    for field in msgspec.structs.fields(section):
        extra, form = extra_of(field.type), properties[field.name]
        if SECRET in extra:
            del properties[field.name]
        elif isinstance(extra.get(FALSE), str):
            properties[field.name] |= {"type": ["string", "boolean"], "not": {"const": True}}
        elif FALSE in extra:  # a section
            properties[field.name] = {"anyOf": [{"enum": [OFF, False]}, form]}
        elif ALONE in extra:  # one item, or a list of them
            properties[field.name] = {"anyOf": [form["items"], form]}
        elif typing.get_origin(bare(field.type)) is Mapping and ALONE in extra_of(typing.get_args(bare(field.type))[1]):
            form["additionalProperties"] = {"anyOf": [form["additionalProperties"]["items"], form["additionalProperties"]]}


def _structs(hint: Any) -> Iterator[type[msgspec.Struct]]:
    """The Structs that a type hint consists of, each once."""
    seen, left = set[Any](), [hint]
    while left:
        kind = bare(left.pop())
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if kind not in seen:
                seen.add(kind)
                left += [field.type for field in msgspec.structs.fields(kind)]
                yield kind
        else:
            left += typing.get_args(kind)


def _inlined(node: Any, parts: Mapping[str, Schema]) -> Any:
    if isinstance(node, list):
        return [_inlined(each, parts) for each in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(parts[node["$ref"]], parts)
    # Titles are class names here (strings); a property called title is a mapping.
    kept = {name: value for name, value in node.items() if value != [] or name != "required"}
    return {name: _inlined(value, parts) for name, value in kept.items() if name != "title" or not isinstance(value, str)}
