"""The HTTP server of a replica: OpenAI's API over an engine.

Theory of operation. A generation is: parse the body (wire), make its prompt (engine), submit, then take steps from
the sequence until it ends. `Generation` owns one of them: it turns steps into text that may be sent and keeps the
metrics, and its `close`, in one `finally`, closes the sequence. aiohttp cancels a handler whose client has left, so a
disconnect ends there too. A streamed answer's headers go out with its first token, so whatever fails before that is a
plain error with its own status.
"""

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import orjson
from aiohttp import web

from replica import wire
from replica.engine import Engine, EngineError, Finish, PromptError, Request
from replica.metrics import Metrics
from replica.text import Detokenizer, StopStrings
from replica.wire import ApiError, Call

MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_ANSWER_TOKENS = 2048  # of a chat that names no max_tokens: engines set memory aside for the longest answer there can be
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def create_app(
    engine: Engine, model: str, max_body_bytes: int = MAX_BODY_BYTES, events: Mapping[str, object] | None = None
) -> web.Application:
    """The application; it starts the engine and closes it. `events` says where KV events are published, if they are."""
    app = web.Application(middlewares=[_errors], client_max_size=max_body_bytes)
    server = Server(engine, model, events or {})
    app.add_routes(
        [
            web.post("/v1/chat/completions", server.chat),
            web.post("/v1/completions", server.completion),
            web.get("/v1/models", server.models),
            web.get("/health", server.health),
            web.get("/metrics", server.metrics),
            web.post("/reset_prefix_cache", server.reset_prefix_cache),
            web.get("/kv_event_sources", server.kv_event_sources),
        ]
    )

    async def engine_lifetime(_: web.Application) -> AsyncIterator[None]:
        await engine.start()
        yield
        await engine.close()

    app.cleanup_ctx.append(engine_lifetime)
    return app


class Server:
    """The handlers."""

    def __init__(self, engine: Engine, model: str, events: Mapping[str, object]) -> None:
        self._engine, self._model, self._events = engine, model, events
        self._metrics = Metrics(engine, model)
        self._started = int(time.time())

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
        """As vLLM answers it: `success` is false, and nothing is forgotten, while requests run."""
        self._check_alive()
        return _json({"success": await self._engine.reset_prefix_cache()})

    async def kv_event_sources(self, _: web.Request) -> web.Response:
        """As vLLM answers it: where each data-parallel rank publishes its KV events; we are rank 0."""
        return _json({"0": dict(self._events)} if self._events else {})

    def _check_alive(self) -> None:
        reason = self._engine.failure()
        if reason is not None:
            raise ApiError(503, f"The engine has stopped: {reason}. Restart this replica.", code="engine_dead")

    async def _generate(self, kind: wire.Kind, http: web.Request) -> web.StreamResponse:
        began = asyncio.get_running_loop().time()
        call = wire.parse(kind, await http.read(), self._model)
        self._check_alive()
        asked_id = http.headers.get("X-Request-Id", "")
        name = asked_id if _SAFE_ID.fullmatch(asked_id) else secrets.token_hex(8)
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        answer = wire.Answer(kind, f"{prefix}-{name}", self._model, int(time.time()))
        headers = {"x-warmroute-ignored": ",".join(call.ignored)} if call.ignored else {}
        generation = Generation(self._engine, self._metrics, call, began)
        try:
            if call.stream:
                return await _stream(generation, call, answer, http, headers)
            return await _whole(generation, answer, headers)
        except EngineError as error:
            generation.reason = "error"
            raise ApiError(500, f"The engine could not finish this request: {error}.") from None
        finally:
            generation.close()


