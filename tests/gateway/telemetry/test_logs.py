from __future__ import annotations

import datetime
import io
import json
import logging
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.line_format import ConsoleLine
from gateway.telemetry.log_output import LogOutput
from gateway.telemetry.logs import Handler, LineFormatter, first_of
from gateway.telemetry.request_log import RequestLog


def formatted(message: object = "text", *args: object, extra: dict[Any, Any] | None = None, exc_info: Any = None) -> Any:
    """The line for such a record, parsed; strictly: no NaN, one line, and what UTF-8 can carry."""
    record = logging.getLogger("warmroute.test").makeRecord(
        "warmroute.test", logging.INFO, "file.py", 1, message, args, exc_info, extra=extra
    )
    line = LineFormatter().format(record)
    assert "\n" not in line
    assert "\r" not in line
    line.encode("utf-8")
    return json.loads(line, parse_constant=pytest.fail)


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no")


class Unrepresentable(Unprintable):
    __repr__ = Unprintable.__str__


class Printable:
    def __str__(self) -> str:
        return "a replica"


def test_a_line_has_time_level_logger_message_and_the_extras() -> None:
    line = formatted("replica %s", "up", extra={"replica": "a:1", "models": ["m"], "cost": 0.5})
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "warmroute.test",
        "message": "replica up",
        "replica": "a:1",
        "models": ["m"],
        "cost": 0.5,
    }


def test_long_names_that_begin_alike_stay_distinct() -> None:
    names = [f"http://{'inference.' * 20}example:{port}" for port in (8001, 8002)]
    fields = first_of("replicas", [*names, "x" * 100, "c"], 3)
    first, second, whole = fields["replicas"]  # type: ignore[misc]
    assert (len(first), len(second), whole) == (100, 100, "x" * 100)
    assert first != second
    assert (first[:60], first[-37:]) == (names[0][:60], names[0][-37:])
    assert fields["more_replicas"] == 1


cycle: list[Any] = []
cycle.append(cycle)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("tenant\udce9", "tenant\\udce9"),
        (["a", "\udce9"], "['a', '\\udce9']"),
        (2**70, str(2**70)),
        (2**64 - 1, 2**64 - 1),
        (float("nan"), None),
        (float("inf"), None),
        ({1: 2}, "{1: 2}"),
        ({"ok": 1}, {"ok": 1}),
        (b"\xff", "b'\\xff'"),
        (Printable(), "a replica"),
        (Unprintable(), "<Unprintable without a text: RuntimeError>"),
        ([Unrepresentable()], "<list without a text: RuntimeError>"),
        (10**5000, "<int without a text: ValueError>"),
        (cycle, "[[...]]"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_json_has_no_place_for_is_its_text(value: object, written: object) -> None:
    line = formatted(extra={"value": value, "other": {"kept": [1]}})
    assert line["value"] == written
    assert (line["message"], line["other"]) == ("text", {"kept": [1]})


def test_names_of_extras_are_texts() -> None:
    line = formatted(extra={"tenant\udce9": 1, 7: 2})
    assert (line["tenant\\udce9"], line["7"]) == (1, 2)


def test_a_message_may_hold_anything() -> None:
    assert formatted("two\r\nlines")["message"] == "two\r\nlines"
    assert formatted("header \udce9")["message"] == "header \\udce9"
    assert formatted("header %s", "\udce9")["message"] == "header \\udce9"
    assert formatted(Printable())["message"] == "a replica"


def test_a_message_that_its_arguments_do_not_fit_is_not_lost() -> None:
    assert formatted("%d replicas", "no")["message"] == "%d replicas ('no',)"
    assert formatted("all", 1, 2)["message"] == "all (1, 2)"
    assert formatted("%s", Unprintable())["message"].startswith("%s (<")
    assert formatted(Unprintable())["message"].startswith("<Unprintable without a text")


@pytest.mark.parametrize("error", [ValueError("two\nlines"), ValueError("\udce9"), ValueError(Unprintable())])
def test_a_traceback_stays_in_its_line(error: Exception) -> None:
    try:
        raise error
    except ValueError:
        line = formatted(exc_info=sys.exc_info())
    assert line["traceback"].startswith("Traceback (most recent call last):\n")
    assert "ValueError: " in line["traceback"]


characters = st.characters() | st.characters(categories=["Cs", "Cc"])
texts = st.text(characters, max_size=5)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=3) | texts | st.builds(Unprintable)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers() | texts, inner, max_size=3), max_leaves=8
)
STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "time", "level", "logger", "traceback"}


