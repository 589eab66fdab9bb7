"""The configuration as JSON Schema: for editors (`warmroute check --schema`) and the Helm chart (`scripts/chart_schema.py`).

msgspec makes the schema of the Structs. Further forms that `parse.py` accepts are added here: plain text for a Struct with a
SHORT key, one price for a list of them, and `false`. Secrets are left out. References are inlined: validators of all versions
of JSON Schema agree on that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.config.hints import FALSE, SECRET, extra_of
from gateway.config.listen import OFF
from gateway.config.schema import (
    Config,
    DnsConfig,
    FallbackConfig,
    KeysConfig,
    KubernetesConfig,
    LedgerConfig,
    ReplicaConfig,
    SharingConfig,
    SnapshotConfig,
    StateConfig,
    TracingConfig,
)

_DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]


def editor_schema() -> Schema:
    """The schema of the file, as a standalone document."""
    return {"$schema": _DIALECT, "title": "Configuration of the warmroute gateway", **config_schema()}


def config_schema() -> Schema:
    """The schema of the file."""
    _, parts = msgspec.json.schema_components((Config,), ref_template="{name}")
    for section in (Config, StateConfig, KeysConfig, LedgerConfig, SharingConfig, SnapshotConfig, TracingConfig):
        properties = parts[section.__name__]["properties"]
        for field in msgspec.structs.fields(section):
            if SECRET in extra_of(field.type):
                del properties[field.name]
            elif isinstance(extra_of(field.type).get(FALSE), str):
                properties[field.name] |= {"type": ["string", "boolean"], "not": {"const": True}}
            elif FALSE in extra_of(field.type):  # a section
                properties[field.name] = {"anyOf": [{"enum": [OFF, False]}, properties[field.name]]}
    prices = parts["Config"]["properties"]["prices"]  # one price, or a list of them
    prices["additionalProperties"] = {"anyOf": [prices["additionalProperties"]["items"], prices["additionalProperties"]]}
    audiences = parts["OidcConfig"]["properties"]
    audiences["audience"] = {"anyOf": [audiences["audience"]["items"], audiences["audience"]]}
    for short in (ReplicaConfig, FallbackConfig, DnsConfig, KubernetesConfig):
        whole = parts[short.__name__]
        parts[short.__name__] = {"anyOf": [whole["properties"][short.SHORT], whole]}
    schema: Schema = _inlined(parts["Config"], parts)
    return schema


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
