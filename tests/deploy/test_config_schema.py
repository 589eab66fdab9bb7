"""The chart's `config` section is the gateway's configuration: the same keys, types, defaults and bounds.

The dataclasses of `gateway.config` are the source. A field that is added there fails these tests until values.yaml and
values.schema.json know it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gateway import config
from gateway.typed import FALSE
from router.policies import POLICIES

# What a user cannot set in the chart: where to listen is the chart's, the admin key comes from a Secret.
NOT_IN_THE_CHART = {"listen", "metrics_listen", "admin_key"}
# Optional for the gateway, but read by a template: `null` may not remove them from the values.
READ_BY_TEMPLATES = {"limits", "drain_timeout_s"}
SMALLEST = {"pools": [{"replicas": ["http://a:1"]}], "limits": {"drain_timeout_s": 30}}
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}


@pytest.fixture(scope="session")
def schema(root: Path) -> dict[str, Any]:
    loaded = json.loads((root / "helm" / "values.schema.json").read_text("utf-8"))
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture(scope="session")
def section(schema: dict[str, Any]) -> dict[str, Any]:
    return typing.cast(dict[str, Any], schema["properties"]["config"])


def differences(kind: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    """How `schema` differs from the type hint `kind`, as sentences."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        yield from differences_of_fields(kind, schema, where)
    elif origin is tuple:
        yield from differs(where, "type", schema.get("type"), "array")
        yield from differences(args[0], schema["items"], f"{where}[]")
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        yield from differs(where, "type", schema.get("type"), "object")
        yield from differences(args[1], schema["additionalProperties"], f"{where}.*")
    elif origin is types.UnionType:
        yield from differs(where, "type", schema.get("type"), [JSON_TYPES[args[0]], "null"])
    else:
        yield from differs(where, "type", schema.get("type"), JSON_TYPES[kind])


