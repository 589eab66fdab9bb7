"""Bases in the store: the turns that a head names, the stored turns before them, and frames by their names."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import orjson

from gateway.database.failures import StoreFailed
from gateway.errors import GatewayError
from gateway.features.histories.histories import unavailable
from gateway.features.histories.records import (
    ExpiredObjectError,
    FoundTurn,
    HistoryTooLargeError,
    StoredResponse,
    TurnNames,
    TurnOutline,
    UnknownObjectError,
)
from gateway.features.prompt_log.naming.chain import DIGEST, EMPTY, chain_named, chains_of, head_name
from gateway.features.prompt_log.turns.own_turn import OwnTurn
from gateway.features.prompt_log.turns.seals import may_have_seals

if TYPE_CHECKING:
    from gateway.features.histories.turns import TurnStore

Row = TypeVar("Row", StoredResponse, TurnOutline)

_FEW: Final = 4  # entries of an answer
_NONE: Final = "It was not kept, was deleted, or belongs to other credentials. Send the whole conversation, with keep."


class Base(NamedTuple):
    """A base as it is stored. before: its elements, in pieces. digests: of its entries. issuers: the pools that have made its
    sealed parts. size: bytes of its elements.
    """

    before: list[bytes]
    digests: bytes
    issuers: frozenset[str] = frozenset()
    size: int = 0

    @property
    def length(self) -> int:
        """Its entries."""
        return len(self.digests) // DIGEST


async def found_turns(store: TurnStore, owner: str, chain: bytes, form: str = "", param: str = "base") -> Sequence[FoundTurn]:
    """The turns with a head or an input head, the newest first. form: "": any. param: the member with the head, for errors.

    Raises GatewayError 404, 409, 410 or 503.
    """
    try:
        found = await store.turns_at(owner, head_name(chain))
    except UnknownObjectError:
        raise log_error(404, "prompt_log_not_found", f"The log is not known. {_NONE}", param) from None
    except ExpiredObjectError as expired:
        raise expired_log(expired, param) from None
    except StoreFailed as failure:
        raise not_answering(failure) from None
    fitting = [turn for turn in found if form in ("", turn.form)]
    if not fitting:
        raise wrong_form(found[0].form, param)
    return fitting


def wrong_form(form: str, param: str) -> GatewayError:
    """The error of a log of another API."""
    text = "The log was written in another API. Send the whole conversation; 'expect' still verifies it."
    return log_error(409, "prompt_log_form", text, param, form=form)


def expired_log(expired: ExpiredObjectError, param: str = "base") -> GatewayError:
    """The error of a log that was kept."""
    text = "The log has expired. Send the whole conversation, with keep."
    return log_error(410, "prompt_log_expired", text, param, expired_at=int(expired.at))


async def base_of(store: TurnStore, owner: str, turn: FoundTurn, max_bytes: int) -> Base:
    """The turns up to this one. Raises GatewayError 404, 413 or 503."""
    rows = await _lineage(store.chain(owner, turn.id, max_bytes))
    before, issuers = list[bytes](), set[str]()
    for row, at_input in zip(rows, _at_inputs(rows, turn), strict=True):
        before += [row.input, b"" if at_input else row.output]
        if row.log.issuer and (not at_input or may_have_seals(row.input)):
            issuers.add(row.log.issuer)
    return Base(before, _digests(rows, turn), frozenset(issuers), sum(map(len, before)))


async def outline_of(store: TurnStore, owner: str, turn: FoundTurn, max_bytes: int) -> Base:
    """The same without elements and issuers, which are not read. Raises GatewayError 404, 413 or 503."""
    rows = await _lineage(store.outline(owner, turn.id, max_bytes))
    outputs = (0 if at_input else row.output_size for row, at_input in zip(rows, _at_inputs(rows, turn), strict=True))
    return Base([], _digests(rows, turn), size=sum(row.input_size for row in rows) + sum(outputs))


async def _lineage(reading: Awaitable[list[Row]]) -> list[Row]:
    try:
        return await reading
    except (UnknownObjectError, ExpiredObjectError):
        raise log_error(404, "prompt_log_not_found", f"A turn before the base is gone. {_NONE}") from None
    except HistoryTooLargeError as large:
        text = f"The log is too long to be sent: {large.turns:,} turns, {large.size:,} bytes. Start a new one, with a summary."
        raise log_error(413, "history_too_large", text) from None
    except StoreFailed as failure:
        raise not_answering(failure) from None


def _at_inputs(rows: Sequence[Row], turn: FoundTurn) -> list[bool]:
    """For each turn: True if the log goes on from its input, not from its answer."""
    return [*(row.log.after_input for row in rows[1:]), turn.at_input]


def _digests(rows: Sequence[Row], turn: FoundTurn) -> bytes:
    digests, head = list[bytes](), ""
    for row, at_input in zip(rows, _at_inputs(rows, turn), strict=True):
        digests.append(_input_digests(row.log, chain_named(head) or EMPTY) if at_input else row.log.digests)
        head = row.log.input_head if at_input else row.log.head
    return b"".join(digests)


async def frame_of(store: TurnStore, owner: str, name: str, form: str) -> bytes:
    """A frame, as members of a body. Raises GatewayError 404 or 503."""
    try:
        return await store.frame(owner, name, form)
    except UnknownObjectError:
        text = "The frame is not known. Send its system texts, tools and options, with keep."
        raise log_error(404, "prompt_frame_not_found", text, "frame") from None
    except StoreFailed as failure:
        raise not_answering(failure) from None


async def issuers_of(store: TurnStore, owner: str, own: OwnTurn) -> frozenset[str]:
    """The pools that have made the sealed parts of a request's own turns, as far as these are kept here. Raises GatewayError
    503.
    """
    if not own.sealed:
        return frozenset()
    try:
        return await store.issuers_at(owner, [head_name(chain) for chain in own.sealed])
    except StoreFailed as failure:
        raise not_answering(failure) from None


def open_calls(turn: FoundTurn) -> list[str]:
    """The ids of the calls without a result at a found turn."""
    ids: list[str] = orjson.loads(turn.open)
    return ids


def log_error(status: int, code: str, text: str, param: str = "base", **members: Any) -> GatewayError:
    """An error about a log. Its message has no head, because it is logged."""
    return GatewayError(status, code, f"Prompt-Log: {text}", param=param or None, members=members)


def not_answering(failure: StoreFailed) -> GatewayError:
    error = unavailable(failure)
    error.members = {}
    return error


def _input_digests(names: TurnNames, chain: bytes) -> bytes:
    """The digests of a turn's input. chain: before it. O(1) if the answer has a few entries, else O(entries of the turn)."""
    digests, input_chain, head = names.digests, chain_named(names.input_head), chain_named(names.head)
    assert input_chain is not None
    for at in range(len(digests), max(-1, len(digests) - _FEW * DIGEST - 1), -DIGEST):  # nearly all answers
        if deque([input_chain, *chains_of(digests[at:], input_chain)], maxlen=1)[0] == head:
            return digests[:at]
    lengths = (at for at, each in enumerate([chain, *chains_of(digests, chain)]) if each == input_chain)
    return digests[: next(lengths, 0) * DIGEST]
