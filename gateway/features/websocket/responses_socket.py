"""Responses' WebSocket mode: GET /v1/responses with an upgrade. Engines do not have it; the gateway serves it itself.

    message ──► its lane ──► one request after another: Lifecycle, as POST /v1/responses ──► one message for each event

Each `stream_id` has a lane of its own, messages without one share one; lanes run side by side. What a connection may have is
bounded: MAX_LANES that run, MAX_QUEUED messages that wait, and their bytes by the memory budget, as for other requests. Further
messages are answered with an error at once, and no message is read while its client does not read answers. A message that is
refused is a request like any other: it is counted and logged.

The connection remembers the newest response of each lane, so that a message can go on with one that nothing keeps
(`features/histories/recent.py`).

The headers of the request that opened the connection are those of every message. A client that leaves, or closes, has its
requests cancelled. When the gateway goes down, what was sent before runs to its end; then the connection is closed (1001).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Final

from gateway.admission.cors import require_origin
from gateway.admission.memory import LARGE_BODY, MemoryLease, parsing
from gateway.config.live import Live
from gateway.errors import GatewayError, bad_request, internal_error, shutting_down
from gateway.features.histories.recent import NewestResponses, RecentResponses
from gateway.features.websocket.frames import GOING_AWAY, text_frame
from gateway.features.websocket.handshake import accepting
from gateway.features.websocket.message_request import MessageRequest, SocketOpening, message_of
from gateway.features.websocket.message_socket import Message, MessageSocket
from gateway.features.websocket.takeover import UpgradedReply
from gateway.parser.parsing import Parsing
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
        """Until the connection has ended. Raises GatewayError if there is to be none, ConnectionError if the client left."""
        fields = request.fields
        require_origin(self.live.cors_origins, fields.get("Origin"))
        if self.running.draining:
            raise shutting_down()
        await self.lifecycle.require_welcome(request)
        head = accepting(fields)
        conversation = SocketConversation(self, request)
        if not conversation.socket.take_over(request, head):
            conversation.close()
            raise bad_request("A client has to wait for the answer to its handshake before it sends a message.")
        await conversation.run()
        return UpgradedReply()


class SocketConversation:
    """One connection."""

    def __init__(self, server: ResponsesSockets, request: HttpRequest) -> None:
        loop = asyncio.get_running_loop()
        account = request.lease.account
        self.socket = MessageSocket(loop, server.live, account, self._is_busy, self._refused_unread)
        self._account = account
        self._server = server
        self._opening = SocketOpening(request)
        self._newest = NewestResponses(server.recent, account)
        self._lanes: dict[str, deque[MessageRequest]] = {}
        self._tasks = set[asyncio.Task[None]]()
        self._queued = 0
        self._number = 0

    async def run(self) -> None:
        """Until the connection has ended."""
        running = self._server.running
        running.tell(self._drain)
        try:
            if running.draining:  # since the request was looked at
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
            self._newest.close()
            self.socket.abort()

    def close(self) -> None:
        """It has not begun."""
        self.socket.lost()
        self._newest.close()

    async def _take(self, message: Message) -> None:
        """Put a message into its lane, or answer with an error."""
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
            found, body = await self._server.parsing.created(data, lease.account.client)
        else:
            with parsing(lease, len(data)):
                found, body = await self._server.parsing.created(data, lease.account.client)
        request.put(body, found, self._newest)

    def _put(self, request: MessageRequest) -> None:
        """Raises GatewayError 429 or 503."""
        if self._server.running.draining:
            raise shutting_down()
        lane = self._lanes.get(request.stream_id)
        if self._queued >= MAX_QUEUED:
            raise _too_many(f"{MAX_QUEUED} messages of this connection wait")
        if lane is not None:
            lane.append(request)
            self._queued += 1
            return
        if len(self._lanes) >= MAX_LANES:
            raise _too_many(f"{MAX_LANES} lanes (stream_id) of this connection run")
        self._lanes[request.stream_id] = deque()
        task = asyncio.create_task(self._serve(request), name="lane")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, request: MessageRequest) -> None:
        """A lane, from its first request on until no other waits in it."""
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
            self.socket.used()
            if self._server.running.draining:
                self._drain()

    async def _answer(self, request: MessageRequest) -> None:
        """Raises ConnectionError if the client has left."""
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
        """Answer, unless the client has left."""
        request.close()
        with contextlib.suppress(ConnectionError):
            self._server.lifecycle.refuse(request, error, begun)

    def _refused_unread(self, error: GatewayError) -> None:
        """A message that could not be read, for which the connection is being closed."""
        self._refuse(self._request(self._account.lease()), error, self._server.lifecycle.clock())

    def _is_busy(self) -> bool:
        return bool(self._lanes)

    def _drain(self) -> None:
        """The gateway goes down: close, once nothing runs."""
        if not self._lanes:
            self.socket.close(GOING_AWAY, "the gateway is shutting down")

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def __repr__(self) -> str:
        return f"<Conversation {len(self._lanes)} lanes, {self._queued} queued, {self.socket!r}>"


def _too_many(what: str) -> GatewayError:
    return GatewayError(429, "too_many_messages", f"{what}. Wait for an answer, then send again.", retry_after_s=1)
