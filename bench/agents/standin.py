"""Stand-in replicas: vLLM's HTTP API with a modelled engine behind it, for chat, Messages and Responses.

    python -m bench.agents.standin [--replicas 4] [--kv-tokens N] [--prefill-rate N] [--decode-rate N] [--engine vllm|llamacpp]

Prints the ports, one a line. `GET /bench/rows` of any of them: the prompts that all of them have computed. An answer has
--answer-tokens tokens of text (0, or where fewer are asked for: as many as those) and, where there are tools, a call of the
first. --keep: a replica keeps the responses that it gave (vLLM keeps none by default, and answers 404 to their ids). --engine
llamacpp: Claude Code's billing header stays in the prompt, usage of streamed messages is told as llama.cpp does, and
previous_response_id is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import uvloop
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from bench.agents import rendering
from bench.agents.answers import About, Call, Chat, Messages, Responses, Usage, Writer
from bench.agents.engine import BLOCK, Engine, LoopClock, Model, Prefilled
from bench.agents.rendering import BadRequest, Conversation, Turn
from bench.measure.mock import many_files

PIECE = 8  # tokens of a streamed event
KEPT = 10_000  # responses of a replica
MODEL = "m"
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
UNASKED = 16  # tokens of an answer that nothing limits
TAG, TAG_END = b"[turn ", b"]"
DIALECTS = {"/v1/chat/completions": Chat, "/v1/messages": Messages, "/v1/responses": Responses}


@dataclass(frozen=True, slots=True)
class Manner:
    """The behaviour of the stand-ins."""

    engine: str = "vllm"
    answer_tokens: int = 48
    keep: bool = False

    @property
    def verbatim(self) -> bool:
        return self.engine == "llamacpp"


class NotKept(Exception):
    """No such response; the argument is its id."""


@dataclass(slots=True)
class Request:
    """A parsed request."""

    path: str
    body: dict[str, Any]
    conversation: Conversation
    prompt: bytes

    @property
    def tag(self) -> str:
        """The last that the prompt has: which turn of which conversation it is."""
        return self.prompt.rpartition(TAG)[2].partition(TAG_END)[0].decode() if TAG in self.prompt else ""

    def answer(self, most: int) -> tuple[str, Call | None]:
        """Text and call; they follow from the prompt alone."""
        asked = [self.body[key] for key in LIMITS if self.body.get(key)]
        count = min([*asked, most] if most else asked or [UNASKED])
        digest = hashlib.blake2b(self.prompt, digest_size=16).hexdigest()
        text = "".join(f"{digest[at % 28 : at % 28 + 3]} " for at in range(count))
        tools = self.body.get("tools")
        if not tools or self.body.get("tool_choice") == "none":
            return text, None
        name = tools[0].get("name") or tools[0].get("function", {}).get("name") or "tool"
        return text, Call(f"call_{digest}", name, json.dumps({"command": f"ls {digest}"}))


@dataclass(slots=True)
class StandIn:
    """One replica."""

    engine: Engine
    manner: Manner
    fleet: Sequence[Engine]
    _given: int = 0
    _kept: OrderedDict[str, tuple[Turn, ...]] = field(default_factory=OrderedDict)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        for path in DIALECTS:
            app.router.add_post(path, self._generate)
        app.router.add_post("/v1/messages/count_tokens", self._count)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/bench/rows", self._rows)
        for path in ("/health", "/health_generate", "/ping"):
            app.router.add_get(path, self._health)
        for path in ("/get_model_info", "/model_info", "/get_server_info", "/server_info", "/version"):
            app.router.add_get(path, self._about)  # read by SGLang's and vLLM's routers to recognise the engine
        return app

    # -- generations

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        try:
            request = self._understand(http.path, await http.read())
        except NotKept as error:
            return _failure(http.path, 404, "invalid_request_error", f"Response with id '{error}' not found.")
        except (BadRequest, ValueError, AttributeError) as error:
            return _failure(http.path, 400, "BadRequestError", str(error))
        self._given += 1
        prefix = "resp" if http.path == "/v1/responses" else "chatcmpl"
        identity = f"{prefix}_{self.engine.number:x}{self._given:015x}"
        about = About(identity, request.body, int(time.time()), self.manner.verbatim)
        writer: Writer = DIALECTS[http.path](about)
        if request.body.get("stream"):
            return await self._stream(http, request, writer, identity)
        return await self._whole(request, writer, identity)

    async def _whole(self, request: Request, writer: Writer, identity: str) -> web.Response:
        async with self.engine.sequence(request.prompt, request.tag, request.path) as prefilled:
            text, call = request.answer(self.manner.answer_tokens)
            usage = _usage(prefilled, text)
            await self.engine.clock.until(prefilled.first + usage.output / self.engine.model.decode_rate)
            self._remember(request, identity, text, call, usage)
        return web.json_response(writer.whole(text, call, usage))

    async def _stream(self, http: web.Request, request: Request, writer: Writer, identity: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        if opening := b"".join(writer.opening()):
            await response.prepare(http)
            await response.write(opening)
        async with self.engine.sequence(request.prompt, request.tag, request.path) as prefilled:
            if not response.prepared:
                await response.prepare(http)
            text, call = request.answer(self.manner.answer_tokens)
            usage = _usage(prefilled, text)
            head = b"".join(writer.first(usage))
            size = PIECE * rendering.TOKEN_BYTES
            for number, at in enumerate(range(0, len(text), size)):
                await self.engine.clock.until(prefilled.first + number * PIECE / self.engine.model.decode_rate)
                await response.write(head + b"".join(writer.piece(text[at : at + size])))
                head = b""
            await self.engine.clock.until(prefilled.first + usage.output / self.engine.model.decode_rate)
            self._remember(request, identity, text, call, usage)
        await response.write(head + b"".join(writer.ending(text, call, usage)))
        await response.write_eof()
        return response

    def _understand(self, path: str, raw: bytes) -> Request:
        """Raises BadRequest, NotKept, ValueError for what is not JSON, AttributeError for what has another shape."""
        body = json.loads(raw)
        if path == "/v1/responses":
            conversation = rendering.responses(body, verbatim=self.manner.verbatim, before=self._before(body))
        elif path == "/v1/messages":
            conversation = rendering.messages(body, verbatim=self.manner.verbatim)
        else:
            conversation = rendering.chat(body)
        return Request(path, body, conversation, conversation.prompt())

    def _before(self, body: dict[str, Any]) -> tuple[Turn, ...]:
        identity = body.get("previous_response_id")
        if not identity:
            return ()
        if self.manner.engine == "llamacpp":
            raise BadRequest("'previous_response_id' is not supported.")
        if identity not in self._kept:
            raise NotKept(identity)
        return self._kept[identity]

    def _remember(self, request: Request, identity: str, text: str, call: Call | None, usage: Usage) -> None:
        turn = Turn("assistant", text, ((call.name, call.arguments),) if call else ())
        self.engine.end(request.conversation.answered(turn), usage.output)
        if self.manner.keep and request.path == "/v1/responses":
            turns = request.conversation.turns
            instructed = 1 if request.body.get("instructions") else 0  # they are not carried over
            self._kept[identity] = (*turns[instructed:], turn)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)

    # -- the rest

    async def _count(self, http: web.Request) -> web.Response:
        try:
            request = self._understand("/v1/messages", await http.read())
        except (BadRequest, ValueError, AttributeError) as error:
            return _failure("/v1/messages", 400, "BadRequestError", str(error))
        return web.json_response({"input_tokens": rendering.tokens(request.prompt)})

    async def _models(self, http: web.Request) -> web.Response:
        entry = {"id": MODEL, "object": "model", "created": 1, "owned_by": self.manner.engine, "max_model_len": 1_000_000}
        return web.json_response({"object": "list", "data": [entry]})

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response()

    async def _about(self, http: web.Request) -> web.Response:
        names = dict.fromkeys(("model_path", "served_model_name", "tokenizer_path"), MODEL)
        return web.json_response({**names, "is_generation": True, "version": "0.11.0"})

    async def _metrics(self, http: web.Request) -> web.Response:
        page = _llamacpp_page if self.manner.engine == "llamacpp" else _vllm_page
        return web.Response(text="\n".join(page(self.engine)) + "\n")

    async def _rows(self, http: web.Request) -> web.Response:
        return web.json_response([asdict(row) for engine in self.fleet for row in engine.rows])


def _usage(prefilled: Prefilled, text: str) -> Usage:
    return Usage(prefilled.prompt, prefilled.cached, prefilled.created, rendering.tokens(text.encode()))


def _failure(path: str, status: int, kind: str, message: str) -> web.Response:
    error = {"message": message, "type": kind}
    shape = {"type": "error", "error": error} if path == "/v1/messages" else {"error": {**error, "param": None, "code": status}}
    return web.json_response(shape, status=status)


def _vllm_page(engine: Engine) -> Iterable[str]:
    count, labels = engine.counters, f'engine="0",model_name="{MODEL}"'
    blocks = engine.model.kv_tokens // BLOCK
    values = {
        "num_requests_running": count.running,
        "num_requests_waiting": count.waiting,
        "kv_cache_usage_perc": len(engine.cache) / blocks,
        "prefix_cache_queries_total": count.prompt,
        "prefix_cache_hits_total": count.cached,
        "prompt_tokens_total": count.prompt,
        "generation_tokens_total": count.answered,
    }
    yield "process_start_time_seconds 1.7e+09"
    yield from (f"vllm:{name}{{{labels}}} {float(value)}" for name, value in values.items())
    yield f'vllm:cache_config_info{{block_size="{BLOCK}",enable_prefix_caching="True",num_gpu_blocks="{blocks}",{labels}}} 1.0'


def _llamacpp_page(engine: Engine) -> Iterable[str]:
    count = engine.counters
    yield f"llamacpp:prompt_tokens_total {count.prompt}"
    yield f"llamacpp:prompt_tokens_cached_total {count.cached}"
    yield f"llamacpp:requests_processing {count.running}"
    yield f"llamacpp:requests_deferred {count.waiting}"


def _is_of_interest(record: logging.LogRecord) -> bool:
    """sglang-router and its forks try HTTP/2 (for gRPC) first."""
    return not (record.exc_info and isinstance(record.exc_info[1], BadHttpMessage))


async def serve(replicas: int, model: Model, manner: Manner) -> None:
    """Until it is killed."""
    fleet = [Engine(number, model, LoopClock()) for number in range(replicas)]
    for engine in fleet:
        runner = web.AppRunner(StandIn(engine, manner, fleet).application(), access_log=None, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.agents.standin")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--kv-tokens", type=int, default=Model().kv_tokens)
    parser.add_argument("--prefill-rate", type=float, default=Model().prefill_rate)
    parser.add_argument("--decode-rate", type=float, default=Model().decode_rate)
    parser.add_argument("--engine", choices=["vllm", "llamacpp"], default="vllm")
    parser.add_argument("--answer-tokens", type=int, default=Manner().answer_tokens)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args(arguments)
    many_files()
    logging.getLogger("aiohttp.server").addFilter(_is_of_interest)
    model = Model(options.kv_tokens, options.prefill_rate, options.decode_rate)
    uvloop.run(serve(options.replicas, model, Manner(options.engine, options.answer_tokens, options.keep)))


if __name__ == "__main__":
    main()
