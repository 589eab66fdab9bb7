"""Expressions: values, errors, bounds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.workflows.language.expressions import parse_expression
from gateway.features.workflows.language.functions import FUNCTIONS
from gateway.features.workflows.language.operations import MAX_WORK, ExpressionError, Reference, WorkBudget
from gateway.features.workflows.language.results import StepResult
from gateway.features.workflows.language.templates import ValueTemplate, escape, parse_text
from gateway.features.workflows.language.values import EvaluationError, ValueTooLargeError

MESSAGES = [
    {"role": "user", "content": "one"},
    {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "image_url"}, {"type": "text", "text": "!"}]},
    {"role": "assistant", "content": "three"},
]
SCOPE: dict[str, Any] = {
    "inputs": {"n": 3, "t": "a b", "l": [1, 2, 3], "o": {"k": {"x": 1}}, "m": MESSAGES},
    "s": StepResult("done", value={"text": "v", "n": None}, text="long"),
    "later": StepResult(),
}


def value(text: str) -> Any:
    return parse_expression(text).evaluate(SCOPE)


VALUES: list[tuple[str, Any]] = [
    ("1 + 2 * 3 - 4 / 2", 5.0),
    ("7 // 2 + 7 % 2", 4),
    ("-inputs.n", -3),
    ("'a' + 'b'", "ab"),
    ("[1] + inputs.l[1:]", [1, 2, 3]),
    ("inputs.t[0] + inputs.t[-1]", "ab"),
    ("1 < 2 <= 2 != 3", True),
    ("1 < 2 > 5", False),
    ("True == 1", False),
    ("[True] == [1] or [[0]] == [[False]] or [False] in [[0]]", False),
    ("[1, [True], 'true'] == [1.0, [True], 'true']", True),
    ("True in [1] or 1 in [0, True] or contains([False], 0)", False),
    ("'b' in inputs.t and 'k' in inputs.o and 2 in inputs.l", True),
    ("'z' not in inputs.t", True),
    ("None or 0 or 'x'", "x"),
    ("1 and 2", 2),
    ("not None", True),
    ("1 if inputs.n > 2 else 2", 1),
    ("inputs.o.k.x", 1),
    ("inputs.o['k']['x']", 1),
    ("s.value.text + s.text + s.status", "vlongdone"),
    # not there
    ("inputs.missing.deeper[0]['x'][1:2]", None),
    ("inputs.l[9]", None),
    ("inputs.t.member", None),
    ("inputs.n[0]", None),
    ("later.text", None),
    ("later.status", "pending"),
    ("s.nothing", None),
    ("inputs.l['x']", None),
    # functions
    ("contains('abc', 'b')", True),
    ("startswith('abc', 'ab') and endswith('abc', 'bc')", True),
    ("lower('A') + upper('b') + strip(' c ')", "aBc"),
    ("split('a\\nb')", ["a", "b"]),
    ("join(split('a,b', ','), '-')", "a-b"),
    ("join(['a', None, 1, [2]])", "a\n1\n[2]"),
    ("words(' a  b ')", 2),
    ("len('ab') + len([1]) + len(inputs.o)", 4),
    ("sum([1, 2.5])", 3.5),
    ("min([3, 1]) + max(1, 2)", 3),
    ("min([])", None),
    ("max('a', 'b')", "b"),
    ("round(2.567, 1)", 2.6),
    ("round(2.5)", 2),
    ("number(' 12 ') + number('1.5') + number(True)", 14.5),
    ("number('twelve')", None),
    ("number('1e999')", None),
    ("string(1) + string('x') + json('x')", '1x"x"'),
    ("parse('[1]')", [1]),
    ("parse('{')", None),
    ("coalesce(later.text, None, 'x')", "x"),
    ("last_text(inputs.m)", "two!"),
    ("last_text([])", None),
]


@pytest.mark.parametrize(("text", "expected"), VALUES)
def test_values(text: str, expected: Any) -> None:
    found = value(text)
    assert found == expected
    assert type(found) is type(expected)


def test_every_function_is_tried_above() -> None:
    assert len(FUNCTIONS) == 20
    assert [name for name in FUNCTIONS if not any(f"{name}(" in text for text, _ in VALUES)] == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1 + 'a'", "only numbers can be calculated with; + also joins two texts or two lists; got a number and a text"),
        ("True + 1", "only numbers"),
        ("'a' * 1000000000", "only numbers"),
        ("-'a'", "only numbers"),
        ("1 / 0", "a division by zero"),
        ("1 % 0", "a division by zero"),
        ("1e308 * 10", "a number is too large"),
        ("9007199254740992 * 9007199254740992", "64-bit"),
        ("1 < 'a'", "a number and a text have no order"),
        ("None < 1", "null and a number have no order"),
        ("1 in 2", "a search needs a text, a list or an object, got a number"),
        ("1 in 'a'", "a search in a text needs a text, got a number"),
        ("inputs.l[1.5]", "an index is a whole number or a text"),
        ("inputs.l['a':]", "the bounds of a slice are whole numbers"),
        ("inputs.n[1:]", "a slice needs a text or a list, got a number"),
        ("lower(1)", "lower needs a text, got a number"),
        ("split('a', '')", "a separator that is not empty"),
        ("round(5, -100000000)", "round needs 0 to 15 digits"),
        ("sum(['a'])", "sum needs a list of numbers"),
        ("min([1, 'a'])", "min compares numbers with numbers"),
        ("unknown.text", "the name 'unknown' is not known here"),
        ("s", "the result of a step needs a member, such as .value"),
        ("[s]", "no JSON"),
    ],
)
def test_a_wrong_type_fails(text: str, why: str) -> None:
    with pytest.raises(EvaluationError) as error:
        value(text)
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "invalid syntax"),
        ("a b", "invalid syntax"),
        ("a = 1", "invalid syntax"),
        ("lambda: 1", "lambda cannot be used in an expression"),
        ("[x for x in a]", "a comprehension cannot be used"),
        ("{'a': 1}", "an object in braces cannot be used"),
        ("(1, 2)", "a tuple cannot be used"),
        ("f'{a}'", "an f-string cannot be used"),
        ("(a := 1)", ":= cannot be used"),
        ("a[*b]", "a tuple cannot be used"),
        ("f(*a)", "f is no function; functions: contains"),
        ("a.lower()", "a.lower is no function"),
        ("__import__('os')", "__import__ is no function"),
        ("a.__class__", "__class__: names that begin with _"),
        ("_a", "names that begin with _"),
        ("a.b._c", "names that begin with _"),
        ("_a.b", "names that begin with _"),
        ("len(x=1)", "len: arguments have no names here"),
        ("len()", "len takes 1 argument, got 0"),
        ("split(a, b, c)", "split takes 1 to 2 arguments, got 3"),
        ("a is None", "write == or !="),
        ("a ** 2", "the operators are + - * / // %"),
        ("a << 2", "the operators are"),
        ("~a", "the operators before a value are - and not"),
        ("a[::2]", "a slice has no step"),
        ("1j", "1j cannot be used"),
        ("b'x'", "b'x' cannot be used"),
        ("...", "Ellipsis cannot be used"),
        ("1e999", "a number is too large"),
        (str(1 << 70), "64-bit"),
        ("'\\ud800'", "no JSON"),
        ("a\0", "null byte"),
        ("'\n'", "a text in an expression has no line break"),
        ("'" + "x" * 2000 + "'", "an expression has at most 2,000 characters"),
        ("+".join("1" * 60), "an expression has at most 50 levels"),
        (f"[{','.join('1' * 256)}]", "an expression has at most 256 parts"),
        ("(" * 900, "too many nested parentheses"),
        ("-" * 1900 + "1", "levels"),
    ],
)
def test_everything_else_is_refused(text: str, why: str) -> None:
    with pytest.raises(ExpressionError) as error:
        parse_expression(text)
    assert why in str(error.value)


def test_references_are_names_with_the_member_that_is_read() -> None:
    found = parse_expression("f.text + lower(g.value.x[h]) + inputs.a").references
    assert found == {Reference("f", "text"), Reference("g", "value"), Reference("h", None), Reference("inputs", "a")}


@pytest.mark.parametrize("text", ["a+  b", "(a + b)", "a + (b)"])
def test_the_canonical_form_is_independent_of_spelling(text: str) -> None:
    assert parse_expression(text).canonical == "a + b"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("a + a", 1 << 20),
        ("[" + "a, " * 100 + "]", 1 << 20),
        ("join([" + "'x', " * 100 + "], a)", 1 << 18),
        ("json(a)", 1 << 20),
        ("+".join(["len(lower(a))"] * 40), 1 << 20),
    ],
)
def test_large_values_end_an_evaluation(text: str, size: int) -> None:
    with pytest.raises(ValueTooLargeError):
        parse_expression(text).evaluate({"a": "a" * size})


def work(text: str, **scope: Any) -> int:
    """Units of an evaluation."""
    budget = WorkBudget()
    parse_expression(text).evaluate(scope, budget)
    return budget.used


@pytest.mark.parametrize("text", ["contains(a, b)", "b in a", "b not in a", "split(a, b)"])
def test_a_search_is_charged_for_the_text_and_the_piece(text: str) -> None:
    small = work(text, a="a" * 100_000, b="ab")
    assert small > 3 * 100_000
    assert work(text, a="a" * 100_000, b="b" * 100_000) > small + 3 * 90_000


SEARCHED = st.text("ab", max_size=12).flatmap(lambda piece: st.integers(1, 60).map(lambda times: piece * times))


@given(SEARCHED, st.integers(1, 40), SEARCHED, st.text("ab\0\1", max_size=3))
def test_searches_are_those_of_python(part: str, times: int, piece: str, end: str) -> None:
    scope = {"a": part * times + end, "b": piece + end}
    assert parse_expression("b in a").evaluate(scope) == (scope["b"] in scope["a"])
    if scope["b"]:
        assert parse_expression("split(a, b)").evaluate(scope) == scope["a"].split(scope["b"])[:1000]


@pytest.mark.parametrize(("text", "found"), [(" " * 500_000 + "x", None), (" " * 500_000 + "12 ", 12), ("1" * 2000, None)])
def test_a_number_has_a_bounded_length(text: str, found: int | None) -> None:
    assert parse_expression("number(a)").evaluate({"a": text}) == found


@pytest.mark.parametrize(
    "value",
    [
        "[" + ",".join(["[" * 100 + "]" * 100] * 2000) + "]",
        "{" + ",".join(f'"{at:x}":0' for at in range(100_000)) + "}",
    ],
)
def test_parsing_is_charged_for_the_values_that_it_makes(value: str) -> None:
    plain = work("parse(a)", a='"' + "x" * len(value) + '"')
    assert plain < MAX_WORK / 4
    with pytest.raises(ValueTooLargeError):
        work(f"len({' + '.join(['parse(a)'] * 4)})", a=value)


@pytest.mark.parametrize("text", ["x", "x[1:] and 1", "x[:-1] and 1"])
@pytest.mark.parametrize(("value", "least"), [([[]] * 100_000, 1_000_000), ("x" * 1_000_000, 900_000)])
def test_a_value_and_a_slice_are_charged_for_their_size(text: str, value: Any, least: int) -> None:
    assert work(text, x=value[:1]) < 10_000
    assert work(text, x=value) > least


def test_a_value_that_is_too_large_is_charged_too() -> None:
    budget = WorkBudget()
    with pytest.raises(ValueTooLargeError):
        parse_expression("x").evaluate({"x": [0] * 1_000_000}, budget)
    assert budget.used > 2_000_000


def test_a_loop_is_charged_for_its_items() -> None:
    for function in ("sum", "min", "max", "join"):
        assert work(f"{function}(a)", a=[1] * 10_000) > work(f"{function}(a)", a=[1] * 10) + 10_000 * 100


# -- texts


def filled(text: str, **scope: Any) -> Any:
    return ValueTemplate("x", parse_text(text)).fill({**SCOPE, **scope})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("${inputs.l}", [1, 2, 3]),
        ("a ${inputs.l} ${inputs.t} ${None}", "a [1,2,3] a b null"),
        ("$${inputs.l} costs $5", "${inputs.l} costs $5"),
        ("$$${inputs.n}", "$${inputs.n}"),
        ("${'$'}${inputs.n}", "$3"),
        ('${\'}\'}${"{\\"}"}', '}{"}'),
        ("${'${'}", "${"),
        ("", ""),
    ],
)
def test_texts(text: str, expected: Any) -> None:
    assert filled(text) == expected


def test_an_inserted_value_is_data() -> None:
    assert filled("${a} and ${a}", a="${inputs.t} $${ ${") == "${inputs.t} $${ ${ and ${inputs.t} $${ ${"


def test_all_inserted_values_together_are_bounded() -> None:
    template = ValueTemplate("x", [parse_text("${a}") for _ in range(100)])
    with pytest.raises(ValueTooLargeError):
        template.fill({"a": "a" * 100_000})
    heavy = ValueTemplate("x", [parse_text("${len(lower(a))}") for _ in range(100)])
    with pytest.raises(ValueTooLargeError):
        heavy.fill({"a": "a" * 1_000_000})


@pytest.mark.parametrize("text", ["${a", "${", "a ${'}", "${ {'a': 1} }", "${}", "${1}" * 1500])
def test_a_text_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse_text(text)


@given(st.text(alphabet="$${}'\"\\ab"))
def test_an_escaped_text_is_itself(text: str) -> None:
    assert parse_text(escape(text)) == text