class Generation:
    """One answer in the making. `next` until it has a finish reason; `close` exactly once, in any case."""

    def __init__(self, engine: Engine, metrics: Metrics, call: Call, began: float) -> None:
        request = _request(engine, call)
        self._metrics, self._began = metrics, began
        self._detokenizer = Detokenizer(engine.decode)
        self._stops = StopStrings(call.stops)
        self._completion_tokens = 0
        self.reason = "abort"  # what it is unless something better happens
        self._sequence = engine.submit(request)

    async def next(self) -> tuple[str, Finish | None]:
        """The next text, perhaps empty, and the finish reason when it is the last."""
        step = await self._sequence.next()
        if self._completion_tokens == 0:
            cached = self._sequence.cached_tokens
            self._metrics.first_token(len(self._sequence.request.prompt), cached, self._elapsed())
        self._completion_tokens += len(step.tokens)
        self._metrics.generated(len(step.tokens))
        text = self._stops.push(self._detokenizer.push(step.tokens))
        finish = step.finish
        if finish is not None and not self._stops.hit:
            text += self._stops.push(self._detokenizer.finish())
        if self._stops.hit:
            finish = "stop"
        elif finish is not None:
            text += self._stops.finish()
        if finish is not None:
            self.reason = finish
        return text, finish

    def usage(self) -> wire.Usage:
        sequence = self._sequence
        return wire.Usage(len(sequence.request.prompt), self._completion_tokens, sequence.cached_tokens)

    def close(self) -> None:
        self._sequence.close()
        self._metrics.ended(self.reason, self._elapsed())

    def _elapsed(self) -> float:
        return asyncio.get_running_loop().time() - self._began


def _request(engine: Engine, call: Call) -> Request:
    """The engine's request for a call, checked against what the engine can take."""
    info = engine.info
    if call.messages is not None:
        try:
            prompt = engine.encode_chat(call.messages, call.tools, call.tail)
        except PromptError as error:
            raise ApiError(400, f"These messages do not fit the model's chat template: {error}.", "messages") from None
    elif call.text is not None:
        prompt = engine.encode(call.text)
    else:
        prompt = call.tokens or []
        if not all(0 <= token < info.vocab_size for token in prompt):
            raise ApiError(400, f"prompt has token ids outside 0 to {info.vocab_size - 1}.", "prompt")
    room = info.context - len(prompt)
    code = "context_length_exceeded"
    if room < 1:
        message = f"The prompt has {len(prompt)} tokens; at most {info.context - 1} leave room for an answer. Shorten it."
        raise ApiError(400, message, "messages" if call.kind == "chat" else "prompt", code)
    if call.max_tokens is not None and call.max_tokens > room:
        message = (
            f"{len(prompt)} prompt tokens and {call.max_tokens} for the answer are more than the {info.context} tokens of "
            f"this replica: ask for at most {room}, or shorten the prompt."
        )
        raise ApiError(400, message, "max_tokens", code)
    return Request(
        prompt=prompt,
        max_tokens=call.max_tokens or min(room, MAX_ANSWER_TOKENS),
        temperature=call.temperature,
        top_p=call.top_p,
        seed=call.seed,
        ignore_eos=call.ignore_eos,
        scope=call.scope,
        keep_s=call.keep_s,
    )


async def _whole(generation: Generation, answer: wire.Answer, headers: dict[str, str]) -> web.Response:
    parts, finish = [], None
    while finish is None:
        text, finish = await generation.next()
        parts.append(text)
    body = answer.whole("".join(parts), finish, generation.usage())
    return web.Response(body=body, content_type="application/json", headers=headers)


async def _stream(
    generation: Generation, call: Call, answer: wire.Answer, http: web.Request, headers: dict[str, str]
) -> web.StreamResponse:
    text, finish = await generation.next()
    headers |= {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(http)
    out = answer.head()
    try:
        while finish is None:
            if text:
                out += answer.piece(text, None)
            if out:
                await response.write(out)
            out = b""
            text, finish = await generation.next()
        out += answer.piece(text, finish)
        if call.include_usage:
            out += answer.usage(generation.usage())
    except EngineError as error:
        # The status is long gone: the stream says it, in the frame that OpenAI's clients raise on.
        generation.reason = "error"
        out += wire.error_event(ApiError(500, f"The engine could not finish this request: {error}."))
    await response.write(out + wire.DONE)
    await response.write_eof()
    return response


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The one border where errors become answers."""
    try:
        return await handler(request)
    except ApiError as error:
        return _json(error.body(), error.status)
    except web.HTTPRequestEntityTooLarge as error:
        failed = ApiError(413, f"{error.text}. Send a smaller body.", code="request_too_large")
    except web.HTTPNotFound:
        failed = ApiError(
            404, f"Unknown path {request.path}: this replica serves /v1/chat/completions, /v1/completions, /v1/models."
        )
    except web.HTTPMethodNotAllowed as error:
        failed = ApiError(405, f"{request.method} is not allowed here: use {', '.join(sorted(error.allowed_methods))}.")
    return _json(failed.body(), failed.status)


def _json(body: dict[str, object], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