def differences_of_fields(kind: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    if kind is config.ReplicaConfig:
        short, schema = schema["anyOf"]  # a bare URL, or the whole replica
        yield from differs(where, "short form", short, only(schema["properties"]["url"], "type", "pattern"))
    yield from differs(where, "additionalProperties", schema.get("additionalProperties"), False)
    fields = {item.name: item for item in dataclasses.fields(kind) if item.name not in NOT_IN_THE_CHART}
    yield from differs(where, "keys", set(schema["properties"]), set(fields))
    required = {name for name, item in fields.items() if default(item) is dataclasses.MISSING}
    yield from differs(where, "required", set(schema.get("required", ())) - READ_BY_TEMPLATES, required)
    hints = typing.get_type_hints(kind)
    for name in fields.keys() & schema["properties"].keys():
        inner = schema["properties"][name]
        if FALSE in fields[name].metadata:  # `off` without quotes, which YAML reads as false
            yield from differs(f"{where}.{name}", "type", inner.get("type"), ["string", "boolean"])
        else:
            yield from differences(hints[name], inner, f"{where}.{name}")
        if "properties" not in inner:  # a nested section has its defaults inside
            yield from differs(f"{where}.{name}", "default", inner.get("default", dataclasses.MISSING), default(fields[name]))


def differs(where: str, what: str, found: Any, expected: Any) -> Iterator[str]:
    if found != expected:
        yield f"{where}: {what} is {found!r} in values.schema.json, {expected!r} in gateway/config.py"


def only(mapping: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: mapping[key] for key in keys}


def default(item: dataclasses.Field[Any]) -> Any:
    """The field's default as YAML would write it, or MISSING."""
    if item.default_factory is not dataclasses.MISSING:
        return plain(item.default_factory())
    return plain(item.default)


def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value


def leaves(schema: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """The scalar keys of nested sections, with their schemas."""
    for name, inner in schema["properties"].items():
        if "properties" in inner:
            yield from leaves(inner, (*path, name))
        elif inner["type"] not in ("array", "object"):
            yield (*path, name), inner


def put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(tree)
    here = changed
    for key in path[:-1]:
        here = here.setdefault(key, {})
    here[path[-1]] = value
    return changed


def schema_accepts(section: Mapping[str, Any], raw: Mapping[str, Any]) -> bool:
    return bool(jsonschema.Draft7Validator(section).is_valid(raw))


def gateway_accepts(raw: Mapping[str, Any], tmp_path: Path) -> bool:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(dict(raw)), "utf-8")
    try:
        config.load(file, {}, {})
    except config.ConfigError:
        return False
    return True


def test_keys_types_and_defaults_are_those_of_the_dataclasses(section: dict[str, Any]) -> None:
    assert list(differences(config.Config, section, "config")) == []


def test_values_yaml_shows_every_key_with_its_default(values: dict[str, Any]) -> None:
    defaults = {item.name: default(item) for item in dataclasses.fields(config.Config) if item.name not in NOT_IN_THE_CHART}
    assert values["config"] == {**defaults, "pools": []}


def test_choices_are_those_of_the_gateway(section: dict[str, Any]) -> None:
    assert section["properties"]["routing"]["properties"]["policy"]["enum"] == list(POLICIES)
    assert section["properties"]["log_level"]["enum"] == list(config.LOG_LEVELS)


def test_bounds_are_those_of_the_gateway(section: dict[str, Any], tmp_path: Path) -> None:
    """Every scalar setting, and those of a replica and of a price: the schema says yes exactly where the gateway does."""
    cases: list[dict[str, Any]] = [
        put(SMALLEST, path, value)
        for path, inner in leaves(section)
        for value in (-1, 0, 1, 1.5, 10**10, 10**10 + 1, "", "info", None, True, False, inner["default"])
    ]
    cases += [{**SMALLEST, "pools": [{"replicas": [replica]}]} for replica in REPLICAS]
    cases += [{**SMALLEST, "prices": {"m": price}} for price in PRICES]
    disagreements = [raw for raw in cases if schema_accepts(section, raw) != gateway_accepts(raw, tmp_path)]
    assert disagreements == []


REPLICAS: list[Any] = [
    "http://vllm-0:8000",
    "https://models.example/base/v1/",
    "http://[2001:db8::1]:8000",
    "vllm-0:8000",
    "ftp://vllm-0",
    "http://",
    "http://user:secret@vllm-0",
    "http://vllm-0/?a=b",
    "",
    7,
    {"name": "without a url"},
    {"url": "http://vllm-0", "weight": 3},
    *({"url": "http://vllm-0", "capacity_tokens": value} for value in (-1, 0, 1, 1.5, 10**10, 10**10 + 1, "1", None)),
    *({"url": "http://vllm-0", "name": value} for value in ("", "a", 1, None)),
]
PRICES: list[Any] = [
    {"input": 0, "output": 0},
    {"input": 1},
    {"output": 1},
    {"input": 1, "output": 1, "currency": "USD"},
    *({"input": value, "output": 2} for value in (-1, 0.5, 1e10, 1e11, "1", None)),
    *({"input": 1, "output": value} for value in (-1, 0.5, 1e10, 1e11, "1", None)),
    *({"input": 1, "output": 2, "cached_input": value} for value in (-1, 0, 0.5, 1e10, 1e11, "1", None)),
]


def test_a_new_field_is_noticed(section: dict[str, Any]) -> None:
    renamed = copy.deepcopy(section)
    renamed["properties"]["routing"]["properties"]["ttl_seconds"] = renamed["properties"]["routing"]["properties"].pop("ttl_s")
    renamed["properties"]["health"]["properties"]["failures"]["default"] = 3
    found = list(differences(config.Config, renamed, "config"))
    assert [sentence.split(" is ")[0] for sentence in sorted(found)] == [
        "config.health.failures: default",
        "config.routing: keys",
    ]


def test_an_object_of_the_schema_names_all_its_keys(schema: dict[str, Any]) -> None:
    """`additionalProperties: false` wherever keys are listed, so that a misspelt value is refused and not ignored."""
    open_objects = [where for where, inner in objects(schema, "values") if inner.get("additionalProperties") is not False]
    assert open_objects == []
    jsonschema.Draft7Validator.check_schema(schema)


def objects(schema: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(schema, dict):
        if "properties" in schema and schema.get("type") == "object":
            yield where, schema
        for key, inner in schema.items():
            yield from objects(inner, f"{where}.{key}")
    elif isinstance(schema, list):
        for index, inner in enumerate(schema):
            yield from objects(inner, f"{where}[{index}]")
