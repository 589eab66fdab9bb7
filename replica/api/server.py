"""The HTTP server of a replica: the APIs of OpenAI and Anthropic over an engine.

Theory of operation. The phases of a generation: read and parse the body (bodies; completions, messages, responses), reserve
room in the queue (admission), make the engine's requests (prepare), begin the choices (output/generation), write their text
(stream, or `_whole`) with the API's encoder. Work that can take long (parsing or preparing a large body, compiling a grammar,
writing a long answer) is done in other threads: meanwhile streams continue, and small requests overtake. The body's share of
memory, the reservation and the choices are closed in one block each; aiohttp cancels a handler whose client has left, so a
disconnect ends there too.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

import orjson
from aiohttp import web

from replica.api.admission import AdmissionQueue, AdmissionReservation, BodyBudget
from replica.api.bodies import LONG_BODY, BodyReader, Preparers
from replica.api.completions.requests import parse, parse_detokenize, parse_tokenize
from replica.api.errors import api_headers, errors, name_of
from replica.api.generation import AnswerContext, Encoder, GenerationRequest
from replica.api.messages.requests import parse_count as parse_messages_count
from replica.api.messages.requests import parse_messages
from replica.api.metrics import MetricsRecorder, ReplicaMetrics
from replica.api.prepare import PreparedRequest, check_tokens, prepare, prompt_tokens, with_seed
from replica.api.prompts import RequestPrompt
from replica.api.ranks import HEADER, Ranks
from replica.api.responses.requests import no_such_response, parse_responses
from replica.api.responses.requests import parse_count as parse_responses_count
from replica.api.stats import MINUTE_S, Stats
from replica.api.stream import ClientStream, sending, stream
from replica.api.transfer import Computed, KvTransfers, TransferConfig
from replica.api.validation import ApiError, check_model
from replica.engine import Engine, counted
from replica.output.generation import Choices, Delta, Generation, TextOptions
from replica.output.transcript import PlacedScore

BODIES_TOGETHER = 16  # the memory for the bodies of all current requests, in bodies of the largest size
LONG_ANSWER = 1 << 16  # characters and token ids; a longer answer is written in a thread, as others would wait too long
DECODED = 1024  # tokens that are decoded in one call
SCORE = 128  # characters: the scores of a token, with up to twenty alternatives, take as long to write


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """`max_queue`: the largest number of requests that wait for the engine. `coalesce_s`: how long a stream's text is collected
    before it is sent, except for the first. A client that takes nothing of a stream for `send_timeout_s`, or not all of another
    answer, is disconnected; a request whose body has not arrived within `body_timeout_s` is refused. `events`: the endpoints of
    the KV events of each rank, empty without KV events. `transfers`: of a replica that computes prompts for others, or takes
    them over.
    """

    max_body_bytes: int = 16 * 1024 * 1024
    max_queue: int = 1024
    coalesce_s: float = 0.0
    send_timeout_s: float = 60.0
    body_timeout_s: float = 60.0
    trust_templates: bool = False
    events: Sequence[Mapping[str, object]] = ()
    transfers: TransferConfig | None = None


def create_app(
    engine: Engine, model: str, config: ServerConfig | None = None, others: Sequence[Engine] = ()
) -> web.Application:
    """The application; it starts and closes the engine. `others`: the engines of further data-parallel ranks."""
    config, ranks = config or ServerConfig(), Ranks((engine, *others))
    server = Server(ranks, model, config)
    middlewares = [sending(config.send_timeout_s, server.budget), errors]
    app = web.Application(middlewares=middlewares, client_max_size=config.max_body_bytes)
    app.add_routes(
        [
            web.post("/v1/chat/completions", server.chat),
            web.post("/v1/completions", server.completion),
            web.post("/v1/messages", server.messages),
            web.post("/v1/messages/count_tokens", server.count_messages),
            web.post("/v1/responses", server.responses),
            web.post("/v1/responses/input_tokens", server.count_responses),
            web.route("*", "/v1/responses/{id:resp_[^/]*}{rest:.*}", server.stored_response),
            web.get("/v1/models", server.models),
            web.get("/v1/models/{name:.+}", server.model),
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

    if server.transfers is not None:
        app.add_routes(server.transfers.routes)

    async def engine_lifetime(_: web.Application) -> AsyncIterator[None]:
        await ranks.start()
        yield
        server.close()
        if server.transfers is not None:
            await server.transfers.close()
        await ranks.close()

    app.cleanup_ctx.append(engine_lifetime)
    return app


class Server:
    """The handlers of all endpoints."""

    def __init__(self, ranks: Ranks, model: str, config: ServerConfig) -> None:
        self._ranks, self._engine, self._model, self._config = ranks, ranks.engines[0], model, config
        self._stats = Stats(time.monotonic())
        self._metrics = ReplicaMetrics(ranks.engines, model)
        self._recorders = [MetricsRecorder(rank, self._stats) for rank in self._metrics.ranks]
        self._started = int(time.time())
        self._queue = AdmissionQueue(lambda: ranks.waiting, config.max_queue, self._answers_per_second)
        self._preparers = Preparers()
        self.budget = BodyBudget(BODIES_TOGETHER * config.max_body_bytes, LONG_BODY, self._answers_per_second)
        self._bodies = BodyReader(self._preparers, self.budget, config.body_timeout_s)
        self._generating = 0
        self.transfers = KvTransfers(config.transfers, self._engine.info.block_size) if config.transfers else None

    def close(self) -> None:
        self._bodies.close()
        self._preparers.close()

    def _answers_per_second(self) -> float:
        return self._stats.rate("answers", MINUTE_S, _now())

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(partial(parse, "chat"), request)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(partial(parse, "completion"), request)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(parse_messages, request)

    async def count_messages(self, request: web.Request) -> web.Response:
        body = {"input_tokens": await self._count(parse_messages_count, request)}
        return _json(body, headers=api_headers(request))

    async def responses(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(parse_responses, request)

    async def count_responses(self, request: web.Request) -> web.Response:
        count = await self._count(parse_responses_count, request)
        return _json({"object": "response.input_tokens", "input_tokens": count})

    async def stored_response(self, request: web.Request) -> web.Response:
        """Always an error: a replica stores no responses; the gateway does."""
        raise no_such_response(request.match_info["id"])

    async def models(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._about_model()]})

    async def model(self, request: web.Request) -> web.Response:
        check_model({"model": request.match_info["name"]}, self._model)
        return _json(self._about_model())

    def _about_model(self) -> dict[str, object]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "warmroute",
            "root": self._model,
            "parent": None,
            "max_model_len": self._engine.info.context,
        }

    async def health(self, _: web.Request) -> web.Response:
        self._check_alive()
        return web.Response()

    async def metrics(self, _: web.Request) -> web.Response:
        kind = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._metrics.text(), headers=kind)

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        """As vLLM: `success` is false, and nothing is dropped, while requests run."""
        self._check_alive()
        return _json({"success": await self._ranks.reset_prefix_cache()})

    async def kv_event_sources(self, _: web.Request) -> web.Response:
        """As vLLM: the endpoints of the KV events of each data-parallel rank."""
        return _json({str(rank): dict(events) for rank, events in enumerate(self._config.events) if events})

    def _check_alive(self) -> None:
        reason = self._ranks.failure
        if reason is not None:
            raise ApiError(503, f"The engine has stopped: {reason}. Restart this replica.", code="engine_dead")

    async def tokenize(self, http: web.Request) -> web.Response:
        async with self._bodies.read(http, lambda raw: parse_tokenize(raw, self._model)) as body:
            return await self._preparers.run(body.long, partial(self._tokenized, *body.take()))

    def _tokenized(self, prompt: RequestPrompt, strings: bool) -> web.Response:
        self._check_templates([prompt])
        tokens = prompt_tokens(self._engine, prompt)
        spelled = self._engine.token_strings(tokens) if strings else None
        context = self._engine.info.context
        return _json({"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": spelled})

    async def detokenize(self, http: web.Request) -> web.Response:
        async with self._bodies.read(http, lambda raw: parse_detokenize(raw, self._model)) as body:
            return await self._preparers.run(body.long, partial(self._detokenized, body.take()))

    def _detokenized(self, tokens: list[int]) -> web.Response:
        """In parts, because a decoder may hold the interpreter's lock."""
        most = counted(self._engine.info.context)
        if len(tokens) > most:
            raise ApiError(400, f"tokens has {len(tokens):,} tokens; at most {most:,} are made a text at once.", "tokens")
        check_tokens(self._engine, tokens, "tokens")
        decoder = self._engine.detokenizer(special=True)
        parts = [decoder.push(tokens[at : at + DECODED]) for at in range(0, len(tokens), DECODED)]
        return _json({"prompt": "".join([*parts, decoder.finish()])})

    async def load(self, _: web.Request) -> web.Response:
        """As vLLM: the number of requests in the server now."""
        return _json({"server_load": self._generating})

    async def stats(self, _: web.Request) -> web.Response:
        engines = self._ranks.engines
        loads, caches = [engine.load() for engine in engines], [engine.cache_counts() for engine in engines]
        blocks = {state: sum(getattr(cache, state) for cache in caches) for state in ("held", "idle", "free")}
        blocks["total"] = sum(engine.info.num_blocks for engine in engines)
        running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
        now = {"batch": running, "queue": waiting, "max_queue": self._config.max_queue}
        usage = sum(load.kv_usage for load in loads) / len(loads)
        return _json({**now, "cache": {"usage": usage, "blocks": blocks}, **self._stats.body(_now())})

    async def _generate(self, read: Callable[[bytes, str], GenerationRequest], http: web.Request) -> web.StreamResponse:
        began = _now()
        self._check_alive()
        self._queue.check()
        named = http.headers.get(HEADER)
        if named is not None:
            self._ranks.choose(named)  # a rank that does not exist is refused before the body is read
        if self.transfers is not None:
            read = self.transfers.reading(read)
        async with self._bodies.read(http, lambda raw: read(raw, self._model)) as body:
            request = body.take()
            self._check_alive()
            self._check_templates(request.prompts)
            reservation = self._queue.reserve(len(request.prompts) * request.n, "n" if request.n > 1 else "prompt")
            self._generating += 1
            try:
                tokenising = _now()
                slow = body.long or request.sampling.grammar is not None or bool(request.bad_words)
                prepared = await self._preparers.run(slow, partial(prepare, self._engine, request))
                self._stats.phase("tokenise", _now() - tokenising, _now())
                request = request.prepared()
                if request.transfer is not None and self.transfers is not None:
                    requests = await self.transfers.begin(request.transfer, prepared.requests)
                    prepared = replace(prepared, requests=requests)
                body.dropped(prepared.size + request.repeated)
                self._check_alive()
                return await self._answer(_AdmittedRequest(http, request, prepared, reservation, began))
            finally:
                self._generating -= 1
                reservation.close()

    async def _count(self, read: Callable[[bytes, str], RequestPrompt], http: web.Request) -> int:
        """The tokens of the prompt in a body."""
        async with self._bodies.read(http, lambda raw: read(raw, self._model)) as body:
            return len(await self._preparers.run(body.long, partial(prompt_tokens, self._engine, body.take())))

    async def _answer(self, admitted: "_AdmittedRequest") -> web.StreamResponse:
        request, headers = admitted.request, _headers(admitted, self._engine.info.scores)
        encoder = request.encoder(self._context(admitted))
        choices = Choices(lambda index: self._begin(admitted, index), len(admitted.prepared.requests), request.n)
        client = ClientStream(admitted.http, headers, self._stats, self._config.send_timeout_s)
        try:
            if request.transfer is not None and self.transfers is not None:
                async with self.transfers.computing(request.transfer) as computed:
                    return await self._written(admitted, choices, encoder, client, computed)
            return await self._written(admitted, choices, encoder, client)
        except ConnectionError:
            raise
        except Exception:
            choices.fail()
            raise
        finally:
            choices.close()
            client.close()

    async def _written(
        self,
        admitted: "_AdmittedRequest",
        choices: Choices,
        encoder: Encoder,
        client: ClientStream,
        computed: Computed = lambda _tokens, _cached: None,
    ) -> web.StreamResponse:
        """The answer, written as a stream or as a whole. `computed`: called once there is a token."""
        request = admitted.request
        if request.output.stream:
            response = await stream(choices, encoder, client)
            usage = choices.usage()
            computed(usage.prompt_tokens, usage.cached_tokens or 0)
            return response
        answers = await _whole(choices, ids=request.output.token_ids)
        usage = choices.usage()
        computed(usage.prompt_tokens, usage.cached_tokens or 0)
        body = await self._preparers.run(_is_long(admitted, answers), lambda: encoder.whole(answers, usage))
        if request.transfer is not None and self.transfers is not None:
            cached = usage.cached_tokens or 0
            body = self.transfers.answered(
                request.transfer, admitted.http, name_of(admitted.http), body, usage.prompt_tokens, cached
            )
        return web.Response(body=body, content_type="application/json", headers=_headers(admitted, self._engine.info.scores))

    def _begin(self, admitted: "_AdmittedRequest", index: int) -> Generation:
        request, (prompt, nth) = admitted.request, divmod(index, admitted.request.n)
        echo = admitted.prepared.echoes[prompt] if request.output.echo else ""
        coalesce_s = self._config.coalesce_s if request.output.stream else 0.0
        options = TextOptions(request.stops, request.output.special, echo, coalesce_s)
        admitted.reservation.submitted()
        wanted = with_seed(admitted.prepared.requests[prompt], nth)
        rank = self._ranks.choose(admitted.http.headers.get(HEADER))
        return Generation(self._ranks.engines[rank], self._recorders[rank], wanted, options, admitted.began)

    def _context(self, admitted: "_AdmittedRequest") -> AnswerContext:
        prepared = admitted.prepared
        return AnswerContext(
            name_of(admitted.http),
            self._model,
            int(time.time()),
            [request.prompt for request in prepared.requests],
            spell=lambda token: self._engine.decode([token], special=True),
            block_size=self._engine.info.block_size,
            dropped=prepared.dropped,
            marks=prepared.marks,
        )

    def _check_templates(self, prompts: Sequence[RequestPrompt]) -> None:
        if not self._config.trust_templates and any(prompt.template.text is not None for prompt in prompts):
            message = (
                "chat_template is only taken from requests when this replica is started with --trust-request-chat-template."
            )
            raise ApiError(400, message, "chat_template")


