"""Prefill and decode on different simulated replicas, with the fields that vLLM's NixlConnector and SGLang have on the wire.

    vLLM:   prefill leg ──► `kv_transfer_params`, a hold for `lease_s` ──► decode leg ──► GET from the prefiller ──► answer
    SGLang: both legs with one `bootstrap_room` ──► the decode leg waits for the prefill leg: GET from the prefiller ──► answer

The side channel of the engines (NIXL, a bootstrap server) is a path of the prefiller's own port here: `remote_host` and
`remote_port`, or `bootstrap_host` and `bootstrap_port`, are the address of its API. A taken prompt is no longer held, as in
vLLM: the first reader frees it. The transfer takes `token_s` for each token; the decoder then computes the last token of the
prompt only.

A decoder that cannot take a prompt over answers 500, in vLLM's words or in SGLang's.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import aiohttp
import orjson
from aiohttp import web

from replica.api.generation import GenerationRequest
from replica.api.validation import ApiError, read_object
from replica.engine import EngineRequest

Role = Literal["prefill", "decode"]
Computed = Callable[[int, int], None]  # with the tokens of the prompt, and its cached ones
Wire = Literal["vllm", "sglang"]
MAX_HELD = 4096  # prompts, or rooms; beyond it the oldest is dropped
ROOM_S = 300.0  # SGLang's time-outs of both sides
BLOCK_IDS = 1 << 16  # in the parameters of one prompt
_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_NEEDED = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """`token_s`: seconds of the transfer for each token. `lease_s`: for which a prefiller holds a prompt."""

    role: Role
    wire: Wire = "vllm"
    token_s: float = 1e-5
    lease_s: float = 30.0


@dataclass(frozen=True, slots=True)
class TransferFields:
    """The fields of a request. `remote`: vLLM's parameters. `room`: SGLang's host, port and room."""

    remote: Mapping[str, Any] = field(default_factory=dict)
    room: tuple[str, int, int] | None = None

    @property
    def asks_prefill(self) -> bool:
        return self.remote.get("do_remote_decode") is True


class KvTransfers:
    """The transfers of one replica. `start` and `close` it with the server."""

    def __init__(self, config: TransferConfig, block_size: int) -> None:
        self._config = config
        self._block_size = block_size
        self._engine_id = secrets.token_hex(8)
        self._held: dict[str, tuple[int, float]] = {}  # by request: tokens, end of the lease
        self._rooms: dict[int, asyncio.Future[tuple[int, int]]] = {}  # the tokens of a computed prompt, and the cached ones
        self._session: aiohttp.ClientSession | None = None

    @property
    def routes(self) -> list[web.RouteDef]:
        """The side channel."""
        return [web.get("/kv_transfer/{engine}/{request}", self._take), web.get("/kv_rooms/{room:[0-9]+}", self._wait)]

    async def close(self) -> None:
        for room in self._rooms.values():
            room.cancel()
        if self._session is not None:
            await self._session.close()

    # -- a request

    def reading(self, read: Callable[[bytes, str], GenerationRequest]) -> Callable[[bytes, str], GenerationRequest]:
        """`read` with the fields of transfers."""

        def with_fields(raw: bytes, model: str) -> GenerationRequest:
            request = read(raw, model)
            fields = self._fields(read_object(raw))
            if fields.asks_prefill and (request.output.stream or request.n > 1 or len(request.prompts) > 1):
                return replace(request, ignored=(*request.ignored, "kv_transfer_params"))  # as in vLLM: no parameters come back
            return replace(request, transfer=fields)

        return with_fields

    def _fields(self, body: Mapping[str, Any]) -> TransferFields:
        if self._config.wire == "vllm":
            remote = body.get("kv_transfer_params")
            if remote is not None and not isinstance(remote, dict):
                raise ApiError(400, "kv_transfer_params must be an object.", "kv_transfer_params")
            return TransferFields(remote or {})
        host, port, room = (body.get(name) for name in _FIELDS)
        if room is None:
            text = "Invalid request: Disaggregated request received without bootstrap room id."
            raise ApiError(400, text, "bootstrap_room")
        if not (isinstance(host, str) and isinstance(port, int) and type(room) is int and 0 <= room < 1 << 63):
            raise ApiError(400, "bootstrap_host, bootstrap_port and bootstrap_room of one prompt are needed.", "bootstrap_room")
        return TransferFields(room=(host, port, room))

    async def begin(self, fields: TransferFields, requests: Sequence[EngineRequest]) -> Sequence[EngineRequest]:
        """The requests for the engine: held after their end, or with a prompt that is taken over. Raises ApiError."""
        config = self._config
        if fields.room is not None:
            if config.role == "prefill":
                return [replace(each, max_tokens=1, min_tokens=0) for each in requests]
            tokens, cached = await self._fetch(
                _room_url(fields.room), "KVTransferError: the prefiller has not computed the prompt.", ROOM_S
            )
            return [self._taken(each, tokens, cached) for each in requests]
        if fields.asks_prefill:
            return [replace(each, keep_s=max(each.keep_s, config.lease_s)) for each in requests]
        remote = fields.remote
        if remote.get("do_remote_prefill") is not True:
            return requests
        if not all(remote.get(name) for name in _NEEDED):
            raise ApiError(500, "Internal server error")  # vLLM's scheduler fails an assertion
        url = f"http://{remote['remote_host']}:{remote['remote_port']}/kv_transfer/{remote['remote_engine_id']}"
        tokens, _ = await self._fetch(f"{url}/{remote['remote_request_id']}", "Internal server error", config.lease_s)
        told = remote.get("remote_prefill_cached_tokens")
        return [self._taken(each, tokens, told if isinstance(told, int) else None) for each in requests]

    def _taken(self, request: EngineRequest, tokens: int, cached: int | None) -> EngineRequest:
        return replace(request, taken_over=tokens, taken_cached=cached, transfer_s=tokens * self._config.token_s)

    @contextlib.asynccontextmanager
    async def computing(self, fields: TransferFields) -> AsyncIterator[Computed]:
        """While a prompt is computed for another replica: call the result when it is. Else the room fails."""
        room = None
        if fields.room is not None and self._config.role == "prefill":
            room = self._room(fields.room[2])

        def computed(tokens: int, cached: int) -> None:
            if room is not None and not room.done():
                room.set_result((tokens, cached))

        try:
            yield computed
        finally:
            if room is not None and not room.done():
                room.cancel()

    def answered(self, fields: TransferFields, http: web.Request, name: str, body: bytes, tokens: int, cached: int) -> bytes:
        """The body of a prefiller's answer, with the parameters for the decoder."""
        if not fields.asks_prefill:
            return body
        host, port = _address(http)
        request = f"{name}-{secrets.token_hex(4)}"
        self._bound(self._held)
        self._held[request] = tokens, asyncio.get_running_loop().time() + self._config.lease_s
        blocks = min(-(-tokens // self._block_size), BLOCK_IDS)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(blocks))],
            "remote_engine_id": self._engine_id,
            "remote_request_id": request,
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": cached,
        }
        return body[:-1] + b',"kv_transfer_params":' + orjson.dumps(params) + b"}"

    # -- the side channel

    async def _take(self, http: web.Request) -> web.Response:
        """The first reader frees the prompt."""
        held = self._held.pop(http.match_info["request"], None)
        if held is None or http.match_info["engine"] != self._engine_id or held[1] < asyncio.get_running_loop().time():
            raise ApiError(404, "This prompt is not held.")
        return web.json_response({"tokens": held[0], "cached": 0})

    async def _wait(self, http: web.Request) -> web.Response:
        room = self._room(int(http.match_info["room"]))
        try:
            tokens, cached = await asyncio.wait_for(asyncio.shield(room), ROOM_S)
        except (TimeoutError, asyncio.CancelledError):
            if room.cancelled():
                raise ApiError(404, "This prompt was not computed.") from None
            raise
        finally:
            if room.done():
                self._rooms.pop(int(http.match_info["room"]), None)
        return web.json_response({"tokens": tokens, "cached": cached})

    def _room(self, number: int) -> asyncio.Future[tuple[int, int]]:
        room = self._rooms.get(number)
        if room is None:
            self._bound(self._rooms)
            room = self._rooms[number] = asyncio.get_running_loop().create_future()
        return room

    def _bound(self, kept: dict[Any, Any]) -> None:
        if len(kept) >= MAX_HELD:
            oldest = kept.pop(next(iter(kept)))
            if isinstance(oldest, asyncio.Future):
                oldest.cancel()

    async def _fetch(self, url: str, error: str, within_s: float) -> tuple[int, int]:
        """The tokens of a prompt that a prefiller has computed, and how many it had cached. Raises ApiError 500."""
        if self._session is None:
            self._session = aiohttp.ClientSession()
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=within_s)) as answer:
                answer.raise_for_status()
                body = await answer.json()
                return int(body["tokens"]), int(body["cached"])
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as failed:
            raise ApiError(500, error) from failed


def _room_url(room: tuple[str, int, int]) -> str:
    host, port, number = room
    return f"http://{host}:{port}/kv_rooms/{number}"


def _address(http: web.Request) -> tuple[str, int]:
    """The address at which this connection has reached the replica."""
    transport = http.transport
    name = transport.get_extra_info("sockname") if transport is not None else None
    host, port = (name[0], name[1]) if isinstance(name, tuple) else ("127.0.0.1", 0)
    return (f"[{host}]" if ":" in host else host), port