@given(st.text(characters), st.dictionaries(texts.filter(lambda name: name not in STANDARD), anything, max_size=4))
def test_any_record_is_one_line_of_json(message: str, extra: dict[str, Any]) -> None:
    line = formatted(message, extra=extra)
    assert line["level"] == "info"
    assert set(line) >= {name for name in extra if name.isprintable()}


def for_people(fields: dict[Any, Any], *, colors: bool = False) -> str:
    head = {"time": "2026-01-01T00:00:00.000+00:00", "level": "info", "logger": "warmroute.test", "message": "up"}
    return ConsoleLine(colors=colors)({**head, **fields}).decode()


def test_a_line_for_people_has_time_level_message_logger_and_fields() -> None:
    assert " ".join(for_people({"replica": "a:1", "models": ["m"], "cost": None}).split()) == (
        "2026-01-01T00:00:00.000+00:00 [info ] up [warmroute.test] replica=a:1 models=\"['m']\" cost=None"
    )
    assert "\x1b[" in for_people({}, colors=True)


def test_a_traceback_for_people_follows_its_line() -> None:
    written = for_people({"traceback": "Traceback:\n  File\nValueError: \x1b[31m"})
    assert written.splitlines()[1:] == ["Traceback:", "  File", "ValueError: \\x1b[31m"]


@given(st.dictionaries(texts | st.integers(), anything, max_size=4))
def test_nothing_that_is_logged_for_people_begins_a_line_or_controls_the_terminal(extra: dict[Any, Any]) -> None:
    reserved = {"message", "time", "level", "logger", "traceback", "exception", "exc_info", "stack", "event", "timestamp"}
    assert for_people({key: value for key, value in extra.items() if key not in reserved}).isprintable()


def test_a_request_and_what_is_dropped_are_in_the_same_format() -> None:
    stream = io.BytesIO()
    line = ConsoleLine(colors=False)
    output = LogOutput(stream.write, fixed={"worker": 3}, line=line)
    RequestLog(output, logging.INFO, {"worker": 3}, line).write(logging.WARNING, {"id": "wr-1", "status": 502})
    assert output.flush()
    written = stream.getvalue().decode()
    assert " ".join(written.partition(" ")[2].split()) == "[warning ] request [warmroute.request] worker=3 id=wr-1 status=502"


def test_a_requests_line_has_the_time_to_the_millisecond() -> None:
    stream = io.BytesIO()
    output = LogOutput(stream.write, shared=True)
    requests = RequestLog(output, logging.INFO)
    before = time.time()
    for _ in range(100):
        requests.write(logging.INFO, {"id": "wr-1"})
    after = time.time()
    assert output.flush()
    times = [json.loads(line)["time"] for line in stream.getvalue().splitlines()]
    assert {len(one) for one in times} == {len("2026-01-01T00:00:00.000+00:00")}
    seconds = [datetime.datetime.fromisoformat(one).timestamp() for one in times]
    assert before - 0.001 <= seconds[0] <= seconds[-1] <= after
    assert seconds == sorted(seconds)


def test_lines_name_the_worker_that_wrote_them() -> None:
    stream = io.BytesIO()
    output = LogOutput(stream.write, shared=True)
    record = logging.makeLogRecord({"msg": "up", "levelno": logging.INFO, "levelname": "INFO", "name": "warmroute"})
    Handler(output, {"worker": 3}).emit(record)
    RequestLog(output, logging.INFO, {"worker": 3}).write(logging.INFO, {"id": "wr-1"})
    assert output.flush()
    assert [json.loads(line)["worker"] for line in stream.getvalue().splitlines()] == [3, 3]
