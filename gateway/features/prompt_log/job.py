"""Work of the parser process for the prompt log: the names and the own turn of a body, pages of stored logs, differences of two
logs, requests that append. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

import orjson

from gateway.dialects.json_edits import read_object
from gateway.dialects.json_structure import exceeds, too_complex
from gateway.features.prompt_log.difference import path_between
from gateway.features.prompt_log.header import invalid, is_ref
from gateway.features.prompt_log.naming.canonical import NoNameError, canonical
from gateway.features.prompt_log.naming.chain import EMPTY, chain_named, chains_of, digest_of, head_name, linked
from gateway.features.prompt_log.naming.entries import OpenCalls
from gateway.features.prompt_log.naming.forms import FORMS, LATEST, RESPONSES, LogNames, names_in
from gateway.features.prompt_log.naming.responses import item_entries
from gateway.features.prompt_log.turns.own_turn import OwnTurn, own_turn
from gateway.features.prompt_log.turns.seals import shown
from gateway.features.prompt_log.turns.stored_entries import StoredEntry, stored_entries


def compute(body: bytes, form: str) -> tuple[str, int, bytes, tuple[bytes, ...], bytes]:
    """The fields of the body's LogNames. Raises GatewayError 400 or 413."""
    if exceeds(body):
        raise too_complex()
    names = named(body, form)
    return names.frame, names.length, names.chain, names.latest, names.digests


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


def entries(
    joined: bytes, form: str, sizes: Sequence[int], length: int, first: int, limit: int
) -> tuple[tuple[bytes, list[bytes]], ...]:
    """A page of the entries of a log: each in its canonical form, and its elements without the bytes of sealed parts. joined:
    pieces of these sizes. length: of the log.
    """
    page = islice(_log_entries(_divided(joined, sizes), form, length), first, first + limit)
    return tuple((canonical(each.entry), shown(each.elements) if "sealed" in each.entry else each.elements) for each in page)


def copied(joined: bytes, form: str, sizes: Sequence[int], length: int, first: int) -> tuple[bool, bytes]:
    """The elements of a log from its entry `first` on, JSON joined by commas. False: an element has entries before it, too.
    joined: pieces of these sizes. length: of the log.
    """
    found = list(islice(_log_entries(_divided(joined, sizes), form, length), max(0, first - 1), None))
    if first and not found[0].elements:
        return False, b""
    return True, b",".join(element for each in found[1 if first else 0 :] for element in each.elements)


def chains_after(digests: bytes, since: bytes, limit: int) -> tuple[int, tuple[bytes, ...], tuple[bytes, ...]]:
    """The position of a chain in a log with these digests (-1: it is not in it), the chains after the next entries, and the
    latest ones of the log.
    """
    chains = [EMPTY, *chains_of(digests)]
    first = chains.index(since) if since in chains else -1
    page = chains[first + 1 : first + 1 + limit] if first >= 0 else ()
    return first, tuple(page), tuple(chains[1:][-LATEST:])


def sealed_parts(joined: bytes, form: str, sizes: Sequence[int], length: int) -> tuple[dict[str, Any], ...]:
    """The sealed parts of a log: their entry, label, digest and length. joined: pieces of these sizes. length: of the log."""
    return tuple(
        {"index": index, **part}
        for index, each in enumerate(_log_entries(_divided(joined, sizes), form, length))
        for part in each.entry.get("sealed", ())
    )


def difference_at(joined: bytes, sizes: Sequence[int], forms: Sequence[str], lengths: Sequence[int], index: int) -> tuple[str]:
    """The path to the first difference in one entry of two logs. joined: their pieces, divided by a size of -1. lengths: of the
    logs.
    """
    middle = list(sizes).index(-1)
    cut = sum(sizes[:middle])
    halves = (joined[:cut], sizes[:middle]), (joined[cut:], sizes[middle + 1 :])
    one, other = (
        next(islice(_log_entries(_divided(*half), form, length), index, None)).entry
        for half, form, length in zip(halves, forms, lengths, strict=True)
    )
    return (path_between(one, other),)


