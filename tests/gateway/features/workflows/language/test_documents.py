"""Errors of documents: each names its path, all come at once, and a newcomer understands them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gateway.features.workflows.language.compiling import JSON, YAML, compile_document, compile_text
from gateway.features.workflows.language.faults import OVER_LIMITS, TOO_LARGE, UNBOUNDED, DocumentError
from gateway.features.workflows.language.inputs import read_inputs
from gateway.features.workflows.language.reading import read_json, read_yaml
from gateway.features.workflows.language.workflow import Workflow

DOCUMENT: dict[str, Any] = {
    "workflow": 1,
    "name": "w",
    "inputs": {"m": {"type": "messages", "required": True}, "t": {"type": "string"}},
    "defaults": {"model": "q", "max_tokens": 10},
    "steps": {
        "a": {"chat": {"from": "${inputs.m}"}, "yield": "a"},
        "b": {"chat": {"from": "a", "append": [{"role": "user", "content": "${a.text}"}], "output": "list"}, "yield": "b"},
        "c": {
            "switch": [
                {"when": "${len(b.value) > 1}", "steps": {"c1": {"let": "${b.value}"}}, "value": "${c1.value}"},
                {"else": True, "kill": ["d"]},
            ],
            "yield": "c",
        },
        "d": {
            "each": {"in": "${b.value[:3]}", "as": "item", "steps": {"d1": {"let": "${item}"}}, "value": "${d1.text}"},
            "yield": "d",
        },
    },
}
"""A valid document."""

REMOVED = object()


def changed(path: str, value: Any) -> dict[str, Any]:
    """The document with another value at a path such as steps/a/chat."""
    made = copy.deepcopy(DOCUMENT)
    *outer, last = path.split("/")
    place: Any = made
    for part in outer:
        place = place[int(part) if isinstance(place, list) else part]
    if value is REMOVED:
        del place[last]
    else:
        place[last] = value
    return made


def faults_of(document: Any) -> list[tuple[str, str]]:
    with pytest.raises(DocumentError) as error:
        compile_document(document)
    return [(fault.path, fault.text) for fault in error.value.faults]


def test_the_document_is_valid() -> None:
    assert isinstance(compile_document(DOCUMENT), Workflow)


USED = ("defaults", "steps/a", "steps/b/chat/from", "steps/c/switch/0/else", "steps/d/each/as")
"""Values that other steps depend on."""


@pytest.mark.parametrize(
    ("path", "value", "at", "why"),
    [
        # the document
        ("workflow", 2, "workflow", "the version of the language is expected: workflow: 1"),
        ("workflow", REMOVED, "workflow", "the version of the language is expected"),
        ("name", REMOVED, "name", "this key is missing"),
        ("name", "My Flow", "name", "a name is expected (small letters, digits, _ and -"),
        ("steps", REMOVED, "steps", "this key is missing"),
        ("steps", {}, "steps", "a step is expected here"),
        ("steps", [], "steps", "an object (name: value) is expected, got a list"),
        ("stepz", {}, "stepz", "unknown key; did you mean 'steps'?"),
        ("primary", "x", "primary", "there is no output 'x'; outputs are the names that steps yield; known: a, b, c, d"),
        ("limits", {"calls": 0}, "limits.calls", "a whole number from 1 to"),
        ("defaults", {"model": "${inputs.t}"}, "defaults.model", "this value is a constant"),
        ("defaults", {"max_tokens": 10}, "steps.a.chat.model", "the model is missing; name it here or in defaults.model"),
        ("outputs", {"x": "${c1.value}"}, "outputs.x", "the step 'c1' is inside of 'c', and not seen outside of it"),
        ("outputs", {"x": "${a}"}, "outputs.x", "'a' is a step; its result is read as one of a.text, a.value"),
        # inputs
        ("inputs/m/type", "text", "inputs.m.type", "one of messages, string, number"),
        ("inputs/m/default", [], "inputs.m.default", "a required input has no default"),
        ("inputs/t/default", 1, "inputs.t.default", "a text is expected, got 1"),
        ("inputs/t/enum", [], "inputs.t.enum", "a list of values is expected"),
        ("inputs/t/enum", [1], "inputs.t.enum[0]", "a text is expected, got 1"),
        ("inputs/m/requierd", True, "inputs.m.requierd", "did you mean 'required'?"),
        # steps
        ("steps/a", 1, "steps.a", "an object with the keys chat, text, call"),
        (
            "steps/a",
            {"yield": "a"},
            "steps.a",
            "a step has exactly one of chat, text, call, let, switch, each; this one has none",
        ),
        ("steps/a/let", 1, "steps.a", "this one has chat and let"),
        ("steps/a", {"repeat": {}}, "steps.a.repeat", "this kind of step is reserved for a later version"),
        ("steps/run", {"let": 1}, "steps.run", "the name 'run' is reserved"),
        ("steps/import", {"let": 1}, "steps.import", "'import' is a word of Python"),
        ("inputs/from", {"type": "string"}, "inputs.from", "'from' is a word of Python"),
        ("steps/c1", {"let": 1}, "steps.c1", "the name is taken by steps.c.switch[0].steps.c1"),
        ("steps/a/need", ["b"], "steps.a.need", "did you mean 'needs'?"),
        ("steps/a/needs", ["nobody"], "steps.a.needs[0]", "there is no step 'nobody'; known: a, b, c, d"),
        ("steps/a/needs", "b", "steps.a.needs", "a list of names is expected, got 'b'"),
        ("steps/a/needs", ["a"], "steps.a.needs[0]", "a step cannot refer to itself"),
        ("steps/a/kill", ["d1"], "steps.a.kill[0]", "the step 'd1' is inside of 'd'"),
        ("steps/a/if", "yes", "steps.a.if", "an expression such as \"${...}\" is expected, got 'yes'"),
        ("steps/a/if", "${a.text}", "steps.a.if", "a step cannot refer to itself"),
        ("steps/a/timeout_s", 0, "steps.a.timeout_s", "a number from 0.001"),
        ("steps/a/retry", {"max": 4}, "steps.a.retry.max", "a whole number from 0 to 3 is expected, got 4"),
        ("steps/a/on_error", "ignore", "steps.a.on_error", "fail, skip or {value: X} is expected"),
        ("steps/a/yield", {"value": 1}, "steps.a.yield.as", "the name of the output is missing"),
        ("steps/a/yield", {"as": "x", "stream": "text"}, "steps.a.yield.stream", "delta or snapshot is expected"),
        ("steps/d/yield", {"as": "d", "stream": "delta"}, "steps.d.yield.stream", "only chat and text steps can be streamed"),
        ("steps/b/yield", "a", "steps.b.yield", "the output 'a' is yielded twice, first at steps.a.yield"),
        # chat
        ("steps/a/chat", {}, "steps.a.chat", "from (a step, or messages as ${...}) or append"),
        ("steps/a/chat/from", "inputs.m", "steps.a.chat.from", 'a step, or messages such as "${inputs.NAME}" is expected'),
        ("steps/a/chat/from", "m", "steps.a.chat.from", "there is no step 'm'; the input is written \"${inputs.m}\""),
        ("steps/b/chat/from", "c", "steps.b.chat.from", "a chat step continues a chat step; 'c' is a switch step"),
        ("steps/b/chat/from", "aa", "steps.b.chat.from", "there is no step 'aa'; did you mean 'a'?"),
        ("steps/b/chat/from", "x ${inputs.m}", "steps.b.chat.from", 'an expression such as "${...}"'),
        ("steps/b/chat/append", {"role": "user"}, "steps.b.chat.append", "a list of 1 to 256 messages is expected"),
        ("steps/b/chat/append", ["hi"], "steps.b.chat.append[0]", "a message such as {role: user"),
        ("steps/b/chat/append", [{"content": "x"}], "steps.b.chat.append[0].role", "one of system, developer, user"),
        ("steps/b/chat/append", [{"role": "user"}], "steps.b.chat.append[0].content", "the content of the message is missing"),
        ("steps/a/chat/model", "${inputs.t}", "steps.a.chat.model", "this value is a constant, which a run cannot change"),
        ("steps/a/chat/max_tokens", "10", "steps.a.chat.max_tokens", "a whole number from 1 to 1,048,576 is expected"),
        ("steps/a/chat/max_tokens", True, "steps.a.chat.max_tokens", "got true"),
        ("steps/a/chat/temperature", 3, "steps.a.chat.temperature", "a number from 0 to 2 is expected, got 3"),
        ("steps/a/chat/temperature", "warm", "steps.a.chat.temperature", "a number, or an expression such"),
        ("steps/a/chat/stop", 1, "steps.a.chat.stop", "a text or a list of texts"),
        ("steps/a/chat/choices", ["a", "a"], "steps.a.chat.choices", "a list of 1 to 256 different texts"),
        ("steps/a/chat/choices", ["${inputs.t}"], "steps.a.chat.choices", "this value is a constant"),
        ("steps/b/chat/choices", ["x"], "steps.b.chat.output", "a step has choices or output, not both"),
        ("steps/b/chat/output", "lists", "steps.b.chat.output", "list, string, integer"),
        ("steps/b/chat/output", {"type": "text"}, "steps.b.chat.output.type", "one of string, integer"),
        ("steps/b/chat/output", {"items": {"minItems": -1}}, "steps.b.chat.output.items.minItems", "a whole number from 0"),
        ("steps/a/chat/extra", {"n": 5}, "steps.a.chat.extra.n", "this member of the request is set by the workflow"),
        ("steps/a/chat/extra", {"n_predict": 5}, "steps.a.chat.extra.n_predict", "this member of the request is set by"),
        ("steps/a/chat/prompt", "x", "steps.a.chat.prompt", "unknown key"),
        ("steps/a/chat/from", "${inputs.x}", "steps.a.chat.from", "there is no input 'x'; known: m, t"),
        ("steps/a/chat/from", "${m}", "steps.a.chat.from", "the name 'm' is not known; write inputs.m"),
        ("steps/b/chat/from", "${a}", "steps.b.chat.from", "(to continue its transcript, write from: a)"),
        ("inputs/t", "string", "inputs.t", "an object with the keys type, required"),
        ("steps/a/chat/from", "${true}", "steps.a.chat.from", "did you mean 'True'?"),
        ("steps/a/chat/from", "${inputs.m", "steps.a.chat.from", "${ is not closed by a brace"),
        (
            "steps/b/chat/append",
            [{"role": "user", "content": "${a.txt}"}],
            "steps.b.chat.append",
            "a chat step has no .txt; it has a.text",
        ),
        # text, call
        ("steps/a", {"text": {}}, "steps.a.text", "exactly one of prompt (a text) and from"),
        ("steps/a", {"text": {"prompt": "x", "append": "y"}}, "steps.a.text.append", "only a step with from has append"),
        ("steps/a", {"text": {"prompt": ["x"]}}, "steps.a.text.prompt", "a text is expected, got a list"),
        ("steps/a", {"call": {}}, "steps.a.call.use", "the name of a connector is missing"),
        ("steps/a", {"call": {"use": "http://x"}}, "steps.a.call.use", "a name is expected"),
        # switch
        ("steps/c/switch", [], "steps.c.switch", "a list of 1 to 16 arms"),
        ("steps/c/switch/0/else", True, "steps.c.switch[0].else", "only the last arm is else"),
        ("steps/c/switch/0/when", REMOVED, "steps.c.switch[0].when", "a condition is missing"),
        ("steps/c/switch/1/else", "yes", "steps.c.switch[1].else", "true is expected, got 'yes'"),
        ("steps/c/switch/0/value", "${c.value}", "steps.c.switch[0].value", "the step 'c' is around this place"),
        ("steps/c/switch/1/kill", ["c"], "steps.c.switch[1].kill[0]", "a step cannot refer to itself"),
        ("steps/c/switch/1/value", "${d.value}", "steps.c.switch[1].value", "it needs 'd', which this arm kills"),
        ("steps/c/switch/1/value", "${c1.value}", "steps.c.switch[1].value", "the step 'c1' is inside of 'c'"),
        (
            "steps/c/switch/1/steps",
            {"e": {"let": "${d.value}"}},
            "steps.c.switch[1].steps.e",
            "it needs 'd', which this arm kills",
        ),
        ("steps/c/switch/1/emit", {"a b": 1}, "steps.c.switch[1].emit.a b", "a name is expected"),
        # each
        ("steps/d/each/as", REMOVED, "steps.d.each.as", "this key is missing; each has in, as, steps and value"),
        ("steps/d/each/as", "a", "steps.d.each.as", "the name 'a' is taken"),
        ("steps/d/each/as", "inputs", "steps.d.each.as", "the name 'inputs' is taken"),
        ("steps/d/each/in", "${b.value}", "steps.d.each.in", "the greatest number of items is not known: write ${x[:5]}"),
        ("steps/d/each/in", "${b.value[:-1]}", "steps.d.each.in", "the greatest number of items is not known"),
        ("steps/d/each/in", "${b.value[:65]}", "steps.d.each.in", "it may have 65 items; at most 64 are possible"),
        ("steps/d/each/in", "items", "steps.d.each.in", "a list, or an expression"),
        ("steps/d/each/steps/d1/yield", "x", "steps.d.each.steps.d1.yield", "a step within an each has no output of its own"),
        ("steps/d/each/steps/d1/let", "${d.value}", "steps.d.each.steps.d1.let", "the step 'd' is around this place"),
    ],
)
def test_an_error_has_its_path_and_says_what_to_do(path: str, value: Any, at: str, why: str) -> None:
    found = faults_of(changed(path, value))
    assert any(place == at and why in text for place, text in found), found
    assert len(found) == 1 or path in USED, "one mistake is one error"


def test_all_errors_come_at_once_up_to_20() -> None:
    document = changed("steps/a/chat/from", "nobody")
    document["steps"]["b"]["chat"] |= {"temprature": 1, "append": "x"}
    document["inputs"]["t"]["type"] = "text"
    document["primary"] = "nothing"
    document["steps"]["e"] = {"let": "${1 +}"}
    assert [path for path, _ in faults_of(document)] == [
        "inputs.t.type",
        "steps.b.chat.temprature",
        "steps.b.chat.append",
        "steps.e.let",
        "steps.a.chat.from",
        "primary",
    ]
    assert len(faults_of(changed("steps", {f"S{at}": {} for at in range(50)}))) == 20


@pytest.mark.parametrize("document", [None, 1, [], "workflow: 1"])
def test_a_document_is_an_object(document: Any) -> None:
    assert faults_of(document) == [("", "a document is an object with the keys workflow, name, inputs, steps")]


@pytest.mark.parametrize(
    ("value", "why"), [(float("inf"), "a number is too large"), ("\ud800", "surrogates not allowed"), (1 << 70, "64-bit range")]
)
def test_a_value_that_is_no_json_is_named(value: Any, why: str) -> None:
    ((path, text),) = faults_of(changed("steps/b/chat/append/0/content", value))
    assert (path, why in text) == ("steps.b.chat.append[0].content", True)
    if isinstance(value, str):
        ((path, text),) = faults_of(changed("steps/b/chat/append", [{value: 1}]))
        assert (path, why in text) == ("steps.b.chat.append[0]", True)


@pytest.mark.parametrize(
    ("steps", "circle"),
    [
        ({"a": {"let": "${b.value}"}, "b": {"let": "${a.value}"}}, "a -> b -> a"),
        (
            {"a": {"let": 1, "needs": ["b"]}, "b": {"let": 1, "needs_any": ["c"]}, "c": {"let": 1, "if": "${a.value}"}},
            "a -> b -> c -> a",
        ),
        ({"a": {"switch": [{"else": True, "steps": {"i": {"let": "${b.value}"}}}]}, "b": {"let": "${a.value}"}}, "a -> b -> a"),
        ({"a": {"switch": [{"else": True, "value": "${b.value}"}]}, "b": {"let": "${a.value}"}}, "a -> b -> a"),
        (
            {
                "a": {"each": {"in": [1], "as": "v", "steps": {"i": {"let": 1, "needs": ["b"]}}, "value": 1}},
                "b": {"let": "${a.value}"},
            },
            "a -> b -> a",
        ),
        ({"a": {"chat": {"from": "b"}}, "b": {"chat": {"from": "a"}}}, "a -> b -> a"),
    ],
)
def test_a_circle_is_refused_with_its_steps(steps: dict[str, Any], circle: str) -> None:
    assert [text for _, text in faults_of(changed("steps", steps))] == [f"these steps wait for each other: {circle}"]


def test_arms_of_one_switch_may_yield_the_same_output() -> None:
    document = changed("steps/c/switch/0/emit", {"found": 1})
    document["steps"]["c"]["switch"][1]["emit"] = {"found": 0}
    compile_document(document)
    document["steps"]["a"]["yield"] = "found"
    assert [path for path, _ in faults_of(document)] == ["steps.c.switch[0].emit.found", "steps.c.switch[1].emit.found"]


def test_a_step_that_cannot_be_read_is_still_known() -> None:
    assert [path for path, _ in faults_of(changed("steps/a", {"yield": "a"}))] == ["steps.a"]


def test_codes_of_errors() -> None:
    for document, code, status in (
        (changed("steps/d/each/in", "${b.value}"), UNBOUNDED, 400),
        (changed("steps", {f"s{at}": {"let": 1} for at in range(65)}), TOO_LARGE, 413),
        (changed("steps/a/let", "${1}" * 1001), "workflow_invalid", 400),
        (changed("steps/a/call", ["${1}"] * 1001), "workflow_invalid", 400),
    ):
        with pytest.raises(DocumentError) as error:
            compile_document(document)
        answer = error.value.answer()
        assert (answer.code, answer.status) == (code, status)
    assert OVER_LIMITS == "workflow_over_limits"


def test_a_step_takes_over_the_model_and_tools_of_its_source() -> None:
    document = changed("steps/a/chat/model", "other")
    document["steps"]["a"]["chat"] |= {"tools": [{"type": "function"}], "extra": {"x": 1}}
    steps = compile_document(document).steps
    for name in "ab":
        work: Any = steps[name].work
        assert (work.model, work.tools.value, work.extra.value) == ("other", [{"type": "function"}], {"x": 1})
    document["steps"]["b"]["chat"] |= {"model": "own", "extra": {}}
    own: Any = compile_document(document).steps["b"].work
    assert (own.model, own.extra.value, own.tools.value) == ("own", {}, [{"type": "function"}])


@pytest.mark.parametrize(
    ("items", "bound"),
    [
        ([1, 2], 2),
        ("${[a.text, a.text]}", 2),
        ("${b.value[1:4]}", 4),
        ("${b.value[:4][1:]}", 4),
        ("${inputs.l}", 7),
        ("${s.value}", 5),
        ("${o.value.deep.list}", 6),
    ],
)
def test_the_bound_of_an_each(items: Any, bound: int) -> None:
    document = changed("steps/d/each/in", items)
    document["inputs"]["l"] = {"type": "list", "max_length": 7}
    deep = {"properties": {"deep": {"properties": {"list": {"type": "array", "maxItems": 6}}}}}
    for name, schema in (("s", {"type": "array", "maxItems": 5}), ("o", deep)):
        document["steps"][name] = {"chat": {"from": "a", "output": schema}}
    work: Any = compile_document(document).steps["d"].work
    assert work.bound == bound


# -- inputs of a run


def test_inputs_of_a_run() -> None:
    declared = compile_document(changed("inputs/n", {"type": "integer", "default": 3})).inputs
    given = [{"role": "user", "content": "x"}]
    assert read_inputs(declared, {"m": given}) == {"m": given, "t": None, "n": 3}
    with pytest.raises(DocumentError) as error:
        read_inputs(declared, {"n": 1.5, "x": 1, "t": 1})
    assert [(fault.path, fault.code) for fault in error.value.faults] == [
        ("inputs.x", "inputs_invalid"),
        ("inputs.m", "inputs_invalid"),
        ("inputs.t", "inputs_invalid"),
        ("inputs.n", "inputs_invalid"),
    ]


@pytest.mark.parametrize(
    ("declared", "value", "why"),
    [
        ({"type": "string", "enum": ["p", "q"]}, "r", "one of 'p', 'q' is expected, got 'r'"),
        ({"type": "string", "max_length": 2}, "abc", "it has a length of 3, at most 2 are possible"),
        ({"type": "messages"}, [{"content": "x"}], "a list of messages"),
        ({"type": "number"}, True, "a number is expected, got true"),
        ({"type": "boolean"}, "true", "true or false is expected, got 'true'"),
        ({"type": "list"}, {}, "a list is expected, got an object"),
        ({"type": "object"}, [], "an object is expected, got a list"),
        ({"type": "string"}, "x" * (1 << 20), "more than 1,048,576"),
        ({"type": "messages"}, [{"role": "user", "content": "x" * (4 << 20)}], "more than 4,194,304"),
    ],
)
def test_a_wrong_input_is_refused(declared: dict[str, Any], value: Any, why: str) -> None:
    inputs = compile_document(changed("inputs/x", declared)).inputs
    with pytest.raises(DocumentError) as error:
        read_inputs(inputs, {"m": [], "x": value})
    assert why in str(error.value)


def test_messages_may_be_longer_than_other_values() -> None:
    messages = [{"role": "user", "content": "x" * ((4 << 20) - 100)}]
    assert read_inputs(compile_document(DOCUMENT).inputs, {"m": messages})["m"] is messages


# -- texts of documents


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": NaN}', "NaN is not a JSON value"),
        ('{"a": 1e999}', "a number is too large"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "more than 32 levels"),
        ('{"a": "' + "x" * (256 << 10) + '"}', "at most 256 KiB"),
        ('{"a": [' + "{}," * 9000 + "0]}", "at most 8,192 values"),
        ('{"a": "\\ud800"}', "no JSON"),
    ],
)
def test_json_that_is_refused(text: str, why: str) -> None:
    with pytest.raises(DocumentError) as error:
        read_json(text)
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("a: &x 1\nb: *x\n", 1, "anchors (&), aliases (*) and tags (!) are not allowed"),
        ("a: !!python/object:os.system x\n", 1, "tags (!) are not allowed"),
        ("a: *b\n", 1, "aliases"),
        ("a: b: c\n", 1, 'not allowed in this context; a text with "${", ": " or "#" must be in quotes'),
        ("a: {b: ${c}, d: 1}\n", 1, "must be in quotes"),
        ("a:\n\tb: 1\n", 2, "a line begins with spaces, not with a tab"),
        ("a: [1\n", 2, "not valid YAML"),
        ("? [a]\n: 1\n", 1, "a key is a text"),
        ("a: 1\n---\nb: 1\n", 0, "one document"),
        ("- " * 1000, 1, "more than 32 levels"),
        ("a: [" + "0, " * 9000 + "]", 1, "at most 8,192 values"),
        ("a: \x07", 0, "not valid YAML"),
    ],
)
def test_yaml_that_is_refused(text: str, line: int, why: str) -> None:
    with pytest.raises(DocumentError) as error:
        read_yaml(text)
    assert why in str(error.value)
    assert error.value.faults[0].line == line


TWICE = {
    YAML: "workflow: 1\nname: w\nname: v\nsteps:\n  a: {let: 1}\n  b: {let: '${x}'}\n  a: {let: 2}\n",
    JSON: '{"workflow": 1, "name": "w", "name": "v", "steps": {"a": {"let": 1}, "b": {"let": "${x}"}, "a": {"let": 2}}}',
}


@pytest.mark.parametrize("form", TWICE)
def test_keys_that_are_given_twice_are_shown_with_all_other_errors(form: str) -> None:
    with pytest.raises(DocumentError) as error:
        compile_text(TWICE[form], form)
    name, step, other = error.value.faults
    lines = {YAML: (3, 7, 6), JSON: (0, 0, 0)}[form]
    assert (name.path, step.path, other.path) == ("name", "steps.a", "steps.b.let")
    assert (name.line, step.line, other.line) == lines
    assert name.text.startswith("the key is given twice")
    with pytest.raises(DocumentError, match="given twice"):
        compile_text(TWICE[form].replace("${x}", "x"), form)


def test_scalars_of_yaml() -> None:
    source = read_yaml("a: [Yes, no, on, true, null, ~, 1, -2, 1.5, 1e3, 0x10, 2026-01-01, '1', 1_000]\nb: |\n  x\n")
    assert source.value == {
        "a": ["Yes", "no", "on", True, None, None, 1, -2, 1.5, 1000.0, "0x10", "2026-01-01", "1", "1_000"],
        "b": "x\n",
    }
    assert (source.lines["a[2]"], source.lines["b"]) == (1, 2)
