"""The WebSocket mode of Responses: GET /v1/responses with an upgrade. Engines do not have it; the gateway implements it.

    message ──► its lane ──► one request after another: Lifecycle, as POST /v1/responses ──► one message per event

Each `stream_id` has its own lane; messages without one share a lane. Lanes run in parallel. A connection is limited to
MAX_LANES running lanes and MAX_QUEUED waiting messages, and their bytes by the memory budget, as for other requests. Further
messages get an error at once. No message is read while the client does not read answers. A refused message is counted and
logged like any request.

The connection remembers the latest response of each lane, so that a message can continue a response that is not stored
(`features/histories/recent.py`).

The headers of the opening request apply to every message. When a client leaves or closes, its requests are cancelled. When the
gateway shuts down, earlier messages are answered; then the connection is closed (1001).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from functools import partial
from typing import Final

from gateway.admission.cors import require_origin
from gateway.admission.memory import LARGE_BODY, MemoryLease, parsing
from gateway.config.live import Live
from gateway.errors import GatewayError, bad_request, internal_error, shutting_down
from gateway.features.histories.recent import ConnectionResponses, RecentResponses
from gateway.features.websocket.create_message import OPERATION, CreateMessage, created
from gateway.features.websocket.frames import GOING_AWAY, text_frame
from gateway.features.websocket.handshake import accept_head
from gateway.features.websocket.message_request import MessageRequest, SocketOpening, message_of
from gateway.features.websocket.message_socket import Message, MessageSocket
from gateway.features.websocket.takeover import UpgradedReply
from gateway.parser.parsing import Parsing, edited
from gateway.request.lifecycle import Lifecycle
from gateway.request.running import RunningRequests
from gateway.server.http.request import HttpRequest

RESPONSES_PATH: Final = "/v1/responses"
MAX_LANES: Final = 32
MAX_QUEUED: Final = 256


class ResponsesSockets:
    """Serves the connections of one gateway."""

    def __init__(self, *, live: Live, lifecycle: Lifecycle, parsing: Parsing, running: RunningRequests) -> None:
        self.live = live
        self.lifecycle = lifecycle
        self.parsing = parsing
        self.running = running
        self.recent = RecentResponses()

    async def serve(self, request: HttpRequest) -> UpgradedReply:
        """Serves a connection until its end. Raises GatewayError if it is refused, ConnectionError if the client left."""
        fields = request.fields
        require_origin(self.live.cors_origins, fields.get("Origin"))
        if self.running.draining:
            raise shutting_down()
        await self.lifecycle.require_welcome(request)
        head = accept_head(fields)
        conversation = SocketConversation(self, request)
        if not conversation.socket.take_over(request, head):
            conversation.close()
            raise bad_request("A client must wait for the answer to its handshake before it sends a message.")
        await conversation.run()
        return UpgradedReply()


class SocketConversation:
    """One connection."""

    def __init__(self, server: ResponsesSockets, request: HttpRequest) -> None:
        loop = asyncio.get_running_loop()
        account = request.lease.account
        self.socket = MessageSocket(loop, server.live, account, self._is_busy, self._refuse_unread)
        self._account = account
        self._server = server
        self._opening = SocketOpening(request)
        self._responses = ConnectionResponses(server.recent, account)
        self._lanes: dict[str, deque[MessageRequest]] = {}
        self._tasks = set[asyncio.Task[None]]()
        self._queued = 0
        self._number = 0

    async def run(self) -> None:
        """Runs until the connection has ended."""
        running = self._server.running
        running.tell(self._drain)
        try:
            if running.draining:  # since the request arrived
                self._drain()
            while (message := await self.socket.next()) is not None:
                await self._take(message)
                await self.socket.drained()
            self._cancel()
            await self.socket.ended()
        finally:
            running.forget(self._drain)
            self._cancel()
            if self._tasks:
                await asyncio.gather(*self._tasks, return_exceptions=True)
            self._responses.close()
            self.socket.abort()

    def close(self) -> None:
        """Ends a conversation that was not run."""
        self.socket.lost()
        self._responses.close()

    async def _take(self, message: Message) -> None:
        """Puts a message into its lane, or answers with an error."""
        begun, request = self._server.lifecycle.clock(), self._request(message.lease)
        try:
            await self._read(message, request)
            self._put(request)
        except GatewayError as error:
            self._refuse(request, error, begun)
        except BaseException:
            request.close()
            raise

    async def _read(self, message: Message, request: MessageRequest) -> None:
        """Raises GatewayError."""
        if message.refusal:
            raise message.refusal
        data, message.data, lease = message.data, b"", message.lease
        if len(data) < LARGE_BODY:
            found, body = await self._created(data, lease.account.client)
        else:
            with parsing(lease, len(data)):
                found, body = await self._created(data, lease.account.client)
        request.put(body, found, self._responses)

    async def _created(self, message: bytes, client: str) -> tuple[CreateMessage, bytes]:
        """The parsed fields of a message, and the body of its request. Raises GatewayError 400, 413, 500 or 503."""
        parser = self._server.parsing
        if parser.is_quick(message, client):
            found = await parser.turns.take(partial(created, message), client)
        else:
            found = CreateMessage(*await parser.process.run((OPERATION,), message, client))
        return found, await edited(message, found.edits)

    def _put(self, request: MessageRequest) -> None:
        """Raises GatewayError 429 or 503."""
        if self._server.running.draining:
            raise shutting_down()
        lane = self._lanes.get(request.stream_id)
        if self._queued >= MAX_QUEUED:
            raise _too_many(f"{MAX_QUEUED} messages of this connection are waiting")
        if lane is not None:
            lane.append(request)
            self._queued += 1
            return
        if len(self._lanes) >= MAX_LANES:
            raise _too_many(f"{MAX_LANES} lanes (stream_id) of this connection are running")
        self._lanes[request.stream_id] = deque()
        task = asyncio.create_task(self._serve(request), name="lane")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, request: MessageRequest) -> None:
        """Runs a lane until no request waits in it."""
        lane = self._lanes[request.stream_id]
        try:
            while True:
                try:
                    await self._answer(request)
                finally:
                    request.close()
                if not lane:
                    return
                request = lane.popleft()
                self._queued -= 1
        except ConnectionError:
            self.socket.abort()  # the client has left, or does not read
        finally:
            del self._lanes[request.stream_id]
            for left in lane:
                self._queued -= 1
                left.close()
            self.socket.restart_idle_time()
            if self._server.running.draining:
                self._drain()

    async def _answer(self, request: MessageRequest) -> None:
        """Serves a request. Raises ConnectionError if the client has left."""
        if self._server.running.over:
            self._refuse(request, shutting_down(), self._server.lifecycle.clock())
            return
        reply = await self._server.lifecycle.serve(request)
        if not (reply.begun or self.socket.closing):
            self.socket.send(text_frame(message_of(internal_error(), request.stream_id)))
        await self.socket.drained()

    def _request(self, lease: MemoryLease) -> MessageRequest:
        self._number += 1
        return MessageRequest(self._opening, self.socket, self._number, lease)

    def _refuse(self, request: MessageRequest, error: GatewayError, begun: float) -> None:
        """Sends an error, unless the client has left."""
        request.close()
        with contextlib.suppress(ConnectionError):
            self._server.lifecycle.refuse(request, error, begun)

    def _refuse_unread(self, error: GatewayError) -> None:
        """Refuses a message that could not be read; the connection is closing."""
        self._refuse(self._request(self._account.lease()), error, self._server.lifecycle.clock())

    def _is_busy(self) -> bool:
        return bool(self._lanes)

    def _drain(self) -> None:
        """Closes the connection for the gateway's shutdown, if no request runs."""
        if not self._lanes:
            self.socket.close(GOING_AWAY, "the gateway is shutting down")

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def __repr__(self) -> str:
        return f"<Conversation {len(self._lanes)} lanes, {self._queued} queued, {self.socket!r}>"


def _too_many(what: str) -> GatewayError:
    return GatewayError(429, "too_many_messages", f"{what}. Wait for an answer, then send again.", retry_after_s=1)