def response_names(
    joined: bytes, sizes: Sequence[int], chain: bytes, open_: Sequence[str], first: bool
) -> tuple[tuple[str, str, bytes, bytes], ...]:
    """The names of ordinary responses that continue each other: input head, head, digests, open calls. joined: inputs and
    outputs in turn, of these sizes. chain, open_: before them. first: they begin their log. Raises GatewayError 400.
    """
    pieces, calls, names = _divided(joined, sizes), OpenCalls(open_), list[tuple[str, str, bytes, bytes]]()
    try:
        for at in range(0, len(pieces), 2):
            items = orjson.loads(b"[%b]" % pieces[at])
            made = FORMS[RESPONSES]({"input": items}, calls).entries if first and not at else item_entries(items, calls)
            given, open_given = [digest_of(entry) for entry in made], calls.ids
            answer = [digest_of(entry) for entry in item_entries(orjson.loads(b"[%b]" % pieces[at + 1]), calls)]
            input_chain = reduce(linked, given, chain)
            chain = reduce(linked, answer, input_chain)
            open_calls = orjson.dumps([open_given, calls.ids]) if open_given or calls.ids else b""
            names.append((head_name(input_chain), head_name(chain), b"".join(given + answer), open_calls))
    except NoNameError as error:
        raise invalid(f"This conversation has no name: {error.reason}.", "id") from None
    return tuple(names)


def _divided(joined: bytes, sizes: Sequence[int]) -> list[bytes]:
    ends = list(accumulate(sizes, initial=0))
    return [joined[start:end] for start, end in pairwise(ends)]


def _log_entries(pieces: Sequence[bytes], form: str, length: int) -> Iterator[StoredEntry]:
    """The entries of a log. Responses that were not stored by name have leading texts of the system, which are in the frame, in
    their input.
    """
    found = stored_entries(pieces, form)
    if form != RESPONSES:
        return found
    every = list(found)
    return iter(every[len(every) - length :])


class AppendRequest(NamedTuple):
    """The members of a request that appends. base, expect: heads, or "". ref: its name, or "". source, since: the heads of
    `copy`, or "". start, end: of its body; equal: it has none.
    """

    form: str
    base: str
    expect: str
    ref: str
    source: str
    since: str
    ttl: int
    start: int
    end: int


def appended(body: bytes) -> AppendRequest:
    """Raises GatewayError 400 or 413."""
    if exceeds(body):
        raise too_complex()
    try:
        found, members = orjson.loads(body), read_object(body)
    except ValueError:
        raise invalid("The body is no JSON object.", "body") from None
    copy = found.get("copy")
    if copy is None:
        copy = {}
    elif not isinstance(copy, dict) or not copy.get("from"):
        raise invalid("'copy' must be {from: HEAD, since: HEAD}.", "copy")
    wanted = {"base": found.get("base"), "expect": found.get("expect"), "from": copy.get("from"), "since": copy.get("since")}
    ref = "" if found.get("ref") is None else found["ref"]
    if ref != "" and not (isinstance(ref, str) and is_ref(ref)):
        raise invalid("'ref' must be a name: 1 to 64 letters, digits, dots, _ or -.", "ref")
    form, ttl = found.get("form"), found.get("ttl", 0)
    if not isinstance(form, str) or form not in FORMS:
        raise invalid(f"'form' must be one of {', '.join(FORMS)}.", "form")
    if type(ttl) is not int or ttl < 0 or ("ttl" in found and not ttl):
        raise invalid("'ttl' must be a number of seconds, 1 or more.", "ttl")
    if not isinstance(found.get("body", {} if copy else None), dict):
        raise invalid("'body' must be an object: a body of that API, without a model.", "body")
    if form == RESPONSES and found.get("body", {}).get("previous_response_id") is not None:
        raise invalid("The body goes on from a response: name its log in 'base'.", "previous_response_id")
    heads = {name: "" if value is None else value for name, value in wanted.items()}
    for name, head in heads.items():
        if head != "" and (not isinstance(head, str) or chain_named(head) is None):
            raise invalid(f"{name!r} must be a head, such as pl1_9fIC...", name)
    return AppendRequest(
        form, heads["base"], heads["expect"], ref, heads["from"], heads["since"], ttl, *members.spans.get("body", (0, 0))
    )
