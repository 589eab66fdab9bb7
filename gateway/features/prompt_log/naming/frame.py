"""The frame: what precedes the conversation. {system?: [text], tools?: [tool, as chat writes it], more?: options}. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final

from gateway.features.prompt_log.naming.canonical import NoNameError
from gateway.features.prompt_log.naming.entries import MARKERS, MAX_ENTRIES, Entry, Log, list_in, object_in, without

OPTIONS: Final = (
    *("reasoning_effort", "enable_thinking", "chat_template", "chat_template_kwargs"),
    *("documents", "functions"),
)
_PLAIN: Final = frozenset(["role", "content"])
_NONE: Final = frozenset[str]()


def framed(entries: list[Entry], tools: list[dict[str, Any]], body: dict[str, Any], ends: Sequence[int], *, named: bool) -> Log:
    """The log. Leading turns of the system that are only texts go into the frame. tools: as chat writes them. ends: the number
    of entries at the end of each element of the body's list. named: the frame is given by its name, so the body has only
    entries.

    Raises NoNameError.
    """
    if len(entries) > MAX_ENTRIES:
        raise NoNameError(f"there are more than {MAX_ENTRIES:,} entries")
    leading = 0
    while not named and leading < len(entries) and is_plain_system(entries[leading]):
        leading += 1
    texts = ["".join(part["text"] for part in entry.get("content", ())) for entry in entries[:leading]]
    more = {name: body[name] for name in OPTIONS if body.get(name) not in (None, [], {})}
    members = {"system": [text for text in texts if text], "tools": [_pruned(tool) for tool in tools], "more": more}
    frame = {name: value for name, value in members.items() if value}
    if named and frame:
        raise NoNameError("the frame is given by its name, so the body must not have tools or options of a frame", "frame")
    return Log(frame, entries[leading:], bisect_right(ends, leading))


def require_unframed(body: dict[str, Any], member: str, *, named: bool) -> None:
    """Raises NoNameError if the frame is given by its name, and the body has this member of a frame."""
    if named and body.get(member):
        raise NoNameError(f"the frame is given by its name, so the body must not have {member!r}", "frame")


def tools_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The tools of a body. Raises NoNameError."""
    try:
        return [object_in(tool, "a tool") for tool in list_in(body.get("tools"), "'tools'")]
    except NoNameError as error:
        raise NoNameError(error.reason, "tools") from None


def is_plain_system(entry: Entry) -> bool:
    """True for a turn of the system that is only texts: it is in the frame if it leads."""
    return (
        entry["role"] == "system"
        and entry.keys() <= _PLAIN
        and all(part.keys() == {"text"} for part in entry.get("content", ()))
    )


def _pruned(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool without markers and nulls, at its own level and that of its function."""
    pruned = without(tool, MARKERS)
    function = pruned.get("function")
    return {**pruned, "function": without(function, _NONE)} if isinstance(function, dict) else pruned
