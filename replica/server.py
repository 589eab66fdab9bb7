"""The HTTP server of a replica: OpenAI's API over an engine.

Theory of operation. A request is: parse the body (calls), book places in the line (places), make the engine's requests of it
(prepare), begin its choices (generation), and write what they give out (stream, or `_whole`). What can take long to prepare,
a large body or a grammar, is prepared in one other thread, in the order of coming: meanwhile streams go on, and small requests
go past. Places and choices are closed in one `finally` each; aiohttp cancels a handler whose client has left, so a
disconnect ends there too.
"""

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar

import orjson
from aiohttp import web

from replica import wire
from replica.calls import Call, Kind, parse, parse_detokenize, parse_tokenize
from replica.engine import Engine, Request
from replica.fields import ApiError
from replica.generation import Choices, Generation, Reading, Surroundings
from replica.metrics import Metrics
from replica.places import Booking, Places
from replica.prepare import check_tokens, choice, echoed, prepare, prompt_tokens
from replica.prompts import Prompt
from replica.stats import MINUTE_S, Stats
from replica.stream import Outlet, failed, stream
from replica.transcript import Placed

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
LONG_BODY = 16 * 1024  # bytes; one as long was tokenised in 10 ms
_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """`max_queue` is how many requests may wait for the engine; `coalesce_s` for how long text is gathered before it is sent,
    but for the first; a client that takes no bytes for `send_timeout_s` is left. `events` says where KV events are
    published, if they are."""

    max_body_bytes: int = 16 * 1024 * 1024
    max_queue: int = 1024
    coalesce_s: float = 0.0
    send_timeout_s: float = 60.0
    trust_templates: bool = False
    events: Mapping[str, object] = field(default_factory=dict)


def create_app(engine: Engine, model: str, config: ServerConfig | None = None) -> web.Application:
    """The application; it starts the engine and closes it."""
    config = config or ServerConfig()
    app = web.Application(middlewares=[_errors], client_max_size=config.max_body_bytes)
    server = Server(engine, model, config)
    app.add_routes(
        [
            web.post("/v1/chat/completions", server.chat),
            web.post("/v1/completions", server.completion),
            web.get("/v1/models", server.models),
            web.post("/tokenize", server.tokenize),
            web.post("/detokenize", server.detokenize),
            web.get("/health", server.health),
            web.get("/load", server.load),
            web.get("/stats", server.stats),
            web.get("/metrics", server.metrics),
            web.post("/reset_prefix_cache", server.reset_prefix_cache),
            web.get("/kv_event_sources", server.kv_event_sources),
        ]
    )

    async def engine_lifetime(_: web.Application) -> AsyncIterator[None]:
        await engine.start()
        yield
        server.close()
        await engine.close()

    app.cleanup_ctx.append(engine_lifetime)
    return app


