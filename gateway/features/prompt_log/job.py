"""Names of large bodies, and their parts of logs, as operations of the parser process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import orjson

from gateway.dialects.json_edits import read_object
from gateway.dialects.json_structure import exceeds, too_complex
from gateway.features.prompt_log.header import invalid, logs_off
from gateway.features.prompt_log.naming.canonical import NoNameError, canonical
from gateway.features.prompt_log.naming.forms import FORMS, RESPONSES, LogNames, names_in
from gateway.features.prompt_log.turns.own_turn import OwnTurn, own_turn
from gateway.features.prompt_log.turns.seals import shown
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
    """A page of the entries of a log: each in its canonical form, and its elements without the bytes of sealed parts. joined:
    pieces of these sizes.
    """
    pieces, at = list[bytes](), 0
    for size in sizes:
        pieces.append(joined[at : at + size])
        at += size
    page = islice(stored_entries(pieces, form), first, first + limit)
    return tuple((canonical(each.entry), shown(each.elements) if "sealed" in each.entry else each.elements) for each in page)


def appended(body: bytes) -> tuple[str, str, str, int, int, int]:
    """The members of a request that appends: form, base, expect, ttl, and the offsets of its body. Raises GatewayError 400 or
    413.
    """
    if exceeds(body):
        raise too_complex()
    try:
        found, members = orjson.loads(body), read_object(body)
    except ValueError:
        raise invalid("The body is no JSON object.", "body") from None
    for name in ("ref", "copy"):
        if found.get(name) is not None:
            raise logs_off(f"{name!r} is not served here.", name)
    form, ttl = found.get("form"), found.get("ttl", 0)
    if not isinstance(form, str) or form not in FORMS:
        raise invalid(f"'form' must be one of {', '.join(FORMS)}.", "form")
    if type(ttl) is not int or ttl < 0 or ("ttl" in found and not ttl):
        raise invalid("'ttl' must be a number of seconds, 1 or more.", "ttl")
    if not isinstance(found.get("body"), dict):
        raise invalid("'body' must be an object: a body of that API, without a model.", "body")
    if form == RESPONSES and found["body"].get("previous_response_id") is not None:
        raise invalid("The body goes on from a response: name its log in 'base'.", "previous_response_id")
    heads = [found.get(name) or "" for name in ("base", "expect")]
    if not all(isinstance(head, str) for head in heads):
        raise invalid("'base' and 'expect' must be heads.", "base")
    return form, heads[0], heads[1], ttl, *members.spans["body"]
