"""Endpoints of stored responses (GET, DELETE, cancel, input_items) and conversations, as in OpenAI's API.

    (method, path, query, body, owner) ──► (status, JSON), or a GatewayError

An unknown object may be stored at a replica: then the result is None, and the request is forwarded.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import unquote
from uuid import uuid4

import orjson

from gateway.admission.memory import LARGE_BODY
from gateway.database.failures import StoreFailed
from gateway.dialects.log_names import without_names
from gateway.dialects.responses.ids import MAX_ID_CHARS, is_id
from gateway.errors import GatewayError, bad_request
from gateway.features.histories.histories import Histories, expired_error, full, unavailable
from gateway.features.histories.item_forms import Paging, page, require_includes
from gateway.features.histories.records import (
    RUNNING,
    TURN,
    Charge,
    ExpiredObjectError,
    HistoryTooLargeError,
    Item,
    ItemRange,
    StoredConversation,
    StoreFullError,
    UnknownObjectError,
)
from gateway.features.responses.background.objects import in_background
from gateway.features.runs.asking import event_number, fields_of, require_method
from gateway.features.runs.following import PARSED, RunStreamRequest
from gateway.features.runs.runs import Runs

MAX_LISTED: Final = 16 << 20  # bytes of a listed history, and of a page of a conversation (one item may be larger)

_PATH: Final = re.compile(r"/v1/(responses|conversations)(?:/([^/]+)(?:/(input_items|cancel|items)(?:/([^/]+))?)?)?")
_OWN: Final = ("compact", "input_tokens")  # path segments that are not ids

_COPIES: Final = 2  # copies of a body's items in addition to the body: in the store and in the answer

Answer = tuple[int, bytes]


class StateApi:
    """Answers requests for stored objects. clock: Unix seconds."""

    def __init__(self, histories: Histories, runs: Runs, clock: Callable[[], float] = time.time) -> None:
        self._histories = histories
        self._runs = runs
        self._clock = clock

    async def answer(
        self, method: str, target: str, body: bytes, owner: str, client: str, charge: Charge, *, maybe_at_replica: bool
    ) -> Answer | RunStreamRequest | None:
        """Answers a request. None: it is for a replica. target: path and query. client: the unit of fairness. charge: charges
        the answer's memory. maybe_at_replica: a replica may have an object that the store does not have.

        Raises GatewayError.
        """
        path, _, query = target.partition("?")
        found = _PATH.fullmatch(path)
        if self._histories.store is None or found is None:
            return None
        kind, id_, below, item = found.groups()
        id_, item = (unquote(id_) if id_ else id_), (unquote(item) if item else item)
        if not all(name is None or is_id(name) for name in (id_, item)):
            raise bad_request(f"An id has at most {MAX_ID_CHARS} printable characters.")
        require_includes(query)
        try:
            if kind == "conversations":
                return await self._conversation(method, (id_, below, item), query, body, owner, client, charge)
            if id_ is None or id_ in _OWN or item is not None or below == "items":
                return None
            return await self._response(method, (id_, below), query, owner, client, charge)
        except UnknownObjectError as unknown:
            if maybe_at_replica and unknown.id == id_:
                return None
            kind_name = "Response" if kind == "responses" else "Conversation" if unknown.id == id_ else "Item"
            text = f"{kind_name} with id {without_names(unknown.id[:100])!r} not found."
            raise GatewayError(404, "not_found", text) from None
        except ExpiredObjectError as expired:
            raise expired_error(expired) from None
        except HistoryTooLargeError as large:
            raise GatewayError(
                413, "too_large", f"It has {large.turns:,} parts, {large.size:,} bytes, which is too much for this request."
            ) from None
        except StoreFullError as failure:
            raise full(failure) from None
        except StoreFailed as failure:
            raise unavailable(failure) from None

    # -- responses

    async def _response(
        self, method: str, named: tuple[str, str | None], query: str, owner: str, client: str, charge: Charge
    ) -> Answer | RunStreamRequest | None:
        (id_, below), store = named, await self._runs.open_store()
        if id_.startswith(TURN):
            raise UnknownObjectError(id_)  # of another API, in a prompt log
        if below == "input_items":
            require_method(method, "GET")
            asked = fields_of(query)
            Paging(asked)  # before anything is read
            chain = await store.chain(owner, id_, MAX_LISTED)
            charge(PARSED * sum(len(each.input) + len(each.output) for each in chain))
            turns = [(each.id, each.input, each.output) for each in chain]
            return 200, await self._histories.reader.input_items(turns, asked, client)
        if below == "cancel":
            require_method(method, "POST")
            found = await store.get(owner, id_)
            if not in_background(found.response):
                raise bad_request("Only background responses can be cancelled.", code="not_in_background")
            if found.status in RUNNING:
                await store.cancel(owner, id_)
                self._runs.stop(owner, id_)
                found = await store.get(owner, id_)
            return 200, found.response
        require_method(method, "GET", "DELETE")
        if method == "DELETE":
            if not await store.delete(owner, id_):
                await store.get(owner, id_)  # raises the error with the reason
                raise UnknownObjectError(id_)
            self._runs.stop(owner, id_)
            return 200, orjson.dumps({"id": id_, "object": "response", "deleted": True})
        found, asked = await store.get(owner, id_), fields_of(query)
        if asked.get("stream") not in ("true", "1"):
            return 200, found.response
        if not in_background(found.response):
            raise bad_request("Only background responses can be streamed again.", "stream")
        return RunStreamRequest(owner, id_, found.response, found.status in RUNNING, event_number(asked.get("starting_after")))

    # -- conversations

    async def _conversation(
        self,
        method: str,
        named: tuple[str | None, str | None, str | None],
        query: str,
        body: bytes,
        owner: str,
        client: str,
        charge: Charge,
    ) -> Answer | None:
        (id_, below, item), store, read = named, await self._histories.open(), self._histories.reader
        if len(body) >= LARGE_BODY:
            charge(_COPIES * len(body))
        if id_ is None:
            require_method(method, "POST")
            given = await read.conversation_fields(body, client)
            made = StoredConversation(owner=owner, id=f"conv_{uuid4().hex}", created_at=self._clock(), metadata=given.metadata)
            await store.create_conversation(made, [Item(*each) for each in given.items or ()])
            return 200, _conversation(made)
        if below is None:
            require_method(method, "GET", "POST", "DELETE")
            if method == "DELETE":
                if not await store.delete_conversation(owner, id_):
                    await store.conversation(owner, id_)
                    raise UnknownObjectError(id_)
                return 200, orjson.dumps({"id": id_, "object": "conversation.deleted", "deleted": True})
            if method == "POST":
                await store.set_metadata(owner, id_, (await read.conversation_fields(body, client)).metadata)
            return 200, _conversation(await store.conversation(owner, id_))
        if below != "items":
            raise GatewayError(404, "not_found", "A conversation has 'items'.")
        if item is not None:
            require_method(method, "GET", "DELETE")
            if method == "DELETE":
                await store.delete_item(owner, id_, item)
                return 200, _conversation(await store.conversation(owner, id_))
            return 200, (await store.item(owner, id_, item, charge)).item
        require_method(method, "GET", "POST")
        if method == "POST":
            items = (await read.conversation_fields(body, client)).items
            if items is None:
                raise bad_request("'items' is required: a list.", "items")
            await store.add(owner, id_, [Item(*each) for each in items])
            return 200, page(items, more=False)
        asked = Paging(fields_of(query))
        part = ItemRange(asked.limit, asked.after, descending=asked.descending)
        rows, more = await store.items(owner, id_, part, MAX_LISTED, charge)
        return 200, page([(each.id, each.item) for each in rows], more=more)


def _conversation(found: StoredConversation) -> bytes:
    metadata = orjson.loads(found.metadata)
    return orjson.dumps({"id": found.id, "object": "conversation", "created_at": int(found.created_at), "metadata": metadata})
