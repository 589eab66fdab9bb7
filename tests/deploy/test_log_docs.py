"""What the documentation says of the log: every field of a request's line, and the messages that it tells users to look for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import orjson
import pytest

from gateway.request import record
from gateway.request.observers.access_log import AccessLog
from gateway.request.record import SettledRequest
from gateway.telemetry.request_log import RequestLog
from tests.support.paths import ROOT

ACCESS_LOG = ROOT / "gateway" / "request" / "observers" / "access_log.py"
PAGES = [ROOT / "docs" / name for name in ("troubleshooting.md", "operations.md")]
# grep [-E] "PATTERN" gateway.log, as the pages have it
GREP = re.compile(r"""grep (?:-E )?(["'])(.+?)\1 gateway\.log""")


class Lines:
    """An output of log lines that keeps their fields."""

    def __init__(self) -> None:
        self.dropped = 0
        self.fields: list[str] = []

    def write(self, line: bytes) -> None:
        self.fields += orjson.loads(line)


def written() -> set[str]:
    """The fields that the code can write, whatever the request: the keys in the functions that make the line, and those that
    features add to `SettledRequest.fields`, or to the fields of a run's requests.
    """
    tree = ast.parse(ACCESS_LOG.read_text("utf-8"))
    keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
    keys += [node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript) and _is_line(node.value)]
    for path in (ROOT / "gateway" / "features").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Dict)
                and ast.unparse(node.targets[0]) in ("record.fields", "fields_of_steps")
            ):
                keys += node.value.keys
    names = {getattr(record, key.id) for key in keys if isinstance(key, ast.Name) and key.id.isupper()}
    return names | {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def _is_line(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "line"


def documented() -> list[str]:
    section = (ROOT / "docs" / "operations.md").read_text("utf-8").split("\n## The log\n")[1].split("\n## ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def test_the_fields_of_a_request_s_line_are_documented_each_once() -> None:
    assert sorted(documented()) == sorted(written())


def test_a_plain_request_has_the_fields_of_the_first_table() -> None:
    lines = Lines()
    AccessLog(RequestLog(lines, level=0))(SettledRequest("id", "/v1/chat/completions", 0.0))  # type: ignore[arg-type]
    own = set(lines.fields) - {"time", "level", "logger", "message"}
    assert own == set(documented()[: len(own)])


def messages() -> list[str]:
    """All texts in the gateway's code."""
    return [
        node.value
        for path in (ROOT / "gateway").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def looked_for() -> Iterator[str]:
    """The patterns of the pages; of alternatives each one."""
    for page in PAGES:
        for _, pattern in GREP.findall(page.read_text("utf-8")):
            text = pattern.removeprefix('"message":').strip('"')
            if group := re.search(r"\(([^()]*)\)", text):
                yield from (text.replace(group[0], each) for each in group[1].split("|"))
            else:
                yield from text.split("|")


@pytest.fixture(scope="module")
def texts() -> str:
    return "\n".join(messages())


@pytest.mark.parametrize("pattern", sorted(set(looked_for())))
def test_messages_that_the_pages_look_for_are_logged(pattern: str, texts: str) -> None:
    assert pattern.strip() in texts