@dataclass(frozen=True, slots=True)
class _AdmittedRequest:
    """One client's request, ready for the engine. `began` is when it arrived."""

    http: web.Request
    request: GenerationRequest
    prepared: PreparedRequest
    reservation: AdmissionReservation
    began: float


def _headers(admitted: _AdmittedRequest, scores: bool) -> dict[str, str]:
    ignored = (*admitted.request.ignored, *(() if scores else admitted.request.needs_scores))
    headers = api_headers(admitted.http)
    headers |= {"x-warmroute-ignored": ",".join(ignored)} if ignored else {}
    return headers | ({"x-warmroute-dropped-messages": str(admitted.prepared.dropped)} if admitted.prepared.dropped else {})


async def _whole(choices: Choices, *, ids: bool) -> list[Delta]:
    """The answers, each with its whole text and scores, and with its tokens if `ids`."""
    texts: list[list[str]] = [[] for _ in range(choices.count)]
    tokens: list[list[int]] = [[] for _ in range(choices.count)]
    scores: list[list[PlacedScore]] = [[] for _ in range(choices.count)]
    ends = [Delta("")] * choices.count
    async with aclosing(choices.deltas()) as deltas:
        async for together in deltas:
            for index, delta in together:
                texts[index].append(delta.text)
                if ids:
                    tokens[index] += delta.tokens
                scores[index] += delta.scores
                ends[index] = delta
    return [
        replace(end, text="".join(text), tokens=ids, scores=score)
        for end, text, ids, score in zip(ends, texts, tokens, scores, strict=True)
    ]


def _is_long(admitted: _AdmittedRequest, answers: Sequence[Delta]) -> bool:
    """Return whether the answers are so long that their body is written in a thread."""
    length = admitted.request.repeated + sum(len(answer.text) + SCORE * len(answer.scores) for answer in answers)
    if admitted.request.output.token_ids:
        prompts = sum(len(request.prompt) for request in admitted.prepared.requests)
        length += admitted.request.n * prompts + sum(len(answer.tokens) for answer in answers)
    return length > LONG_ANSWER


def _json(body: Mapping[str, object], headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json", headers=headers)


def _now() -> float:
    return asyncio.get_running_loop().time()
