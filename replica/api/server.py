"""The HTTP server of a replica: OpenAI's API over an engine.

Theory of operation. The phases of a generation: parse the body (requests), reserve room in the queue (admission), make the
engine's requests (prepare), begin the choices (output/generation), write their text (stream, or `_whole`). What can take long
to prepare, a large body or a grammar, is prepared in one other thread, in order of arrival: meanwhile streams continue, and
small requests overtake. Reservation and choices are closed in one `finally` each; aiohttp cancels a handler whose client has
left, so a disconnect ends there too.
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

from replica.api.admission import AdmissionQueue, Reservation
from replica.api.metrics import Metrics, Recorder
from replica.api.prepare import check_tokens, echoed, prepare, prompt_tokens, with_seed
from replica.api.prompts import Prompt
from replica.api.requests import GenerationRequest, Kind, parse, parse_detokenize, parse_tokenize
from replica.api.responses import ResponseEncoder
from replica.api.stats import MINUTE_S, Stats
from replica.api.stream import ClientStream, client_error, stream
from replica.api.validation import ApiError
from replica.engine import Engine, Request
from replica.output.generation import Choices, Delta, Generation, TextOptions
from replica.output.transcript import PlacedScore

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
LONG_BODY = 16 * 1024  # bytes; tokenizing them takes about 10 ms
_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """`max_queue`: most requests waiting for the engine. `coalesce_s`: for how long text is collected before it is sent,
    except for the first. A client that takes no bytes for `send_timeout_s` is disconnected. `events`: where KV events are
    published, empty if they are not."""

    max_body_bytes: int = 16 * 1024 * 1024
    max_queue: int = 1024
    coalesce_s: float = 0.0
    send_timeout_s: float = 60.0
    trust_templates: bool = False
    events: Mapping[str, object] = field(default_factory=dict)


def create_app(engine: Engine, model: str, config: ServerConfig | None = None) -> web.Application:
    """The application; it starts and closes the engine."""
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
    """The handlers of all endpoints."""

    def __init__(self, engine: Engine, model: str, config: ServerConfig) -> None:
        self._engine, self._model, self._config = engine, model, config
        self._stats = Stats(time.monotonic())
        self._metrics = Metrics(engine, model)
        self._recorder = Recorder(self._metrics, self._stats)
        self._started = int(time.time())
        self._queue = AdmissionQueue(
            lambda: engine.load().waiting, config.max_queue, lambda: self._stats.rate("answers", MINUTE_S, _now())
        )
        self._prepare_thread = ThreadPoolExecutor(1, "prepare")
        self._generating = 0

    def close(self) -> None:
        self._prepare_thread.shutdown(wait=False, cancel_futures=True)

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
        return web.Response(body=self._metrics.text(), headers=kind)

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        """As vLLM: `success` is false, and nothing is dropped, while requests run."""
        self._check_alive()
        return _json({"success": await self._engine.reset_prefix_cache()})

    async def kv_event_sources(self, _: web.Request) -> web.Response:
        """As vLLM: where each data-parallel rank publishes its KV events; we are rank 0."""
        return _json({"0": dict(self._config.events)} if self._config.events else {})

    def _check_alive(self) -> None:
        reason = self._engine.failure()
        if reason is not None:
            raise ApiError(503, f"The engine has stopped: {reason}. Restart this replica.", code="engine_dead")

    async def tokenize(self, http: web.Request) -> web.Response:
        raw = await http.read()
        prompt, strings = parse_tokenize(raw, self._model)
        self._check_template(prompt)
        tokens = await self._run(len(raw) > LONG_BODY, lambda: prompt_tokens(self._engine, prompt))
        spelled = self._engine.token_strings(tokens) if strings else None
        context = self._engine.info.context
        return _json({"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": spelled})

    async def detokenize(self, http: web.Request) -> web.Response:
        tokens = parse_detokenize(await http.read(), self._model)
        check_tokens(self._engine, tokens, "tokens")
        return _json({"prompt": self._engine.decode(tokens, special=True)})

    async def load(self, _: web.Request) -> web.Response:
        """As vLLM: the number of requests in the server now."""
        return _json({"server_load": self._generating})

    async def stats(self, _: web.Request) -> web.Response:
        load, cache = self._engine.load(), self._engine.cache_counts()
        blocks = {"held": cache.held, "idle": cache.idle, "free": cache.free, "total": self._engine.info.num_blocks}
        now = {"batch": load.running, "queue": load.waiting, "max_queue": self._config.max_queue}
        return _json({**now, "cache": {"usage": load.kv_usage, "blocks": blocks}, **self._stats.body(_now())})

    async def _generate(self, kind: Kind, http: web.Request) -> web.StreamResponse:
        began = _now()
        self._check_alive()
        self._queue.check()
        raw = await http.read()
        request = parse(kind, raw, self._model)
        self._check_alive()
        for prompt in request.prompts:
            self._check_template(prompt)
        reservation = self._queue.reserve(len(request.prompts) * request.n)
        self._generating += 1
        try:
            tokenising = _now()
            slow = len(raw) > LONG_BODY or request.sampling.grammar is not None
            prepared, dropped = await self._run(slow, lambda: prepare(self._engine, request))
            self._stats.phase("tokenise", _now() - tokenising, _now())
            self._check_alive()
            return await self._answer(_Prepared(http, request, prepared, dropped, reservation, began))
        finally:
            self._generating -= 1
            reservation.close()

    async def _run(self, slow: bool, work: Callable[[], T]) -> T:
        """Here, or in the preparing thread if it can take long."""
        return await asyncio.get_running_loop().run_in_executor(self._prepare_thread, work) if slow else work()

    async def _answer(self, prepared: "_Prepared") -> web.StreamResponse:
        request, headers = prepared.request, _headers(prepared, self._engine.info.scores)
        encoder = self._encoder(prepared)
        choices = Choices(lambda index: self._begin(prepared, index), len(request.prompts), request.n)
        client = ClientStream(prepared.http, headers, self._stats, self._config.send_timeout_s)
        try:
            if request.output.stream:
                return await stream(choices, encoder, client, request.output.usage)
            return await _whole(choices, encoder, headers)
        except ConnectionError:
            raise
        except Exception:
            choices.fail()
            raise
        finally:
            choices.close()
            client.close()

    def _begin(self, prepared: "_Prepared", index: int) -> Generation:
        request, (prompt, nth) = prepared.request, divmod(index, prepared.request.n)
        echo = echoed(self._engine, request.prompts[prompt]) if request.output.echo else ""
        options = TextOptions(request.stops, request.output.special, echo, self._config.coalesce_s)
        prepared.reservation.submitted()
        return Generation(self._engine, self._recorder, with_seed(prepared.requests[prompt], nth), options, prepared.began)

    def _encoder(self, prepared: "_Prepared") -> ResponseEncoder:
        request, sent_id = prepared.request, prepared.http.headers.get("X-Request-Id", "")
        name = sent_id if _SAFE_ID.fullmatch(sent_id) else secrets.token_hex(8)
        return ResponseEncoder(
            request.kind,
            f"{'chatcmpl' if request.kind == 'chat' else 'cmpl'}-{name}",
            self._model,
            int(time.time()),
            spell=lambda token: self._engine.decode([token], special=True),
            scored=request.sampling.logprobs is not None,
            dropped=prepared.dropped,
            prompt_ids=(lambda index: prepared.requests[index // request.n].prompt) if request.output.token_ids else None,
        )

    def _check_template(self, prompt: Prompt) -> None:
        if prompt.template.text is not None and not self._config.trust_templates:
            message = (
                "chat_template is only taken from requests when this replica is started with --trust-request-chat-template."
            )
            raise ApiError(400, message, "chat_template")


@dataclass(frozen=True, slots=True)
class _Prepared:
    """One client's request, ready for the engine: `requests` has one per prompt. `began` is when it arrived."""

    http: web.Request
    request: GenerationRequest
    requests: Items[Request]
    dropped: int
    reservation: Reservation
    began: float


