"""JSON values of schemas: each is valid, or the schema is refused with a reason."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.sim.example import NoExample, example_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
BOUNDS = {name: st.integers(-5, 9) for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")}
LEAVES = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])}, optional={**BOUNDS, "multipleOf": st.integers(1, 4)}
    ),
    st.fixed_dictionaries(
        {"type": st.just("string")}, optional={"minLength": st.integers(0, 9), "maxLength": st.integers(9, 12)}
    ),
    st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"const": VALUES}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {}, True]),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3)},
            optional={"required": st.lists(st.sampled_from("abcd"), unique=True), "additionalProperties": st.just(True)},
        ),
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner}, optional={"minItems": st.integers(0, 3), "maxItems": st.integers(3, 4)}
        ),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"type": st.just("array"), "prefixItems": st.lists(inner, min_size=1, max_size=2)}),
    ),
    max_leaves=8,
)


@given(SCHEMAS)
def test_the_value_is_valid(schema: Any) -> None:
    try:
        found = example_of(json.dumps(schema))
    except NoExample:
        return
    jsonschema.Draft202012Validator(schema).validate(json.loads(found))


@given(
    VALUES
    | st.dictionaries(
        st.sampled_from(["type", "properties", "items", "required", "anyOf", "allOf", "$ref", "minItems"]), VALUES
    )
)
def test_any_value_is_followed_or_refused(schema: Any) -> None:
    with contextlib.suppress(NoExample):
        json.loads(example_of(json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "age": {"type": "integer", "minimum": 18},
                    "nick": {"pattern": "^x"},
                },
                "required": ["name", "age"],
                "additionalProperties": False,
            },
            {"name": "warm", "age": 18},
        ),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "array", "items": {"$ref": "#/$defs/B"}}, "B": {"const": 7}}}, [7]),
        (
            {"allOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 2}}, "required": ["b"]}]},
            {"a": 1, "b": 2},
        ),
        ({"oneOf": [{"type": "string", "format": "date"}, {"type": "number", "exclusiveMaximum": 0, "multipleOf": 0.5}]}, -0.5),
        ({"type": "object"}, {}),
    ],
)
def test_examples(schema: Any, value: Any) -> None:
    jsonschema.Draft202012Validator(schema).validate(value)
    assert json.loads(example_of(json.dumps(schema))) == value


def test_a_tree_ends() -> None:
    tree = {"$ref": "#/$defs/N", "$defs": {"N": {"type": "object", "properties": {"next": {"$ref": "#/$defs/N"}}}}}
    assert "next" in example_of(json.dumps(tree))
    tree["$defs"]["N"]["required"] = ["next"]  # type: ignore[index]
    with pytest.raises(NoExample, match="no end"):
        example_of(json.dumps(tree))


@pytest.mark.parametrize(
    "schema", [False, {"type": "string", "pattern": "x"}, {"type": "date"}, {"enum": []}, {"$ref": "#/a"}, {"$ref": "http://x"}]
)
def test_what_it_cannot_follow_is_refused(schema: Any) -> None:
    with pytest.raises(NoExample):
        example_of(json.dumps(schema))
