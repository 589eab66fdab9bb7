"""Finds the first difference of two prompts, in the order in which an engine reads them: model, salt, tools, fields, turns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import xxhash

from gateway.dialects.body import parts_of_salt
from gateway.dialects.prompt.outline import REST
from gateway.dialects.prompt.segments import Segment
from gateway.dialects.prompt.volatile import ID, PATH, TIME
from gateway.features.doctor.causes import (
    ADAPTER_CHANGED,
    HISTORY_REWRITTEN,
    MODEL_CHANGED,
    NONCE,
    SALT,
    SETTINGS_CHANGED,
    SYSTEM_CHANGED,
    TIMESTAMP,
    TOOLS_CHANGED,
    TOOLS_REORDERED,
)
from gateway.features.doctor.causes import ID as ID_CAUSE
from gateway.features.doctor.entries import first_entry
from gateway.features.doctor.observed import SYSTEM, ObservedRequest

_ADAPTERS: Final = ("lora", "lora_path")
_OF_KIND: Final[Mapping[str, str]] = {TIME: TIMESTAMP, ID: ID_CAUSE}
_SIZE: Final = re.compile(r"[\d.x]+[bBmM](?:-.*)?|latest")  # a model's size or version after a colon in its name


class Difference(NamedTuple):
    """cause: the probable cause. where: the part of the prompt, in words. at: its offset in the prompt as far as known, in
    bytes. before, now: digests of the part in the earlier and in this prompt, "" if missing. turn: its index among all turns;
    -1: before the turns. volatile: the difference is in a time, an id, or a random token. in_path: in a file's path. entry: its
    index in the prompt log, if the logs of both are known and differ; else -1.
    """

    cause: str
    where: str
    at: int
    before: str
    now: str
    turn: int
    volatile: bool
    in_path: bool = False
    entry: int = -1


def first_difference(now: ObservedRequest, before: ObservedRequest) -> Difference | None:
    """None: one of them is a prefix of the other. O(segments)."""
    if now.model != before.model:
        cause = ADAPTER_CHANGED if is_adapter(now.model, before.model) else MODEL_CHANGED
        return Difference(cause, "model", 0, before.model, now.model, -1, volatile=False)
    if now.salt != before.salt:
        (own, head), (own_before, head_before) = parts_of_salt(now.salt), parts_of_salt(before.salt)
        if own != own_before:
            return Difference(SALT, "cache_salt", 0, digest_of(own_before), digest_of(own), -1, volatile=False)
        return Difference(SETTINGS_CHANGED, "fields of the body", 0, head_before[:8], head[:8], -1, volatile=False)
    return _tools_difference(now, before) or _fields_difference(now, before) or _turns_difference(now, before)


def is_adapter(one: str, other: str) -> bool:
    """True if two names are one model with different adapters, in SGLang's form MODEL:ADAPTER. (MODEL:7b is another model.)"""
    base, _, first = one.partition(":")
    other_base, _, second = other.partition(":")
    return base == other_base and not any(_SIZE.fullmatch(each) for each in (first, second) if each)


def digest_of(text: str) -> str:
    """A digest that may be shown."""
    return f"{hash_of(text):016x}"[:8] if text else ""


