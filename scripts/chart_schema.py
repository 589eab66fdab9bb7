"""Writes the gateway's configuration into helm/values.schema.json; the chart's other values in that file are kept.

python -m scripts.chart_schema
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gateway.config.json_schema import Schema, config_schema
from gateway.features.table import WholeConfig

FILE = Path(__file__).parent.parent / "helm" / "values.schema.json"
WIDTH = 128
OF_THE_CHART = ("listen", "metrics_listen")  # the templates set them
# Keys that templates read are required: `null` in a user's values would remove them.
READ_BY_TEMPLATES = ("limits", "drain_accept_s", "drain_timeout_s")
# Values of a chart are merged key by key: a section cannot be off there.
SECTIONS = ("state", "ledger", "sharing", "snapshot")
# Templates refuse an empty list with a better message, and the default is one.
MAY_BE_EMPTY = ("pools",)


def chart_schema(text: str) -> str:
    """The updated file. text: its present contents."""
    schema = json.loads(text)
    schema["properties"]["config"] = section()
    return formatted(schema) + "\n"


def section() -> Schema:
    """Schema of the chart's value `config`: the gateway's configuration keys that a user of the chart can set."""
    schema = config_schema(WholeConfig)
    for name in OF_THE_CHART:
        del schema["properties"][name]
    for name in SECTIONS:
        _, schema["properties"][name] = schema["properties"][name]["anyOf"]
    del schema["properties"]["sharing"]["properties"]["url"]["pattern"]  # templates check it, with a better message
    _adapt(schema)
    return {
        **schema,
        "description": "The gateway's configuration file, without listen and metrics_listen (the chart's) and secrets.",
    }


def _adapt(schema: Schema) -> None:
    for name, inner in schema.get("properties", {}).items():
        if name in READ_BY_TEMPLATES:
            schema["required"] = [*schema.get("required", ()), name]
        if name in MAY_BE_EMPTY:
            inner.pop("minItems")
        _adapt(inner)
    if isinstance(items := schema.get("items"), dict):
        _adapt(items)


def formatted(value: Any, indent: str = "", key: str = "") -> str:
    """As JSON; an object or a list is in one line if that has at most WIDTH characters."""
    line = key + json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or len(indent) + len(line) < WIDTH:
        return line
    deeper = indent + "  "
    pairs = value.items() if isinstance(value, dict) else (("", each) for each in value)
    parts = [formatted(each, deeper, f"{json.dumps(name)}: " if name else "") for name, each in pairs]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{key}{opening}\n{deeper}" + f",\n{deeper}".join(parts) + f"\n{indent}{closing}"


if __name__ == "__main__":
    FILE.write_text(chart_schema(FILE.read_text("utf-8")), "utf-8")
    print(f"{FILE} written", file=sys.stderr)
