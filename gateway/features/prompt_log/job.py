"""Names of large bodies, and what they add to a log, as operations of the parser process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from gateway.dialects.json_structure import exceeds, too_complex
from gateway.features.prompt_log.header import invalid
from gateway.features.prompt_log.naming.canonical import NoNameError, canonical
from gateway.features.prompt_log.naming.forms import LogNames, names_in
from gateway.features.prompt_log.turns.own_turn import OwnTurn, own_turn
from gateway.features.prompt_log.turns.stored_entries import stored_entries


def compute(body: bytes, form: str) -> tuple[str, int, bytes, tuple[bytes, ...]]:
    """The fields of the body's LogNames. Raises GatewayError 400 or 413."""
    if exceeds(body):
        raise too_complex()
    names = named(body, form)
    return names.frame, names.length, names.chain, names.latest


def named(body: bytes, form: str) -> LogNames:
    """Raises GatewayError 400."""
    try:
        return names_in(body, form)
    except NoNameError as error:
        raise invalid(f"This conversation has no name: {error.reason}.", error.param) from None


def own(body: bytes, form: str, chain: bytes, bases: list[list[str]], named: bool) -> tuple[Any, ...]:
    """The fields of the body's OwnTurn. Raises GatewayError 400 or 413."""
    if exceeds(body):
        raise too_complex()
    return own_named(body, form, chain, bases, named=named).fields


def own_named(body: bytes, form: str, chain: bytes, bases: Sequence[Sequence[str]], *, named: bool) -> OwnTurn:
    """See `own_turn`. Raises GatewayError 400."""
    try:
        return own_turn(body, form, chain, bases, named=named)
    except NoNameError as error:
        raise invalid(f"This conversation has no name: {error.reason}.", error.param) from None


def entries(joined: bytes, form: str, sizes: Sequence[int], first: int, limit: int) -> tuple[tuple[bytes, list[bytes]], ...]:
    """A page of the entries of a log: each in its canonical form, and its elements. joined: pieces of these sizes."""
    pieces, at = list[bytes](), 0
    for size in sizes:
        pieces.append(joined[at : at + size])
        at += size
    page = islice(stored_entries(pieces, form), first, first + limit)
    return tuple((canonical(each.entry), each.elements) for each in page)
