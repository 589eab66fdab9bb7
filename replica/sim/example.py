"""A JSON value of a schema, for answers that have to follow one: the simulated engine has no token scores to constrain.

The same schema always has the same value: the first choice, the least numbers, texts and lists, and all properties, but only
the required ones from MAX_DEPTH on. Keywords that do not concern it are ignored. Raises NoExample for a schema that
it cannot follow (a pattern, a format, a property name's pattern, an endless recursion).
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Final

MAX_DEPTH: Final = 8  # from here on, an object has only its required properties
_DEEPEST: Final = 24
_MOST_VALUES: Final = 10_000  # that are tried
_LONGEST: Final = 1000  # characters of a text, items of a list
_WORD: Final = "warm"
_UNFOLLOWED: Final = ("pattern", "format", "not", "if", "contains", "patternProperties", "propertyNames", "dependentSchemas")


class NoExample(ValueError):
    """The schema cannot be followed. The message is for the client."""


def example_of(schema: str) -> str:
    """A JSON text of a schema, itself JSON text. Raises NoExample. O(schema), with a bound."""
    root = json.loads(schema)
    try:
        return json.dumps(_Examples(root).of(root, 0))
    except NoExample:
        raise
    except (TypeError, AttributeError, KeyError, ValueError, OverflowError, RecursionError):
        raise NoExample("the schema is malformed") from None


class _Examples:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MOST_VALUES

    def of(self, schema: Any, depth: int) -> Any:
        self._left -= 1
        if depth > _DEEPEST or self._left < 0:
            raise NoExample("the schema has no end, or too many values")
        if schema is True or schema == {}:
            return _WORD if depth else {}
        if not isinstance(schema, dict):
            raise NoExample("no value follows the schema 'false'")
        for name in _UNFOLLOWED:
            if name in schema:
                raise NoExample(f"the simulated engine does not follow {name!r} of a schema")
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._first(schema["enum"], "enum")
        if "$ref" in schema:
            return self.of({**self._resolved(schema["$ref"]), **_others(schema, "$ref")}, depth + 1)
        if "allOf" in schema:
            return self.of(self._merged(schema), depth + 1)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return self._of_one(schema, name, depth)
        return self._of_type(schema, depth)

    def _of_one(self, schema: Mapping[str, Any], name: str, depth: int) -> Any:
        """The value of the first alternative that has one."""
        rest = _others(schema, name)
        refusal: NoExample | None = None
        for alternative in schema[name]:
            try:
                return self.of({**rest, **alternative} if isinstance(alternative, dict) else alternative, depth + 1)
            except NoExample as error:
                refusal = refusal or error
        raise refusal or NoExample(f"{name!r} has no alternative")

    def _of_type(self, schema: Mapping[str, Any], depth: int) -> Any:
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = self._first(kind, "type")
        if kind is None:
            kind = "array" if "items" in schema else "object" if "properties" in schema or not depth else "string"
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind == "string":
            least, most = schema.get("minLength", 0), schema.get("maxLength", _LONGEST)
            return (_WORD * (1 + int(_bounded(least)) // len(_WORD)))[: max(int(_bounded(least)), min(len(_WORD), most))]
        if kind in ("integer", "number"):
            return _number(schema, whole=kind == "integer")
        if kind in ("boolean", "null"):
            return True if kind == "boolean" else None
        raise NoExample(f"{str(kind)[:50]!r} is no type of JSON")

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        found = dict[str, Any]()
        for name in [*properties, *(name for name in required if name not in properties)]:
            if name in required:
                found[name] = self.of(properties.get(name, True), depth + 1)
            elif depth < MAX_DEPTH:
                try:
                    found[name] = self.of(properties[name], depth + 1)
                except NoExample:
                    continue  # it may be left out
        if len(found) < schema.get("minProperties", 0) or len(found) > schema.get("maxProperties", len(found)):
            raise NoExample("the simulated engine does not follow 'minProperties' and 'maxProperties' of a schema")
        return found

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        heads, least = schema.get("prefixItems") or [], int(_bounded(schema.get("minItems", 0)))
        if schema.get("uniqueItems") and least > 1:
            raise NoExample("the simulated engine does not follow 'uniqueItems' of a schema")
        count = least
        if not least and depth < MAX_DEPTH and schema.get("maxItems", 1):
            count = 1
        items = schema.get("items", True)
        try:
            return [self.of(heads[at] if at < len(heads) else items, depth + 1) for at in range(count)]
        except NoExample:
            if least:
                raise
            return []

    def _merged(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The schema with all parts of its `allOf`; their properties and required names are added up."""
        merged = _others(schema, "allOf")
        for part in schema["allOf"]:
            each = (
                {**self._resolved(part["$ref"]), **_others(part, "$ref")} if isinstance(part, dict) and "$ref" in part else part
            )
            if not isinstance(each, dict):
                continue
            for name, value in each.items():
                if name == "properties":
                    merged[name] = {**merged.get(name, {}), **value}
                elif name == "required":
                    merged[name] = [*merged.get(name, []), *value]
                else:
                    merged.setdefault(name, value)
        return merged

    def _resolved(self, reference: Any) -> dict[str, Any]:
        found: Any = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise NoExample(f"{str(reference)[:50]!r} is not in the schema")
        for name in reference.lstrip("#").split("/")[1:]:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            raise NoExample(f"{reference[:50]!r} is not in the schema")
        return found

    def _first(self, values: Any, name: str) -> Any:
        if not isinstance(values, list) or not values:
            raise NoExample(f"{name!r} has no value")
        return values[0]


def _others(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != name}


def _bounded(count: Any) -> float:
    if isinstance(count, bool) or not isinstance(count, int | float) or not 0 <= count <= _LONGEST:
        raise NoExample(f"the simulated engine writes texts and lists of at most {_LONGEST}")
    return count


def _number(schema: Mapping[str, Any], *, whole: bool) -> float:
    """The least number from 1 on, or else the largest one."""
    least, most = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    step = schema.get("multipleOf") or (1 if whole else None)
    if "exclusiveMinimum" in schema:
        least = max(least, schema["exclusiveMinimum"] + (step or 1e-6))
    if "exclusiveMaximum" in schema:
        most = min(most, schema["exclusiveMaximum"] - (step or 1e-6))
    value: float = min(max(1, least), most)
    if step:
        value = step * (math.ceil(value / step) if value > least or least == -math.inf else math.ceil(least / step))
        if value > most:
            value = step * math.floor(most / step)
    if not least <= value <= most:
        raise NoExample("no number is within the bounds of the schema")
    return int(value) if whole or value == int(value) else value
