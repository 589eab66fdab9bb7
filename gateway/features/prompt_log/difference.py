"""The first difference between two logs: in their frames, or in an entry. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from gateway.features.prompt_log.naming.canonical import canonical
from gateway.features.prompt_log.naming.entries import Log


class LogDifference(NamedTuple):
    """entry: its index, from 0; -1: the frame. path: in it, such as `calls[0].arguments.line`, "" if one has none."""

    entry: int
    path: str


def differences(one: Log, other: Log) -> list[LogDifference]:
    """The first difference of the frames, and the first one of the entries. Raises NoNameError."""
    found = list[LogDifference]()
    if canonical(one.frame) != canonical(other.frame):
        found.append(LogDifference(-1, path_between(one.frame, other.frame)))
    for index in range(max(len(one.entries), len(other.entries))):
        if index >= min(len(one.entries), len(other.entries)):
            found.append(LogDifference(index, ""))
            break
        if canonical(one.entries[index]) != canonical(other.entries[index]):
            found.append(LogDifference(index, path_between(one.entries[index], other.entries[index])))
            break
    return found


def path_between(one: Any, other: Any) -> str:
    """The path to the first difference between two values that differ."""
    path = ""
    while True:
        if isinstance(one, dict) and isinstance(other, dict):
            names = sorted(one.keys() | other.keys())
            name = next(name for name in names if _differs(one, other, name))
            path += f".{name}"
            if name not in one or name not in other:
                break
            one, other = one[name], other[name]
        elif isinstance(one, list) and isinstance(other, list):
            most = min(len(one), len(other))
            index = next((at for at in range(most) if canonical(one[at]) != canonical(other[at])), most)
            path += f"[{index}]"
            if index == most:
                break
            one, other = one[index], other[index]
        else:
            break
    return path.removeprefix(".")


def _differs(one: dict[str, Any], other: dict[str, Any], name: str) -> bool:
    if name not in one or name not in other:
        return True
    return canonical(one[name]) != canonical(other[name])
