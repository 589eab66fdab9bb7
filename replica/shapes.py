"""The shape that a request wants its answer to have: OpenAI's `response_format`, vLLM's `guided_*` and `structured_outputs`."""

from collections.abc import Mapping
from typing import Any

import orjson

from replica.engine import Grammar
from replica.fields import ApiError, kind_of

FIELDS = ("response_format", "guided_json", "guided_choice", "guided_regex", "structured_outputs")
_KINDS = ("json", "choice", "regex")


def grammar_of(body: Mapping[str, Any]) -> Grammar | None:
    """The one shape that a body asks for, if any."""
    found = [grammar for grammar in (_format(body), *_guided(body)) if grammar is not None]
    if len(found) > 1:
        raise ApiError(400, f"Only one shape per request: send one of {', '.join(FIELDS)}.", "response_format")
    for name in ("ignore_eos", "min_tokens"):
        if found and body.get(name):
            raise ApiError(400, f"A shape says where the answer ends: leave out {name}.", name)
    return found[0] if found else None


def _format(body: Mapping[str, Any]) -> Grammar | None:
    wish = body.get("response_format")
    kind = wish.get("type") if isinstance(wish, dict) else wish
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return _json({"type": "object"}, "response_format")
    if kind == "json_schema" and isinstance(wish, dict):
        described = wish.get("json_schema")
        if isinstance(described, dict) and "schema" in described:
            return _json(described["schema"], "response_format.json_schema.schema")
        raise ApiError(400, "response_format.json_schema must be an object with a schema.", "response_format")
    raise ApiError(400, "response_format.type must be 'text', 'json_object' or 'json_schema'.", "response_format")


def _guided(body: Mapping[str, Any]) -> list[Grammar | None]:
    newer = body.get("structured_outputs") or {}
    if not isinstance(newer, dict) or set(newer) - set(_KINDS):
        raise ApiError(400, f"structured_outputs must be an object with one of {', '.join(_KINDS)}.", "structured_outputs")
    older = {kind: body.get(f"guided_{kind}") for kind in _KINDS}
    named = [(f"guided_{kind}", kind, value) for kind, value in older.items()]
    named += [(f"structured_outputs.{kind}", kind, value) for kind, value in newer.items()]
    return [_grammar(kind, value, where) for where, kind, value in named if value is not None]


def _grammar(kind: str, value: object, where: str) -> Grammar:
    if kind == "json":
        return _json(value, where)
    if kind == "choice":
        if isinstance(value, list) and value and all(isinstance(choice, str) and choice for choice in value):
            return Grammar("choice", orjson.dumps(value).decode())
        raise ApiError(400, f"{where} must be a list of strings, none empty.", where)
    if isinstance(value, str):
        return Grammar("regex", value)
    raise ApiError(400, f"{where} must be a string, not {kind_of(value)}.", where)


def _json(schema: object, where: str) -> Grammar:
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise ApiError(400, f"{where} is not valid JSON: {error}.", where) from None
    if not isinstance(schema, dict | bool):
        raise ApiError(400, f"{where} must be a JSON schema (an object), not {kind_of(schema)}.", where)
    return Grammar("json", orjson.dumps(schema).decode())
