"""Stored elements as entries, each with its bytes. Pure. O(length).

An element of Messages may be several entries, and several items of Responses one entry: the elements are given with the last
entry that they are a part of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import orjson

from gateway.dialects.json_edits import read_list
from gateway.features.prompt_log.naming.chat import message_entry
from gateway.features.prompt_log.naming.entries import Entry, OpenCalls
from gateway.features.prompt_log.naming.forms import CHAT, MESSAGES
from gateway.features.prompt_log.naming.messages import message_entries
from gateway.features.prompt_log.naming.responses import ItemEntryReader


class StoredEntry(NamedTuple):
    """An entry. elements: as they are stored, JSON; empty: a later entry has them."""

    entry: Entry
    elements: list[bytes]


def stored_entries(pieces: Iterable[bytes], form: str) -> Iterator[StoredEntry]:
    """The entries of a log. pieces: inputs and answers in turn, JSON elements joined by commas. Raises NoNameError."""
    calls = OpenCalls()
    for piece in pieces:
        raw = b"[%b]" % piece
        elements = [raw[start:end] for start, end in read_list(raw, 0)[0]]
        if form in (CHAT, MESSAGES):
            for element in elements:
                yield from _of_message(element, form, calls)
        else:
            yield from _of_items(elements, calls)


def _of_message(element: bytes, form: str, calls: OpenCalls) -> Iterator[StoredEntry]:
    message = orjson.loads(element)
    entries = [message_entry(message, calls)] if form == CHAT else message_entries(message, calls)
    for at, entry in enumerate(entries, 1):
        yield StoredEntry(entry, [element] if at == len(entries) else [])


def _of_items(elements: list[bytes], calls: OpenCalls) -> Iterator[StoredEntry]:
    """The items of one piece: an answer ends with it."""
    reader, parts = ItemEntryReader(calls), dict[int, list[bytes]]()
    for element in elements:
        reader.read(orjson.loads(element))
        parts.setdefault(reader.number, []).append(element)
    reader.close()
    for number, entry in enumerate(reader.entries, 1):
        yield StoredEntry(entry, parts.get(number, []))
