"""Inputs: their declarations in a document, and the values of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gateway.features.workflows.language.document import InputDeclaration
from gateway.features.workflows.language.faults import INPUTS_INVALID, DocumentFaults, shown, suggestion
from gateway.features.workflows.language.fields import VARIABLE_NAME, FieldReader, Fields
from gateway.features.workflows.language.functions import is_number
from gateway.features.workflows.language.keys import INPUT_KEYS, LENGTH
from gateway.features.workflows.language.reading import member
from gateway.features.workflows.language.values import MAX_MESSAGES_BYTES, EvaluationError, bytes_of

MAX_INPUTS: Final = 32
MESSAGES: Final = "messages"


def is_messages(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in value)


INPUT_TYPES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    MESSAGES: (is_messages, "a list of messages ({role, content})"),
    "string": (lambda value: isinstance(value, str), "a text"),
    "number": (is_number, "a number"),
    "integer": (lambda value: is_number(value) and value == int(value), "a whole number"),
    "boolean": (lambda value: isinstance(value, bool), "true or false"),
    "list": (lambda value: isinstance(value, list), "a list"),
    "object": (lambda value: isinstance(value, dict), "an object"),
}
_WITH_LENGTH: Final = (MESSAGES, "string", "list")


def read_declarations(raw: Any, reader: FieldReader) -> dict[str, InputDeclaration]:
    """The member `inputs` of a document."""
    named = reader.named(raw, "inputs", VARIABLE_NAME, MAX_INPUTS)
    read = {name: reader.fields(each, member("inputs", name), INPUT_KEYS) for name, each in named.items()}
    return {name: _declaration(fields) if fields.given else InputDeclaration("object") for name, fields in read.items()}


def _declaration(fields: Fields) -> InputDeclaration:
    kind = fields.members.get("type")
    if not isinstance(kind, str) or kind not in INPUT_TYPES:
        fields.fault("type", f"one of {', '.join(INPUT_TYPES)} is expected, got {shown(kind)}")
        kind = "object"
    required = fields.members.get("required", False)
    if not isinstance(required, bool):
        fields.expected("required", "true or false")
    choices = fields.members.get("enum", [])
    if not isinstance(choices, list) or ("enum" in fields and not choices):
        fields.expected("enum", "a list of values")
        choices = []
    if "max_length" in fields and kind not in _WITH_LENGTH:
        fields.fault("max_length", f"only inputs of type {', '.join(_WITH_LENGTH)} have a length")
    length = fields.number("max_length", LENGTH)
    made = InputDeclaration(kind, bool(required), fields.members.get("default"), tuple(choices), length)
    for at, choice in enumerate(choices):
        if fault := _mismatch(choice, InputDeclaration(kind)):
            fields.fault(f"enum[{at}]", fault)
    if "default" in fields and required is True:
        fields.fault("default", "a required input has no default; leave one of the two out")
    elif made.default is not None and (fault := _mismatch(made.default, made)):
        fields.fault("default", fault)
    return made


def _mismatch(value: Any, declared: InputDeclaration) -> str:
    fits, what = INPUT_TYPES[declared.type]
    if not fits(value):
        return f"{what} is expected, got {shown(value)}"
    if declared.choices and value not in declared.choices:
        return f"one of {', '.join(map(shown, declared.choices[:20]))} is expected, got {shown(value)}"
    if declared.max_length is not None and len(value) > declared.max_length:
        return f"it has a length of {len(value):,}, at most {declared.max_length:,} are possible"
    return ""


def read_inputs(declared: Mapping[str, InputDeclaration], given: Any) -> dict[str, Any]:
    """The values of a run: the given ones, defaults, null. Raises DocumentError (`inputs_invalid`)."""
    faults = DocumentFaults()
    if not isinstance(given, dict):
        faults.add("inputs", f"an object (name: value) is expected, got {shown(given)}", INPUTS_INVALID)
        given = {}
    for name in [name for name in given if name not in declared]:
        faults.add(member("inputs", str(name)), f"unknown input; {suggestion(str(name), declared)}", INPUTS_INVALID)
    values: dict[str, Any] = {name: each.default for name, each in declared.items()} | given
    for name, each in declared.items():
        if values[name] is None:
            if each.required:
                faults.add(member("inputs", name), "this input is required", INPUTS_INVALID)
        elif fault := _mismatch(values[name], each):
            faults.add(member("inputs", name), fault, INPUTS_INVALID)
    try:
        bytes_of(values, MAX_MESSAGES_BYTES)
        bytes_of({name: value for name, value in values.items() if name not in declared or declared[name].type != MESSAGES})
    except EvaluationError as error:
        faults.add("inputs", str(error), INPUTS_INVALID)
    faults.require_none()
    return values
