"""Constraints on an answer: OpenAI's `response_format`, vLLM's `guided_*` and `structured_outputs`."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import orjson
from msgspec import Meta, Struct

from replica.api.tools import json_text
from replica.api.validation import ApiError, Flag, kind_of
from replica.engine import Grammar

FIELDS = ("response_format", "guided_json", "guided_choice", "guided_regex", "structured_outputs")
ANY_OBJECT = '{"type":"object"}'
_TYPES = "'text', 'json_object' or 'json_schema'"
Schema = Annotated[dict[str, Any] | bool | str, Meta(description="a JSON schema (an object)")]
Regex = Annotated[str, Meta(description="a string")]
Texts = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, description="a list of strings, none empty")]


class JsonSchemaFormat(Struct):
    schema: Schema


class ResponseFormat(Struct, kw_only=True):
    type: Annotated[Literal["text", "json_object", "json_schema"], Meta(description=_TYPES)] | None = None
    json_schema: Annotated[JsonSchemaFormat, Meta(description="an object with a schema")] | None = None


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    json: Schema | None = None
    choice: Texts | None = None
    regex: Regex | None = None


class AnswerFields(Struct, kw_only=True):
    """The fields of a body that define the answer's format and end."""

    response_format: Annotated[ResponseFormat | Literal["text", "json_object"], Meta(description=_TYPES)] | None = None
    guided_json: Schema | None = None
    guided_choice: Texts | None = None
    guided_regex: Regex | None = None
    structured_outputs: Annotated[StructuredOutputs, Meta(description="an object with one of json, choice, regex")] | None = (
        None
    )
    ignore_eos: Flag | None = None
    min_tokens: Annotated[int, Meta(ge=0, description="an integer of at least 0")] | None = None


def grammar_of(fields: AnswerFields, call: Grammar | None = None) -> Grammar | None:
    """The constraint in a body, if any; `call`: the one of a forced tool call. Raises ApiError."""
    found = [*_from_response_format(fields.response_format), *([call] if call else [])]
    found += _guided("guided_", fields.guided_json, fields.guided_choice, fields.guided_regex)
    outputs = fields.structured_outputs
    if outputs is not None:
        found += _guided("structured_outputs.", outputs.json, outputs.choice, outputs.regex)
    if len(found) > 1:
        fields_of_formats = ", ".join((*FIELDS, "a tool_choice that forces a call"))
        raise ApiError(400, f"Only one format per request: send one of {fields_of_formats}.", "response_format")
    for name, value in (("ignore_eos", fields.ignore_eos), ("min_tokens", fields.min_tokens)):
        if found and value:
            raise ApiError(400, f"The format decides where the answer ends: leave out {name}.", name)
    return found[0] if found else None


def _from_response_format(wanted: ResponseFormat | str | None) -> Iterator[Grammar]:
    described = wanted.json_schema if isinstance(wanted, ResponseFormat) else None
    kind = wanted.type if isinstance(wanted, ResponseFormat) else wanted
    if kind == "json_object":
        yield Grammar("json", ANY_OBJECT)
    if kind == "json_schema":
        if described is None:
            raise ApiError(400, "response_format.json_schema must be an object with a schema.", "response_format.json_schema")
        yield json_grammar(described.schema, "response_format.json_schema.schema")


def _guided(
    prefix: str, schema: dict[str, Any] | bool | str | None, choice: list[str] | None, regex: str | None
) -> Iterator[Grammar]:
    if schema is not None:
        yield json_grammar(schema, f"{prefix}json")
    if choice is not None:
        yield Grammar("choice", orjson.dumps(choice).decode())
    if regex is not None:
        yield Grammar("regex", regex)


def json_grammar(schema: dict[str, Any] | bool | str, name: str) -> Grammar:
    """The constraint to a JSON schema, which may also be sent as JSON text. Raises ApiError, which names the field."""
    parsed: object = schema
    if isinstance(schema, str):
        try:
            parsed = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise ApiError(400, f"{name} is not valid JSON: {error}.", name) from None
    if not isinstance(parsed, dict | bool):
        raise ApiError(400, f"{name} must be a JSON schema (an object), not {kind_of(parsed)}.", name)
    return Grammar("json", json_text(parsed, name))