def hash_of(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def _shown(segment: Segment | None) -> str:
    return f"{segment.digest:016x}"[:8] if segment else ""


def _tools_difference(now: ObservedRequest, before: ObservedRequest) -> Difference | None:
    at = 0
    for number, tool in enumerate(now.tools):
        other = before.tools[number] if number < len(before.tools) else None
        if other is not None and tool.digest == other.digest:
            at += tool.size
            continue
        return _tool_difference(now.tools, before.tools, number, at)
    if len(before.tools) > len(now.tools):
        missing = before.tools[len(now.tools)]
        return Difference(TOOLS_CHANGED, f"tool {missing.name!r}, left out", at, _shown(missing), "", -1, volatile=False)
    return None


def _tool_difference(now: Sequence[Segment], before: Sequence[Segment], number: int, at: int) -> Difference:
    tool = now[number]
    other = before[number] if number < len(before) else None
    where = f"tool {tool.name!r}"
    if sorted(each.digest for each in now) == sorted(each.digest for each in before):
        where = f"{where} in the place of {other.name!r}" if other else where
        return Difference(TOOLS_REORDERED, where, at, _shown(other), _shown(tool), -1, volatile=False)
    if sorted(each.loose for each in now) == sorted(each.loose for each in before):
        same = next((each for each in before if each.loose == tool.loose and each.name == tool.name), other)
        if same is not None and same.loose == tool.loose and same.digest != tool.digest:
            return _volatile_difference(tool, same, where, at, -1)
        return Difference(TOOLS_REORDERED, where, at, _shown(other), _shown(tool), -1, volatile=False)
    earlier = next((each for each in before if each.name == tool.name), None)
    where = f"{where}, changed" if earlier else f"{where}, new"
    return Difference(TOOLS_CHANGED, where, at, _shown(earlier), _shown(tool), -1, volatile=False)


def _fields_difference(now: ObservedRequest, before: ObservedRequest) -> Difference | None:
    ours, theirs = {each.name: each for each in now.fields}, {each.name: each for each in before.fields}
    at = sum([each.size for each in now.tools])
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        one, other = ours.get(name), theirs.get(name)
        if one is not None and other is not None:
            if one.digest == other.digest:
                at += one.size
                continue
            if one.loose == other.loose and name not in _ADAPTERS:
                return _volatile_difference(one, other, f"field {name!r}", at, -1)
        cause = ADAPTER_CHANGED if name in _ADAPTERS else SETTINGS_CHANGED
        return Difference(cause, f"field {name!r}", at, _shown(other), _shown(one), -1, volatile=False)
    return None


def _turns_difference(now: ObservedRequest, before: ObservedRequest) -> Difference | None:
    found = _first_turn(now, before)
    if found is None or found.turn < max(now.lead, before.lead) or not (now.entries and before.entries):
        return found
    entry, in_rest = first_entry(now.entries, before.entries), now.turns[found.turn].name == REST
    if entry < 0:
        return None if in_rest and before.turns[found.turn].name == REST else found
    where = place_of_entry(entry)
    return found._replace(where=where if in_rest else f"{found.where}, {where}", entry=entry)


def place_of_entry(entry: int) -> str:
    """The name of an entry of a log, in words."""
    return f"entry {entry + 1} of its prompt log"


def _first_turn(now: ObservedRequest, before: ObservedRequest) -> Difference | None:
    at = now.head_bytes
    for number, (turn, other) in enumerate(zip(now.turns, before.turns, strict=False)):
        if turn.digest == other.digest:
            at += turn.size
            continue
        in_head = number < max(now.lead, before.lead)
        where = place_of(now, number)
        if turn.loose == other.loose and turn.name == other.name:
            return _volatile_difference(turn, other, where, at, number)
        cause = SYSTEM_CHANGED if in_head or turn.name in SYSTEM or other.name in SYSTEM else HISTORY_REWRITTEN
        return Difference(cause, where, at, _shown(other), _shown(turn), number, volatile=False)
    return None


def place_of(prompt: ObservedRequest, turn: int) -> str:
    """The name of a turn, in words."""
    name = prompt.turns[turn].name
    if turn < prompt.lead:
        return "system prompt"
    return f"paragraph {turn + 1}" if name == "text" else f"turn {turn - prompt.lead + 1} ({name})"


def _volatile_difference(now: Segment, before: Segment, where: str, at: int, turn: int) -> Difference:
    """The first listed volatile text that differs; everything else is equal."""
    for one, other in zip(now.volatile, before.volatile, strict=False):
        if one.digest != other.digest:
            cause = _OF_KIND.get(one.kind, NONCE)
            if one.kind != other.kind:  # 12345678 in one request, 8f3ab2c1 in the next one
                cause = NONCE if TIME not in (one.kind, other.kind) else TIMESTAMP
            digests = f"{other.digest:016x}"[:8], f"{one.digest:016x}"[:8]
            path = one.kind == other.kind == PATH
            return Difference(cause, where, at + one.at, *digests, turn, volatile=True, in_path=path)
    return Difference(NONCE, where, at, _shown(before), _shown(now), turn, volatile=True)
