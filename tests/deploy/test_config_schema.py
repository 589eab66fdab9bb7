"""The chart's `config` section is the gateway's configuration: the same keys, types, defaults and bounds.

The Structs of `gateway.config.schema` are the source. A field that is added there fails these tests until values.yaml and
values.schema.json know it; the latter is written by `python -m scripts.chart_schema`.
"""

from __future__ import annotations

import copy
import json
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from gateway.commands.cli import main
from gateway.config.hints import default_of
from gateway.config.json_schema import editor_schema
from gateway.config.parse import ConfigError
from gateway.config.schema import ALL, NONE, OPERATORS, TENANT, LogLevel
from gateway.features.table import WholeConfig
from router.policies.table import POLICIES
from scripts.chart_schema import chart_schema
from tests.support.configs import load

# What a user cannot set in the chart: where to listen is the chart's, the admin key comes from a Secret.
NOT_IN_THE_CHART = {"listen", "metrics_listen", "admin_key", "read_key"}
SMALLEST = {"pools": [{"replicas": ["http://a:1"]}], "limits": {"drain_accept_s": 2, "drain_timeout_s": 30}}


@pytest.fixture(scope="session")
def schema(root: Path) -> dict[str, Any]:
    loaded = json.loads((root / "helm" / "values.schema.json").read_text("utf-8"))
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture(scope="session")
def section(schema: dict[str, Any]) -> dict[str, Any]:
    return typing.cast(dict[str, Any], schema["properties"]["config"])


def plain(value: Any) -> Any:
    """As YAML would write it."""
    return json.loads(msgspec.json.encode(value))


def leaves(schema: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """The scalar keys of nested sections, with their schemas."""
    for name, each in schema["properties"].items():
        inner = next((form for form in each.get("anyOf", ()) if "properties" in form), each)  # of one that may be off
        if "properties" in inner:
            yield from leaves(inner, (*path, name))
        elif inner.get("type") not in ("array", "object"):
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
        load(file, {}, {})
    except ConfigError:
        return False
    return True


def test_the_chart_has_the_schema_that_is_made_of_the_structs(root: Path) -> None:
    text = (root / "helm" / "values.schema.json").read_text("utf-8")
    assert chart_schema(text) == text, "run: python -m scripts.chart_schema"


def test_what_differs_from_the_structs_is_written_anew(schema: dict[str, Any], root: Path) -> None:
    old = copy.deepcopy(schema)
    routing = old["properties"]["config"]["properties"]["routing"]["properties"]
    routing["ttl_seconds"] = routing.pop("ttl_s")
    old["properties"]["config"]["properties"]["health"]["properties"]["failures"]["default"] = 3
    assert chart_schema(json.dumps(old)) == (root / "helm" / "values.schema.json").read_text("utf-8")


def test_values_yaml_shows_every_key_with_its_default(values: dict[str, Any]) -> None:
    defaults = {field.name: plain(default_of(field)) for field in msgspec.structs.fields(WholeConfig) if not field.required}
    shown = {name: default for name, default in defaults.items() if name not in NOT_IN_THE_CHART}
    apart = {**shown["sharing"], "cluster": ""}  # the release's own
    assert values["config"] == {**shown, "pools": [], "sharing": apart}


def test_every_key_of_the_gateway_is_in_the_chart(section: dict[str, Any]) -> None:
    """Without the generator: keys and defaults, section by section."""
    properties = section["properties"]
    for field in msgspec.structs.fields(WholeConfig):
        assert (field.name in properties) is (field.name not in NOT_IN_THE_CHART)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            inner = properties[field.name]["properties"]
            assert {name: each["default"] for name, each in inner.items()} == plain(default_of(field))


def test_choices_are_those_of_the_gateway(section: dict[str, Any]) -> None:
    routing = section["properties"]["routing"]["properties"]
    assert set(routing["policy"]["enum"]) == set(POLICIES)
    assert set(routing["isolation"]["enum"]) == {NONE, TENANT}
    assert set(routing["expose_headers"]["enum"]) == {OPERATORS, ALL}
    assert set(section["properties"]["log_level"]["enum"]) == set(typing.get_args(LogLevel))


def test_the_schema_for_editors_is_valid_and_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert {"listen", "metrics_listen", "pools", "log_level"} <= schema["properties"].keys()
    assert "admin_key" not in json.dumps(schema)
    assert not jsonschema.Draft202012Validator(schema).is_valid({"pools": []})


@pytest.mark.parametrize("of", ["chart", "editor"])
def test_bounds_are_those_of_the_gateway(of: str, section: dict[str, Any], tmp_path: Path) -> None:
    """Every scalar setting, and those of a replica and of a price: the schema accepts exactly what the gateway accepts."""
    section = section if of == "chart" else editor_schema(WholeConfig)
    cases: list[dict[str, Any]] = [
        put(SMALLEST, path, value)
        for path, inner in leaves(section)
        if (of, path) != ("chart", ("sharing", "url"))  # refused by a template, in words: test_chart_sharing.py
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
