"""The JSON Schema of documents, for editors. It is made of the tables that the reader uses (`keys.py`), so each key is in both.

It accepts every valid document. References, types of expressions and circles are beyond it: `compiling.py` checks them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from gateway.features.workflows.language.constraints import MAX_CHOICES, SHORT_FORMS
from gateway.features.workflows.language.fields import MAX_TEXT, OUTPUT_NAME, STEP_NAME, VARIABLE_NAME, WORKFLOW_NAME
from gateway.features.workflows.language.inputs import INPUT_TYPES, MAX_INPUTS
from gateway.features.workflows.language.keys import (
    ARM_KEYS,
    CALL_KEYS,
    CHAT_KEYS,
    DEFAULT_KEYS,
    DOCUMENT_KEYS,
    EACH_KEYS,
    ERRORS,
    INPUT_KEYS,
    LENGTH,
    LIMITS,
    MAX_MODEL_CHARS,
    NOT_EXTRA,
    RETRIES,
    ROLES,
    SAMPLING_NUMBERS,
    STEP_KEYS,
    STREAMS,
    TEXT_KEYS,
    TIMEOUT_S,
    TOKENS,
    VERSION,
    YIELD_KEYS,
    NumberBounds,
)
from gateway.features.workflows.language.results import CALL, CHAT, EACH, KINDS, LET, SWITCH, TEXT
from gateway.features.workflows.language.steps import MAX_ARMS, MAX_MESSAGES, MAX_STEPS

Schema = dict[str, Any]


def document_schema() -> Schema:
    """JSON Schema (2020-12) of a document."""
    values: Mapping[str, Schema] = {
        "workflow": {"const": VERSION, "description": "The version of the language."},
        "name": _name(WORKFLOW_NAME),
        "description": {**_TEXT, "description": "Shown in lists."},
        "inputs": _named(VARIABLE_NAME, _input(), MAX_INPUTS),
        "defaults": _object(DEFAULT_KEYS, _MODEL_KEYS, description="Of all chat and text steps."),
        "steps": _ref("steps"),
        "outputs": _named(OUTPUT_NAME, _ANY, MAX_STEPS, description="The result; default: all yielded outputs."),
        "primary": {"type": ["string", "null"], "description": "The output that is the text of a chat answer."},
        "limits": _object(LIMITS, {key: _number(each) for key, each in LIMITS.items()}),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Workflow",
        **_object(DOCUMENT_KEYS, values, required=("workflow", "name", "steps")),
        "$defs": {
            "steps": {**_named(STEP_NAME, _ref("step"), MAX_STEPS), "minProperties": 1},
            "step": _step(),
            "expression": {"type": "string", "pattern": r"^\$\{[\s\S]*\}$", "examples": ["${inputs.text}"]},
        },
    }


def _step() -> Schema:
    values: Mapping[str, Schema] = {
        CHAT: _object(
            CHAT_KEYS, {**_CALL_KEYS, "from": _FROM, "append": _messages()}, one_of=("from", "append"), exactly=False
        ),
        TEXT: _object(TEXT_KEYS, {**_CALL_KEYS, "from": _name(STEP_NAME), "append": _STRING}, one_of=("prompt", "from")),
        CALL: _object(CALL_KEYS, {"use": _name(WORKFLOW_NAME), "with": _ANY}, required=("use",)),
        LET: _ANY,
        SWITCH: {"type": "array", "items": _arm(), "minItems": 1, "maxItems": MAX_ARMS},
        EACH: _object(
            EACH_KEYS,
            {"in": _any_of({"type": "array"}, _EXPRESSION), "as": _name(VARIABLE_NAME), "steps": _ref("steps"), "value": _ANY},
            required=EACH_KEYS,
        ),
        "needs": _NAMES,
        "needs_any": _NAMES,
        "if": _EXPRESSION,
        "yield": _yield(),
        "kill": _NAMES,
        "timeout_s": _number(TIMEOUT_S),
        "retry": _object(("max",), {"max": _number(RETRIES)}),
        "on_error": _any_of({"enum": list(ERRORS)}, _object(("value",), {"value": _ANY})),
    }
    return _object(STEP_KEYS, values, one_of=KINDS)


def _input() -> Schema:
    values: Mapping[str, Schema] = {
        "type": {"enum": list(INPUT_TYPES)},
        "required": {"type": "boolean"},
        "default": _ANY,
        "enum": {"type": "array", "minItems": 1},
        "max_length": _number(LENGTH),
    }
    return _object(INPUT_KEYS, values, required=("type",))


def _arm() -> Schema:
    values: Mapping[str, Schema] = {
        "when": _EXPRESSION,
        "else": {"const": True},
        "emit": _named(OUTPUT_NAME, _ANY, MAX_STEPS),
        "kill": _NAMES,
        "steps": _ref("steps"),
        "value": _ANY,
    }
    return _object(ARM_KEYS, values, one_of=("when", "else"))


def _yield() -> Schema:
    values: Mapping[str, Schema] = {"as": _name(OUTPUT_NAME), "value": _ANY, "stream": {"enum": list(STREAMS)}}
    return _any_of(_name(OUTPUT_NAME), _object(YIELD_KEYS, values, required=("as",)))


def _messages() -> Schema:
    message: Schema = {
        "type": "object",
        "properties": {"role": {"enum": list(ROLES)}},
        "required": ["role"],
        "anyOf": [{"required": ["content"]}, {"required": ["tool_calls"]}],
    }
    return {"type": "array", "items": _any_of(message, _EXPRESSION), "minItems": 1, "maxItems": MAX_MESSAGES}


def _object(
    keys: Iterable[str],
    values: Mapping[str, Schema],
    *,
    required: Iterable[str] = (),
    one_of: Iterable[str] = (),
    exactly: bool = True,
    description: str = "",
) -> Schema:
    """An object with these keys. values: their schemas, maybe more. one_of: one of these is required; exactly: and no other."""
    made: Schema = {"type": "object", "properties": {key: values[key] for key in keys}, "additionalProperties": False}
    if required := list(required):
        made["required"] = required
    if choices := [{"required": [key]} for key in one_of]:
        made["oneOf" if exactly else "anyOf"] = choices
    return made | ({"description": description} if description else {})


def _named(form: re.Pattern[str], value: Schema, most: int, description: str = "") -> Schema:
    """An object whose keys are names."""
    made: Schema = {"type": "object", "propertyNames": _name(form), "additionalProperties": value, "maxProperties": most}
    return made | ({"description": description} if description else {})


def _name(form: re.Pattern[str]) -> Schema:
    return {"type": "string", "pattern": f"^{form.pattern}$"}


def _number(bounds: NumberBounds) -> Schema:
    return {"type": "integer" if bounds.whole else "number", "minimum": bounds.low, "maximum": bounds.high}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


_ANY: Final[Schema] = {}
_STRING: Final[Schema] = {"type": "string"}
_TEXT: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT}
_EXPRESSION: Final = _ref("expression")
_FROM: Final = _any_of(_name(STEP_NAME), _EXPRESSION)
_NAMES: Final[Schema] = {"type": "array", "items": _name(STEP_NAME)}
_CONSTANT: Final[Schema] = {"type": "string", "minLength": 1, "not": {"pattern": r"\$\{"}}
_MODEL_KEYS: Final[Mapping[str, Schema]] = {
    "model": {**_CONSTANT, "maxLength": MAX_MODEL_CHARS},
    "max_tokens": _number(TOKENS),
    "stop": _any_of(_STRING, {"type": "array", "items": _STRING}),
    **{key: _any_of(_number(each), _EXPRESSION) for key, each in SAMPLING_NUMBERS.items()},
}
_CALL_KEYS: Final[Mapping[str, Schema]] = {
    **_MODEL_KEYS,
    "prompt": _STRING,
    "choices": {"type": "array", "items": _CONSTANT, "minItems": 1, "maxItems": MAX_CHOICES, "uniqueItems": True},
    "output": _any_of({"enum": list(SHORT_FORMS)}, {"type": "object"}),
    "tools": _ANY,
    "tool_choice": _ANY,
    "extra": {"type": "object", "propertyNames": {"not": {"enum": sorted(NOT_EXTRA)}}},
}