class Server:
    """The handlers."""

    def __init__(self, engine: Engine, model: str, config: ServerConfig) -> None:
        self._engine, self._model, self._config = engine, model, config
        self._stats = Stats(time.monotonic())
        self._around = Surroundings(engine, Metrics(engine, model), self._stats, config.coalesce_s)
        self._started = int(time.time())
        self._places = Places(
            lambda: engine.load().waiting, config.max_queue, lambda: self._stats.rate("answers", MINUTE_S, _now())
        )
        self._aside = ThreadPoolExecutor(1, "prepare")
        self._generating = 0

    def close(self) -> None:
        self._aside.shutdown(wait=False, cancel_futures=True)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate("chat", request)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate("completion", request)

    async def models(self, _: web.Request) -> web.Response:
        model = {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "warmroute",
            "root": self._model,
            "parent": None,
            "max_model_len": self._engine.info.context,
        }
        return _json({"object": "list", "data": [model]})

    async def health(self, _: web.Request) -> web.Response:
        self._check_alive()
        return web.Response()

    async def metrics(self, _: web.Request) -> web.Response:
        kind = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._around.metrics.text(), headers=kind)

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        """As vLLM answers it: `success` is false, and nothing is forgotten, while requests run."""
        self._check_alive()
        return _json({"success": await self._engine.reset_prefix_cache()})

    async def kv_event_sources(self, _: web.Request) -> web.Response:
        """As vLLM answers it: where each data-parallel rank publishes its KV events; we are rank 0."""
        return _json({"0": dict(self._config.events)} if self._config.events else {})

    def _check_alive(self) -> None:
        reason = self._engine.failure()
        if reason is not None:
            raise ApiError(503, f"The engine has stopped: {reason}. Restart this replica.", code="engine_dead")

    async def tokenize(self, http: web.Request) -> web.Response:
        raw = await http.read()
        prompt, strings = parse_tokenize(raw, self._model)
        self._check_template(prompt)
        tokens = await self._off(len(raw) > LONG_BODY, lambda: prompt_tokens(self._engine, prompt))
        spelled = self._engine.token_strings(tokens) if strings else None
        context = self._engine.info.context
        return _json({"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": spelled})

    async def detokenize(self, http: web.Request) -> web.Response:
        tokens = parse_detokenize(await http.read(), self._model)
        check_tokens(self._engine, tokens, "tokens")
        return _json({"prompt": self._engine.decode(tokens, special=True)})

    async def load(self, _: web.Request) -> web.Response:
        """As vLLM answers it: requests in the server at this moment."""
        return _json({"server_load": self._generating})

    async def stats(self, _: web.Request) -> web.Response:
        load, cache = self._engine.load(), self._engine.cache_counts()
        blocks = {"held": cache.held, "idle": cache.idle, "free": cache.free, "total": self._engine.info.num_blocks}
        now = {"batch": load.running, "queue": load.waiting, "max_queue": self._config.max_queue}
        return _json({**now, "cache": {"usage": load.kv_usage, "blocks": blocks}, **self._stats.body(_now())})

    async def _generate(self, kind: Kind, http: web.Request) -> web.StreamResponse:
        began = _now()
        self._check_alive()
        self._places.check()
        raw = await http.read()
        call = parse(kind, raw, self._model)
        self._check_alive()
        for prompt in call.prompts:
            self._check_template(prompt)
        booking = self._places.book(len(call.prompts) * call.n)
        self._generating += 1
        try:
            tokenising = _now()
            long = len(raw) > LONG_BODY or call.sampling.grammar is not None
            requests, dropped = await self._off(long, lambda: prepare(self._engine, call))
            self._stats.phase("tokenise", _now() - tokenising, _now())
            self._check_alive()
            return await self._answer(_Exchange(http, call, requests, dropped, booking, began))
        finally:
            self._generating -= 1
            booking.close()

    async def _off(self, long: bool, work: Callable[[], T]) -> T:
        """Do it, beside the event loop where it can take long."""
        return await asyncio.get_running_loop().run_in_executor(self._aside, work) if long else work()

    async def _answer(self, exchange: "_Exchange") -> web.StreamResponse:
        call, headers = exchange.call, _headers(exchange, self._engine.info.scores)
        answer = self._frame(exchange)
        choices = Choices(lambda index: self._begin(exchange, index), len(call.prompts), call.n)
        outlet = Outlet(exchange.http, headers, self._stats, self._config.send_timeout_s)
        try:
            if call.telling.stream:
                return await stream(choices, answer, outlet, call.telling.usage)
            return await _whole(choices, answer, headers)
        except ConnectionError:
            raise
        except Exception:
            choices.fail()
            raise
        finally:
            choices.close()
            outlet.close()

    def _begin(self, exchange: "_Exchange", index: int) -> Generation:
        call, (prompt, nth) = exchange.call, divmod(index, exchange.call.n)
        echo = echoed(self._engine, call.prompts[prompt]) if call.telling.echo else ""
        reading = Reading(call.stops, call.telling.special, echo)
        exchange.booking.begun()
        return Generation(self._around, choice(exchange.requests[prompt], nth), reading, exchange.began)

    def _frame(self, exchange: "_Exchange") -> wire.Answer:
        kind, asked_id = exchange.call.kind, exchange.http.headers.get("X-Request-Id", "")
        name = asked_id if _SAFE_ID.fullmatch(asked_id) else secrets.token_hex(8)
        return wire.Answer(
            kind,
            f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{name}",
            self._model,
            int(time.time()),
            spell=lambda token: self._engine.decode([token], special=True),
            scored=exchange.call.sampling.logprobs is not None,
            dropped=exchange.dropped,
            prompt_ids=(lambda index: exchange.requests[index // exchange.call.n].prompt)
            if exchange.call.telling.token_ids
            else None,
        )

    def _check_template(self, prompt: Prompt) -> None:
        if prompt.template.text is not None and not self._config.trust_templates:
            message = (
                "chat_template is only taken from requests when this replica is started with --trust-request-chat-template."
            )
            raise ApiError(400, message, "chat_template")


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request of a client, prepared: the engine's requests, one a prompt. `began` is when it came."""

    http: web.Request
    call: Call
    requests: Items[Request]
    dropped: int
    booking: Booking
    began: float


def _headers(exchange: _Exchange, scores: bool) -> dict[str, str]:
    ignored = (*exchange.call.ignored, *(() if scores else exchange.call.scored))
    headers = {"x-warmroute-ignored": ",".join(ignored)} if ignored else {}
    return headers | ({"x-warmroute-dropped-messages": str(exchange.dropped)} if exchange.dropped else {})


async def _whole(choices: Choices, answer: wire.Answer, headers: dict[str, str]) -> web.Response:
    texts: list[list[str]] = [[] for _ in range(choices.count)]
    tokens: list[list[int]] = [[] for _ in range(choices.count)]
    scores: list[list[Placed]] = [[] for _ in range(choices.count)]
    ends = [wire.Piece("")] * choices.count
    async with aclosing(choices.pieces()) as pieces:
        async for index, piece in pieces:
            texts[index].append(piece.text)
            tokens[index] += piece.tokens
            scores[index] += piece.scores
            ends[index] = piece
    whole = [
        replace(end, text="".join(text), tokens=ids, scores=score)
        for end, text, ids, score in zip(ends, texts, tokens, scores, strict=True)
    ]
    return web.Response(body=answer.whole(whole, choices.usage()), content_type="application/json", headers=headers)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The one border where errors become answers."""
    try:
        return await handler(request)
    except ApiError as error:
        return _refused(error)
    except web.HTTPRequestEntityTooLarge:
        text = f"A body may have {request.client_max_size:,} bytes at most. Send a smaller body."
        return _refused(ApiError(413, text, code="request_too_large"))
    except web.HTTPNotFound:
        served = "/v1/chat/completions, /v1/completions, /v1/models"
        return _refused(ApiError(404, f"Unknown path {request.path}: this replica serves {served}."))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return _refused(ApiError(405, f"{request.method} is not allowed here: use {allowed}."))
    except (web.HTTPException, ConnectionError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the client hears of it in its API's shape
        return _refused(failed(error))


def _refused(error: ApiError) -> web.Response:
    response = _json(error.body(), error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


def _json(body: Mapping[str, object], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _now() -> float:
    return asyncio.get_running_loop().time()
