"""Constraints on an answer: OpenAI's `response_format`, vLLM's `guided_*` and `structured_outputs`, `bad_words` and
`allowed_token_ids`."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import orjson
from msgspec import Meta, Struct

from replica.api.validation import ApiError, Flag, asks, check_texts, json_text, kind_of
from replica.engine import Grammar

FIELDS = ("response_format", "guided_json", "guided_choice", "guided_regex", "guided_grammar", "structured_outputs")
MASKS = ("bad_words", "allowed_token_ids")
MAX_BAD_WORDS = 1024
MAX_BAD_WORD = 256  # characters
MAX_ALLOWED = 1 << 18  # no vocabulary is larger
ANY_OBJECT = '{"type":"object"}'
_TYPES = "'text', 'json_object' or 'json_schema'"
Schema = Annotated[dict[str, Any] | bool | str, Meta(description="a JSON schema (an object)")]
GrammarText = Annotated[str, Meta(description="a string")]
_ONE_OF = "an object with one of json, json_object, choice, regex, grammar"
Texts = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, description="a list of strings, none empty")]


class JsonSchemaFormat(Struct):
    schema: Schema


class ResponseFormat(Struct, kw_only=True):
    type: Annotated[Literal["text", "json_object", "json_schema"], Meta(description=_TYPES)] | None = None
    json_schema: Annotated[JsonSchemaFormat, Meta(description="an object with a schema")] | None = None


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    json: Schema | None = None
    json_object: Flag | None = None
    choice: Texts | None = None
    regex: GrammarText | None = None
    grammar: GrammarText | None = None


class ResponseFields(Struct, kw_only=True):
    """The fields of a body that define the answer's format and end."""

    response_format: Annotated[ResponseFormat | Literal["text", "json_object"], Meta(description=_TYPES)] | None = None
    guided_json: Schema | None = None
    guided_choice: Texts | None = None
    guided_regex: GrammarText | None = None
    guided_grammar: GrammarText | None = None
    structured_outputs: Annotated[StructuredOutputs, Meta(description=_ONE_OF)] | None = None
    bad_words: (
        Annotated[
            list[Annotated[str, Meta(pattern=r"\S", max_length=MAX_BAD_WORD)]],
            Meta(
                max_length=MAX_BAD_WORDS,
                description=f"a list of at most {MAX_BAD_WORDS} strings of at most {MAX_BAD_WORD} characters, none blank",
            ),
        ]
        | None
    ) = None
    allowed_token_ids: (
        Annotated[
            list[int],
            Meta(min_length=1, max_length=MAX_ALLOWED, description=f"a list of 1 to {MAX_ALLOWED} token ids (integers)"),
        ]
        | None
    ) = None
    ignore_eos: Flag | None = None
    min_tokens: Annotated[int, Meta(ge=0, description="an integer of at least 0")] | None = None


def grammar_of(fields: ResponseFields, call: Grammar | None = None) -> tuple[str, Grammar | None]:
    """The constraint in a body, if any, and the field with it; `call`: the constraint of a forced tool call. Raises
    ApiError.
    """
    found = [("response_format", one) for one in _from_response_format(fields.response_format)]
    found += [("tool_choice", call)] if call else []
    found += _guided(fields)
    if len(found) > 1:
        fields_of_formats = ", ".join((*FIELDS, "a tool_choice that forces a call"))
        raise ApiError(400, f"Only one format per request: send one of {fields_of_formats}.", found[1][0])
    for name in ("ignore_eos", "min_tokens"):
        if found and getattr(fields, name):
            raise ApiError(400, f"The format decides where the answer ends: leave out {name}.", name)
    for name in MASKS:
        if found and getattr(fields, name):
            raise ApiError(400, f"The format decides which tokens are allowed: leave out {name}.", name)
    return found[0] if found else ("response_format", None)


def refuse_constraints(body: Mapping[str, Any]) -> None:
    """Raises ApiError for one of these fields, for an API without them: an answer that ignored it would be wrong."""
    for name in (*FIELDS, *MASKS):
        if asks(name, body.get(name)):
            raise ApiError(400, f"{name} is not a field of this API: send it to /v1/chat/completions, or leave it out.", name)


def _from_response_format(wanted: ResponseFormat | str | None) -> Iterator[Grammar]:
    described = wanted.json_schema if isinstance(wanted, ResponseFormat) else None
    kind = wanted.type if isinstance(wanted, ResponseFormat) else wanted
    if kind == "json_object":
        yield Grammar("json", ANY_OBJECT)
    if kind == "json_schema":
        if described is None:
            raise ApiError(400, "response_format.json_schema must be an object with a schema.", "response_format.json_schema")
        yield json_grammar(described.schema, "response_format.json_schema.schema")


def _guided(fields: ResponseFields) -> Iterator[tuple[str, Grammar]]:
    """The constraints, each with its field."""
    outputs = fields.structured_outputs or StructuredOutputs()
    if outputs.json_object:
        yield "structured_outputs.json_object", Grammar("json", ANY_OBJECT)
    for name, schema in (("guided_json", fields.guided_json), ("structured_outputs.json", outputs.json)):
        if schema is not None:
            yield name, json_grammar(schema, name)
    for name, choice in (("guided_choice", fields.guided_choice), ("structured_outputs.choice", outputs.choice)):
        if choice is not None:
            yield name, Grammar("choice", orjson.dumps(choice).decode())
    for name, regex in (("guided_regex", fields.guided_regex), ("structured_outputs.regex", outputs.regex)):
        if regex is not None:
            yield name, Grammar("regex", regex)
    for name, text in (("guided_grammar", fields.guided_grammar), ("structured_outputs.grammar", outputs.grammar)):
        if text is not None:
            yield name, Grammar("lark", text)


def json_grammar(schema: dict[str, Any] | bool | str, name: str) -> Grammar:
    """The constraint of a JSON schema, which may also be sent as JSON text. Raises ApiError, which names the field."""
    parsed: object = schema
    if isinstance(schema, str):
        check_texts([schema], name)
        try:
            parsed = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise ApiError(400, f"{name} is not valid JSON: {error}.", name) from None
    if not isinstance(parsed, dict | bool):
        raise ApiError(400, f"{name} must be a JSON schema (an object), not {kind_of(parsed)}.", name)
    return Grammar("json", json_text(parsed, name))
