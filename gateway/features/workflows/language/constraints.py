"""Answers that keep a shape: one of some texts, or JSON that fits a schema.

An engine is told to keep it; its answer is checked here nevertheless, against a subset of JSON Schema (`_KEYWORDS`). Other
keywords are sent and not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.features.workflows.language.faults import DocumentFaults, shown
from gateway.features.workflows.language.functions import is_number, parse_work
from gateway.features.workflows.language.reading import member
from gateway.features.workflows.language.values import EvaluationError, json_of, parsed_json, same, type_name

SHORT_FORMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "list": {"type": "array", "items": {"type": "string"}},
    **{name: {"type": name} for name in ("string", "integer", "number", "boolean", "object")},
}
_TYPES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: is_number(value) and value == int(value),
    "number": is_number,
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "null": lambda value: value is None,
}
MAX_CHOICES: Final = 256
MAX_CHECKS: Final = 16_384
STEP_BYTES: Final = 256  # of an enum's values, as JSON
CHECK_WORK: Final = 1500  # units of `WorkBudget`


class ConstraintUnsatisfiedError(EvaluationError):
    """The answer does not fit. The step may ask again."""


@dataclass(frozen=True, slots=True)
class AnswerConstraint:
    """choices: the texts that are possible; empty: `schema` alone says it. schema: JSON Schema of the answer."""

    schema: Mapping[str, Any]
    choices: tuple[str, ...] = ()

    def members(self, *, as_choice: bool) -> dict[str, Any]:
        """The members of a request that demand it. as_choice: its engine takes `structured_outputs: {choice}`."""
        if as_choice and self.choices:
            return {"structured_outputs": {"choice": list(self.choices)}}
        schema = {"name": "answer", "strict": True, "schema": self.schema}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}

    def read(self, text: str, spend: Callable[[int], None] = lambda work: None) -> Any:
        """The value of an answer: the choice itself, or the parsed JSON. spend: called with units of work before it is done.

        Raises ConstraintUnsatisfiedError, or EvaluationError for a value that is too large.
        """
        spend(parse_work(text))
        if self.choices:
            return self._chosen(text)
        value = parsed_json(text)
        if value is None and text.strip() != "null":
            raise ConstraintUnsatisfiedError("the answer is no JSON")
        if fault := mismatch(value, self.schema, spend):
            raise ConstraintUnsatisfiedError(f"the answer does not fit its schema: {fault}")
        return value

    def _chosen(self, text: str) -> str:
        """The choice, written as it is, with other spaces around it, or as JSON (engines with a schema)."""
        written = parsed_json(text)
        for form in (text, written if isinstance(written, str) else text):
            for choice in self.choices:
                if form == choice:
                    return choice
            for choice in self.choices:
                if form.strip() == choice.strip():
                    return choice
        raise ConstraintUnsatisfiedError("the answer is none of its choices")


def choice_constraint(choices: tuple[str, ...]) -> AnswerConstraint:
    return AnswerConstraint({"type": "string", "enum": list(choices)}, choices)


def check_schema(schema: Any, path: str, faults: DocumentFaults) -> None:
    """The keywords that are checked here must be well-formed."""
    if not isinstance(schema, dict):
        faults.add(path, f"a JSON schema (an object) is expected, got {shown(schema)}")
        return
    for key, value in schema.items():
        place = member(path, key)
        if key == "properties" and isinstance(value, dict):
            for name, each in value.items():
                check_schema(each, member(place, name), faults)
        elif key == "items":
            check_schema(value, place, faults)
        elif key == "anyOf" and isinstance(value, list) and value:
            for at, each in enumerate(value):
                check_schema(each, f"{place}[{at}]", faults)
        elif key in _FORMS and not _FORMS[key][0](value):
            faults.add(place, f"{_FORMS[key][1]} is expected, got {shown(value)}")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_types(value: object) -> bool:
    return bool(value) and all(
        isinstance(each, str) and each in _TYPES for each in (value if isinstance(value, list) else [value])
    )


_FORMS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "type": (_is_types, f"one of {', '.join(_TYPES)}, or a list of them,"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of values"),
    "properties": (lambda value: isinstance(value, dict), "an object of schemas"),
    "required": (lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value), "a list of names"),
    "anyOf": (lambda value: isinstance(value, list) and bool(value), "a list of schemas"),
    **dict.fromkeys(("minItems", "maxItems", "maxLength"), (_is_size, "a whole number from 0")),
    **dict.fromkeys(("minimum", "maximum"), (is_number, "a number")),
}


def mismatch(value: Any, schema: Mapping[str, Any], spend: Callable[[int], None] = lambda work: None) -> str:
    """The first reason why a value does not fit a checked schema; "": it does.

    Raises ConstraintUnsatisfiedError after MAX_CHECKS steps.
    """
    check = _SchemaCheck()
    found = check.mismatch(value, schema, "")
    spend(CHECK_WORK * check.steps)
    return found


class _SchemaCheck:
    """One value against one schema. The number of values times the alternatives of `anyOf` and `enum` is bounded, and so are
    the bytes of these alternatives.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._enums: dict[int, int] = {}  # steps of an enum, by the identity of its schema

    def mismatch(self, value: Any, schema: Mapping[str, Any], path: str) -> str:
        at = f"{path}: " if path else ""
        self.steps += 1 + (self._steps_of(schema) if "enum" in schema else 0)
        if self.steps > MAX_CHECKS:
            raise ConstraintUnsatisfiedError("the answer has too many values to be checked")
        types = schema.get("type", [])
        allowed = types if isinstance(types, list) else [types]
        if allowed and not any(_TYPES[each](value) for each in allowed):
            return f"{at}{' or '.join(allowed)} is expected, got {type_name(value)}"
        if "enum" in schema and not any(same(value, each) for each in schema["enum"]):
            return f"{at}it is none of the values of its enum"
        if "const" in schema and not same(value, schema["const"]):
            return f"{at}it is not the value of its const"
        if "anyOf" in schema and all(self.mismatch(value, each, path) for each in schema["anyOf"]):
            return f"{at}it fits none of anyOf"
        return _out_of_bounds(value, schema, at) or self._inner(value, schema, path)

    def _steps_of(self, schema: Mapping[str, Any]) -> int:
        steps = self._enums.get(id(schema))
        if steps is None:
            values = schema["enum"]
            steps = self._enums[id(schema)] = len(values) + len(json_of(values)) // STEP_BYTES
        return steps

    def _inner(self, value: Any, schema: Mapping[str, Any], path: str) -> str:
        if isinstance(value, dict):
            missing = next((name for name in schema.get("required", ()) if name not in value), None)
            if missing is not None:
                return f"{member(path, missing)} is missing"
            inner = schema.get("properties", {})
            parts = ((member(path, name), value[name], each) for name, each in inner.items() if name in value)
        elif isinstance(value, list) and "items" in schema:
            parts = ((f"{path}[{at}]", each, schema["items"]) for at, each in enumerate(value))
        else:
            return ""
        return next(filter(None, (self.mismatch(each, schema, place) for place, each, schema in parts)), "")


def _out_of_bounds(value: Any, schema: Mapping[str, Any], at: str) -> str:
    if is_number(value):
        if value < schema.get("minimum", value):
            return f"{at}less than {schema['minimum']}"
        if value > schema.get("maximum", value):
            return f"{at}more than {schema['maximum']}"
    if isinstance(value, str) and len(value) > schema.get("maxLength", len(value)):
        return f"{at}longer than {schema['maxLength']} characters"
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            return f"{at}fewer than {schema['minItems']} items"
        if len(value) > schema.get("maxItems", len(value)):
            return f"{at}more than {schema['maxItems']} items"
    return ""
