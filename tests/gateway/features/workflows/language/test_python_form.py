"""The Python form: the rules that the examples do not show, and errors with their lines."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from gateway.features.workflows.language.compiling import PYTHON, compile_document, compile_text
from gateway.features.workflows.language.faults import DocumentError
from gateway.features.workflows.language.python_form import compile_program


def program(body: str, arguments: str = "m: Messages, t: str = 'x'", settings: str = 'model="q"') -> str:
    return f"@workflow({settings})\ndef w({arguments}):\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n"


def document(body: str, **more: str) -> dict[str, Any]:
    """The document of a program, which is valid."""
    made: dict[str, Any] = compile_program(program(body, **more)).value
    compile_document(made)
    return made


def steps(body: str, **more: str) -> dict[str, Any]:
    found: dict[str, Any] = document(body, **more)["steps"]
    return found


def faults(text: str) -> list[tuple[int, str]]:
    with pytest.raises(DocumentError) as error:
        compile_program(text)
    assert {fault.code for fault in error.value.faults} <= {"program_invalid", "workflow_too_large"}
    return [(fault.line, fault.text) for fault in error.value.faults]


def test_the_head_of_the_function() -> None:
    arguments = (
        'a: Messages, b: str = "${x}", c: Literal["p", "q"] = "p", d: Annotated[int, {"enum": [1, 2]}] = 1, e: dict = None'
    )
    made = document(
        "x = chat(a)", arguments=arguments, settings='model="q", temperature=0.5, description="d ${x}", limits={"calls": 3}'
    )
    assert made["inputs"] == {
        "a": {"type": "messages", "required": True},
        "b": {"type": "string", "default": "${x}"},
        "c": {"type": "string", "enum": ["p", "q"], "default": "p"},
        "d": {"type": "integer", "enum": [1, 2], "default": 1},
        "e": {"type": "object", "default": None},
    }
    assert made["defaults"] == {"model": "q", "temperature": 0.5}
    assert (made["name"], made["description"], made["limits"]) == ("w", "d ${x}", {"calls": 3})


def test_messages_become_the_longest_transcript_and_the_rest() -> None:
    found = steps("""
        start = [system("s"), user(t)]
        a = chat(start)
        grown = start + [a.message]
        b = chat(grown + [user("u " + t)])
        c = chat(b + [{"role": "user", "content": [{"type": "text", "text": t}]}])
        d = chat(m + [a.message, user(f"{{}} ${t} {len(t)}")])
    """)
    assert found["a"]["chat"] == {"append": [{"role": "system", "content": "s"}, {"role": "user", "content": "${inputs.t}"}]}
    assert found["b"]["chat"] == {"from": "a", "append": [{"role": "user", "content": "u ${inputs.t}"}]}
    assert found["c"]["chat"]["from"] == "b"
    assert found["d"]["chat"] == {
        "from": "${inputs.m}",
        "append": ["${a.message}", {"role": "user", "content": "{} ${'$'}${inputs.t} ${len(inputs.t)}"}],
    }


def test_values() -> None:
    found = steps("""
        a = chat(m)
        plain = "costs ${5}"
        member = a.value["k"]["two words"][0]
        nested = {"list": [a, -1, None], "text": f"{t}"}
        joined = upper(f"a{t}b") + "c"
        loud = a.text if a.value == "x" and not t else t[1:]
    """)
    assert found["plain"] == {"let": "costs $${5}"}
    assert found["member"] == {"let": "${a.value.k['two words'][0]}"}
    assert found["nested"] == {"let": {"list": ["${a.value}", -1, None], "text": "${inputs.t}"}}
    assert found["joined"] == {"let": "${upper('a' + string(inputs.t) + 'b') + 'c'}"}
    assert found["loud"] == {"let": "${a.text if a.value == 'x' and (not inputs.t) else inputs.t[1:]}"}


def test_options_of_calls() -> None:
    found = steps("""
        a = llm_chat("big", m, result_value=["a", "b"], retry={"max": 2}, on_error="skip", timeout_s=5)
        b = chat(m, output={"items": {"pattern": "${x}"}}, seed=len(t), extra={"top_k": 5}, tools=[{"x": 1}])
        c = call("search", query=t, top_k=5)
        d = text("p " + t, output=dict)
        e = text(d + " q")
    """)
    assert found["a"] == {
        "chat": {"from": "${inputs.m}", "model": "big", "choices": ["a", "b"]},
        "retry": {"max": 2},
        "on_error": "skip",
        "timeout_s": 5,
    }
    assert found["b"]["chat"]["output"]["items"] == {"pattern": "${x}"}, "a constant, in which ${ means nothing"
    assert (found["b"]["chat"]["seed"], found["b"]["chat"]["extra"]) == ("${len(inputs.t)}", {"top_k": 5})
    assert found["c"] == {"call": {"use": "search", "with": {"query": "${inputs.t}", "top_k": 5}}}
    assert found["d"] == {"text": {"prompt": "p ${inputs.t}", "output": "object"}}
    assert found["e"] == {"text": {"from": "d", "append": " q"}}


def test_waits_and_kills() -> None:
    found = steps("""
        a = chat(m)
        b = chat(m)
        with job():
            wait(a)
            c = 1
        wait_any(a, b)
        d = 2
        a.kill()
        e = 3
    """)
    assert found["c"] == {"let": 1, "needs": ["a"]}
    assert found["d"] == {"let": 2, "needs_any": ["a", "b"], "kill": ["a"]}
    assert found["e"] == {"let": 3}


def test_a_wait_any_is_of_the_next_step_alone() -> None:
    found = steps("""
        a = chat(m)
        wait_any(a)
        with job():
            b = 1
        c = 2
        wait_any(a)
        if t == "x":
            d = 3
            e = 4
        f = 5
    """)
    assert [name for name, step in found.items() if "needs_any" in step] == ["b", "d"]


def test_an_if_without_else_is_a_condition() -> None:
    found = steps("""
        a = chat(m)
        wait(a)
        if t == "x":
            b = 1
            if len(t) > 1:
                c = b.value + 1
        d = c.value
    """)
    assert found["b"] == {"let": 1, "if": "${inputs.t == 'x'}", "needs": ["a"]}
    assert found["c"] == {"let": "${b.value + 1}", "if": "${(inputs.t == 'x') and (len(inputs.t) > 1)}", "needs": ["a"]}
    assert found["d"]["let"] == "${c.value}"


def test_an_if_is_a_switch_named_by_what_every_arm_sets() -> None:
    found = steps("""
        a = chat(m)
        if t == "x":
            a.kill()
            yield {"found": 1}
            answer = chat(m + [user("x")])
            b = 1
            a2 = 2
        elif t == "y":
            with job():
                answer = a.value["k"]
        else:
            yield {"found": t}
            answer = "none"
        yield {"answer": answer}
        if len(t) > 5:
            yield {"long": True}
    """)
    arms = found["answer"]["switch"]
    assert arms[0] == {
        "when": "${inputs.t == 'x'}",
        "kill": ["a"],
        "emit": {"found": 1},
        "value": "${answer_1.value}",
        "steps": {
            "answer_1": {"chat": {"from": "${inputs.m}", "append": [{"role": "user", "content": "x"}]}},
            "b": {"let": 1},
            "a2": {"let": 2},
        },
    }
    assert arms[1:] == [
        {"when": "${inputs.t == 'y'}", "value": "${a.value.k}"},
        {"else": True, "emit": {"found": "${inputs.t}"}, "value": "none"},
    ]
    assert found["answer"]["yield"] == "answer"
    (name,) = found.keys() - {"a", "answer"}
    assert name.startswith("if_")
    assert found[name] == {"switch": [{"when": "${len(inputs.t) > 5}", "emit": {"long": True}}]}


def test_a_loop_is_an_each() -> None:
    found = steps("""
        out = []
        for number in [1, 2]:
            inner = []
            for letter in ["a", "b"]:
                x = chat(m, seed=number)
                inner.append(f"{letter}{x.text}")
            out.append(inner.values)
        return {"all": out.values}
    """)
    each = found["out"]["each"]
    assert (each["in"], each["as"], each["value"]) == ([1, 2], "number", "${inner.values}")
    assert each["steps"]["inner"]["each"]["value"] == "${letter}${x.text}"


@pytest.mark.parametrize(
    ("body", "line", "why"),
    [
        ("import os", 3, "import is not part of the language; statements: NAME = ..."),
        ("while True:\n    a = 1", 3, "while is not part of the language"),
        ("a, b = 1, 2", 3, "this assignment is not part of the language"),
        ("a.text = 1", 3, "this assignment is not part of the language"),
        ("a += 1", 3, "augassign is not part"),
        ("a = 1\nprint(a)", 4, "this expression is not part of the language"),
        ("a = lambda: 1", 3, "lambda cannot be used"),
        ("a = [x for x in t]", 3, "a comprehension cannot be used"),
        ("a = open('x')", 3, "open cannot be called here; functions: contains"),
        ("a = t.upper()", 3, "t.upper cannot be called here"),
        ("a = unknown", 3, "unknown is not known here"),
        ("a = f'{t:>5}'", 3, "a value in an f-string has no format"),
        ("a = f'{t!r}'", 3, "a value in an f-string has no format"),
        ("a = b'x'", 3, "b'x' is no value of the language"),
        ("a = {1: 2}", 3, "the key of an object is a text"),
        ("a = 1\na = 2", 4, "a is set twice; each step has a name of its own"),
        ("a = chat(t)", 3, "messages are expected: an input of type Messages"),
        ("a = chat(n)", 3, "n is not known here"),
        ("yield {'a': b}", 3, "b is not known here"),
        ("a = chat(m + t)", 3, "messages are expected on both sides of +"),
        ("a = chat([user('x'), 1])", 3, "a message is expected: system(...)"),
        ("a = chat(m, temprature=1)", 3, "chat has no temprature; it has model"),
        ("a = chat(m, t)", 3, "chat has messages first, and then NAME=value; got 2 before"),
        ("a = chat(*m)", 3, "stars cannot be used in a call"),
        ("a = chat(m, **t)", 3, "stars cannot be used in a call"),
        ("a = chat(m, model=t)", 3, "model is a constant"),
        ("a = chat(m, output=set)", 3, "output is list, str, int"),
        ("a = chat(m, choices=t)", 3, "choices is a constant"),
        ("a = call(t)", 3, "the name of a connector is a constant"),
        ("wait(t)", 3, "the name of a step is expected"),
        ("wait(x)", 3, "x is not known here"),
        ("a = 1\nyield a", 4, "this expression is not part"),
        ("yield {'a': 1}", 3, "a step of this block is yielded, or, in an if, a constant"),
        ("a = 1\nyield {'a': a}\nyield {'b': a}", 5, "a is yielded twice"),
        ("a = 1\nb = 2\nyield {'a': [a, b]}", 5, "an output comes of one step"),
        ("a = 1\nyield {t: a}", 4, "the name of an output is a text"),
        (
            "a = chat(m)\na.kill()\nif t:\n    b = 1\n    yield {'a': 1}\nelse:\n    b = 2\nm.kill()",
            10,
            "the name of a step is expected",
        ),
        (
            "if t:\n    a = 1\n    b = 1\nelse:\n    a = 2\n    b = 2",
            3,
            "each arm sets a and b; one name can be set in every arm",
        ),
        ("x = m\nif t:\n    x = x + [user('a')]", 5, "x is set outside of this if or loop"),
        ("if t:\n    t = upper(t)\na = t", 4, "t is set outside of this if or loop"),
        ("a = 1\nif t:\n    yield {'x': a}", 5, "a step of this block is yielded, or, in an if, a constant"),
        ("a = 1\nb = 2\nwait(a)\nb.kill()", 6, "a wait holds for steps; kill() stands before it"),
        ("a = 1\nif t:\n    wait(a)\n    yield {'x': 1}", 6, "a wait holds for steps; a constant is yielded at once"),
        ("if t:\n    a = 1\nelif t:\n    b = 1\nc = a.value", 7, "a is not known here"),
        ("for x in [1]:\n    a = 1", 3, "a loop ends with NAME.append(...)"),
        ("for x in [1]:\n    a = 1\n    out.append(a.value)", 5, "out = [] is missing before the loop"),
        ("out = []\nfor t in [1]:\n    a = 1\n    out.append(a.value)", 4, "the name t is taken"),
        ("for x, y in [1]:\n    out.append(1)", 3, "this loop is not part of the language"),
        ("out = []\na = out", 4, "out: a list that a loop fills is used after the loop"),
        ("if t:\n    return {'a': 1}", 4, "return here is not part of the language"),
    ],
)
def test_an_error_has_its_line(body: str, line: int, why: str) -> None:
    found = faults(program(body))
    assert found[0][0] == line, found
    assert why in found[0][1]
    assert len(found) == 1, found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a program is one function with the decorator @workflow(...)"),
        ("x = 1", "a program is one function"),
        ("import os\n" + program("a = chat(m)"), "a program is one function"),
        (program("a = chat(m)") * 2, "a program is one function"),
        ("def w(m: Messages):\n    a = chat(m)", "one decorator is expected"),
        ("@workflow\ndef w(m: Messages):\n    a = chat(m)", "one decorator is expected"),
        (program("a = chat(m)", settings="modell='q'"), "@workflow has no modell; it has description"),
        (program("a = chat(m)", settings="model=f()"), "model of @workflow is a constant"),
        (program("a = chat(m)", arguments="m"), "m needs a type: Messages, str"),
        (program("a = chat(m)", arguments="m: bytes"), "m needs a type"),
        (program("a = chat(m)", arguments="*m: str"), "the function has plain arguments only"),
        (program("a = chat(m)", arguments="m: str = open('x')"), "a constant is expected: a text, a number"),
        (program("a = (1"), "not valid Python: line 3"),
        ("\0", "null byte"),
        ("(" * 1000, "too many nested parentheses"),
        ("-" * 60_000 + "1", "nested too deeply"),
        (program("a = " + "1 + " * 900 + "1"), "nested too deeply"),
        ("x" * (64 << 10) + "x", "at most 64 KiB"),
        ("a;" * 5000, "at most 4,096 lines"),
        (program("a = [" + "1, " * 9000 + "]"), "at most 8,192 parts"),
        (program("\n".join(f"a{at} = 1" for at in range(65))), "at most 64 steps"),
        (program("a = m\n" + "a = a + a\n" * 30), "at most 1,024 parts"),
    ],
)
def test_a_program_that_is_none_is_refused(text: str, why: str) -> None:
    assert why in faults(text)[0][1]


def test_all_errors_come_at_once_and_none_follows_from_another() -> None:
    text = program("""
        a = chat(t)
        b = a.value + 1
        import os
        out = []
        for x in a.value[:3]:
            out.append(y)
        yield {"out": out}
        c = d
    """)
    assert [line for line, _ in faults(text)] == [3, 5, 10]


def test_errors_of_the_document_have_lines_of_the_program() -> None:
    text = program("a = chat(m)\n\nb = a.txt\nif t:\n    c = a.values\nelse:\n    yield {'x': 1}")
    with pytest.raises(DocumentError) as error:
        compile_text(text, PYTHON)
    found = [(fault.path, fault.line) for fault in error.value.faults]
    assert found == [("steps.b.let", 5), ("steps.if_6.switch[0].steps.c.let", 7)]
    assert "line 5: steps.b.let: " in error.value.answer().message


def test_nothing_is_executed() -> None:
    found = faults(program("a = __import__('os').system('false')"))
    assert "cannot be called here" in found[0][1]
