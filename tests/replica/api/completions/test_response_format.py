"""Each way to ask for a shape, and each mistake."""

from typing import Any

import pytest

from replica.api.completions.response_format import ResponseFields, grammar_of
from replica.api.validation import ApiError, checked
from replica.engine import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json", '{"type":"object"}')),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, Grammar("json", TEXT)),
        ({"guided_json": SCHEMA}, Grammar("json", TEXT)),
        ({"guided_json": TEXT}, Grammar("json", TEXT)),
        ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a","b"]')),
        ({"guided_regex": "[0-9]+"}, Grammar("regex", "[0-9]+")),
        ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
        ({"structured_outputs": {"regex": "a"}}, Grammar("regex", "a")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, Grammar("json", TEXT)),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]')),
        ({"structured_outputs": {"json_object": True}}, Grammar("json", '{"type":"object"}')),
    ],
)
def test_what_is_asked_for(body: dict[str, Any], grammar: Grammar | None) -> None:
    field, found = grammar_of(checked(body, ResponseFields))
    assert found == grammar
    assert field.partition(".")[0] == next(iter(body), "response_format")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"response_format": "xml"}, "must be 'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "xml"}}, "must be 'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "an object with a schema"),
        ({"guided_json": "{"}, "guided_json is not valid JSON"),
        ({"guided_json": [1]}, "must be a JSON schema"),
        ({"guided_choice": []}, "a list of strings"),
        ({"guided_choice": [""]}, "a list of strings"),
        ({"guided_regex": 5}, "must be a string, not a number"),
        ({"guided_grammar": []}, "must be a string, not a list"),
        ({"structured_outputs": {"structural_tag": "x"}}, "one of json, json_object, choice, regex, grammar"),
        ({"structured_outputs": [1]}, "one of json, json_object, choice, regex, grammar"),
        ({"guided_grammar": "a", "structured_outputs": {"regex": "a"}}, "Only one format"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "Only one format"),
        ({"guided_regex": "a", "ignore_eos": True}, "leave out ignore_eos"),
    ],
)
def test_mistakes(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        grammar_of(checked(body, ResponseFields))
    assert caught.value.status == 400