def _headers(prepared: _Prepared, scores: bool) -> dict[str, str]:
    ignored = (*prepared.request.ignored, *(() if scores else prepared.request.needs_scores))
    headers = {"x-warmroute-ignored": ",".join(ignored)} if ignored else {}
    return headers | ({"x-warmroute-dropped-messages": str(prepared.dropped)} if prepared.dropped else {})


async def _whole(choices: Choices, encoder: ResponseEncoder, headers: dict[str, str]) -> web.Response:
    texts: list[list[str]] = [[] for _ in range(choices.count)]
    tokens: list[list[int]] = [[] for _ in range(choices.count)]
    scores: list[list[PlacedScore]] = [[] for _ in range(choices.count)]
    ends = [Delta("")] * choices.count
    async with aclosing(choices.deltas()) as deltas:
        async for index, delta in deltas:
            texts[index].append(delta.text)
            tokens[index] += delta.tokens
            scores[index] += delta.scores
            ends[index] = delta
    whole = [
        replace(end, text="".join(text), tokens=ids, scores=score)
        for end, text, ids, score in zip(ends, texts, tokens, scores, strict=True)
    ]
    return web.Response(body=encoder.whole(whole, choices.usage()), content_type="application/json", headers=headers)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The only place where errors become responses."""
    try:
        return await handler(request)
    except ApiError as error:
        return _error_response(error)
    except web.HTTPRequestEntityTooLarge:
        text = f"A body may have {request.client_max_size:,} bytes at most. Send a smaller body."
        return _error_response(ApiError(413, text, code="request_too_large"))
    except web.HTTPNotFound:
        served = "/v1/chat/completions, /v1/completions, /v1/models"
        return _error_response(ApiError(404, f"Unknown path {request.path}: this replica serves {served}."))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return _error_response(ApiError(405, f"{request.method} is not allowed here: use {allowed}."))
    except (web.HTTPException, ConnectionError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the client gets it in the API's format
        return _error_response(client_error(error))


def _error_response(error: ApiError) -> web.Response:
    response = _json(error.body(), error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


def _json(body: Mapping[str, object], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _now() -> float:
    return asyncio.get_running_loop().time()
