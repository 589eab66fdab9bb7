"""The rules of `cache_control`: the gateway refuses the same requests as Anthropic's API, independent of the engine.

A breakpoint marks the end of a prefix to be cached: on a tool, a block of `system`, a block of a message, or a block within the
content of a tool's result. At the top of the body it marks the last block. At most four are allowed, none on blocks that cannot
be cached, and one-hour breakpoints stand before five-minute ones. A marker that is null is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from gateway.dialects.prompt.marks import MARKER, MAX_MARKS
from gateway.errors import bad_request

_TTLS: Final = (None, "5m", "1h")
_RAW: Final = MARKER.encode()
_NEVER_CACHED: Final = frozenset(["thinking", "redacted_thinking"])  # alone; they are cached as part of their turn


def may_mark(raw: bytes) -> bool:
    """True if a body may have a breakpoint that is written without escapes. O(length), 0.1 ms a MiB."""
    return raw.find(_RAW) >= 0


def require_breakpoints(body: Mapping[str, Any]) -> None:
    """Raises GatewayError 400 if a breakpoint breaks a rule. body: its list fields are known to be lists. O(number of
    blocks).
    """
    found, minutes, marked = 0, "", False
    for name, block in _blocks(body):
        marker = block.get(MARKER)
        marked = marker is not None
        if not marked:
            continue
        where = f"{name}.{MARKER}"
        found += 1
        minutes = _checked(marker, where, minutes)
        kind = block.get("type")
        if isinstance(kind, str) and kind in _NEVER_CACHED:
            raise bad_request(f"{where}: a block of type '{kind}' cannot be a breakpoint; mark another one of its turn.", where)
        if kind == "text" and block.get("text") == "":
            raise bad_request(f"{where}: an empty text cannot be a breakpoint.", where)
    marker = body.get(MARKER)
    if marker is not None:
        _checked(marker, MARKER, minutes)
        found += not marked  # the marker of the body stands for the last block, which may be marked already
    if found > MAX_MARKS:
        raise bad_request(f"{found} breakpoints are set ({MARKER}); at most {MAX_MARKS} are allowed.", MARKER)


def _checked(marker: Any, where: str, minutes: str) -> str:
    """Checks one marker. minutes: the name of the first five-minute breakpoint so far, "" if there is none. Returns its new
    value.
    """
    if not isinstance(marker, dict) or marker.get("type") != "ephemeral":
        raise bad_request(f"""{where} must be an object with "type": "ephemeral".""", where)
    ttl = marker.get("ttl")
    if ttl not in _TTLS:
        raise bad_request(f"""{where}.ttl must be "5m" or "1h".""", f"{where}.ttl")
    if ttl != "1h":
        return minutes or where
    if minutes:
        raise bad_request(f"""{where}: "ttl": "1h" must not stand after a breakpoint of "5m" ({minutes}).""", where)
    return minutes


def _blocks(body: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """All blocks that may be marked, with their names, in the order of the prompt."""
    for name in ("tools", "system"):
        yield from _named(name, body.get(name))
    messages = body.get("messages")
    if not isinstance(messages, list):
        return
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        where = f"messages[{number}].content"
        for name, block in _named(where, message.get("content")):
            if block.get("type") == "tool_result":
                yield from _named(name + ".content", block.get("content"))
            yield name, block


def _named(where: str, blocks: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The blocks of a list, with their names. A text counts as a block without a marker."""
    if isinstance(blocks, str):
        yield where, {}
    elif isinstance(blocks, list):
        for number, block in enumerate(blocks):
            if isinstance(block, dict):
                yield f"{where}[{number}]", block
