"""Logs as prompts of a model: an estimate of their tokens, and the exact text and tokens that the model sees.

log, frame ── whole body ──► the router: estimate                       GET /v1/logs/HEAD?model=M
                         └─► chat ── an engine's own template ──► text, tokens    GET /v1/logs/HEAD/render?model=M

Nothing is generated, and nothing is booked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import orjson

from gateway.core import Core
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.json_structure import exceeds, too_complex
from gateway.dialects.table import DIALECTS
from gateway.errors import GatewayError, ReplicaFailure, named_model
from gateway.features.prompt_log.bases import log_error
from gateway.features.prompt_log.header import invalid
from gateway.features.prompt_log.log_jobs import charge
from gateway.features.prompt_log.naming.forms import CHAT, MESSAGES, RESPONSES
from gateway.features.prompt_log.render_job import rendering_body
from gateway.fleet.directory import Target
from gateway.fleet.state import ReplicaState
from gateway.request.exchange import Exchange
from gateway.request.phases.scopes import prompt_of, scope_of
from gateway.upstream.client import ReplicaCall

OPERATION: Final = "prompt_log.rendering_body"
MAX_RENDERED: Final = 4 << 20  # bytes of a log
MAX_ANSWER: Final = 32 << 20  # bytes: the ids of the tokens
RENDER_S: Final = 30.0
AT_ONCE: Final = 4  # renderings of this process; they cost replicas CPU
NOT_FOUND: Final = 404
PATHS: Final[Mapping[str, str]] = {CHAT: "/v1/chat/completions", MESSAGES: "/v1/messages", RESPONSES: "/v1/responses"}
_TOKENIZE, _DETOKENIZE, _APPLY_TEMPLATE = "/tokenize", "/detokenize", "/apply-template"
_LINES: Final = b"Content-Type: application/json\r\nAccept-Encoding: identity\r\n"
_BY_TEMPLATE: Final = "llamacpp"
_ENGINES: Final = ("vllm", "warmroute", _BY_TEMPLATE)
_ABSENT: Final = (404, 405, 501)


class LogModels:
    """Asks the router and replicas about whole bodies (`body_of_log`)."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._places = asyncio.Semaphore(AT_ONCE)

    async def estimate(self, exchange: Exchange, body: bytes, form: str) -> dict[str, int]:
        """The prompt's tokens, and those believed to be cached at the replica that would get it. Raises GatewayError."""
        api, target = await self._target(exchange, body, form)
        target.require()
        client = exchange.request.lease.account.client
        prompt = prompt_of(self._core.live, api, exchange.caller, target.label, client)
        decision, _ = self._core.router.rank(prompt, target.replicas, self._core.clock())
        return {"prompt_tokens": decision.prompt_tokens, "cached_tokens": decision.best.matched_tokens}

    async def render(self, exchange: Exchange, body: bytes, form: str) -> dict[str, Any]:
        """{text, tokens, count, engine}. Raises GatewayError, 501 if no replica of the model can do it."""
        if len(body) > MAX_RENDERED:
            text = f"With its frame the log has {len(body):,} bytes; at most {MAX_RENDERED:,} are rendered."
            raise log_error(413, "history_too_large", text, "")
        api, target = await self._target(exchange, body, form)
        target.require()
        replica = next((each for each in target.replicas.values() if each.engine.name in _ENGINES), None)
        if replica is None:
            text = "No replica of this model can show its prompts: vLLM, warmroute replica and llama.cpp can."
            raise log_error(501, "render_unsupported", text, "model")
        charge(exchange.request.lease, 2 * len(body))
        chat = await self._chat(exchange, api, form)
        async with self._places:
            try:
                found = await (
                    self._by_template(replica, chat) if replica.engine.name == _BY_TEMPLATE else self._by_chat(replica, chat)
                )
            except ReplicaFailure as failure:
                raise _failed(str(failure)) from None
        return {**found, "engine": replica.engine.name}

    async def _target(self, exchange: Exchange, body: bytes, form: str) -> tuple[ApiRequest, Target]:
        """The request with this body, and its target, if the caller may use it. Raises GatewayError."""
        core, dialect, client = self._core, DIALECTS[PATHS[form]], exchange.request.lease.account.client
        api = await core.parsing.in_turn(dialect, body, core.live.aliases, client)
        if api is None:
            api = await core.parsing.parse(dialect, body, scope_of(core.live, exchange.caller), client, core.live.aliases)
        grant = exchange.caller.grant
        if grant is not None:
            grant.require_model(api.model)
        try:
            target = core.fleet.target(api.model, api.alias)
        except GatewayError as error:
            if grant is None or not (grant.models or grant.pools) or error.status != NOT_FOUND:
                raise
            text = f"{named_model(api.model, api.alias)} does not exist here."
            raise GatewayError(NOT_FOUND, error.code, text, param="model") from None
        if grant is not None:
            grant.require_pool(target.pool)
        return api, target

    async def _chat(self, exchange: Exchange, api: ApiRequest, form: str) -> bytes:
        """The body for an engine's endpoint. Raises GatewayError."""
        parsing, client = self._core.parsing, exchange.request.lease.account.client
        if parsing.is_quick(api.body, client):
            found = await parsing.turns.take(partial(rendering_body, api.body, form), client)
        else:
            found = await parsing.process.run((OPERATION, form), api.body, client)
        return bytes(found[0])

    async def _by_chat(self, replica: ReplicaState, chat: bytes) -> dict[str, Any]:
        """vLLM and ours: the tokens of messages, and their text."""
        tokens = _list(await self._asked(replica, _TOKENIZE, chat), "tokens")
        model = orjson.loads(chat)["model"]
        told = await self._asked(replica, _DETOKENIZE, orjson.dumps({"model": model, "tokens": tokens}))
        return {"text": _text(told, "prompt"), "tokens": tokens, "count": len(tokens)}

    async def _by_template(self, replica: ReplicaState, chat: bytes) -> dict[str, Any]:
        """llama.cpp: the text of messages, and its tokens, as the server itself makes them of a chat request."""
        text = _text(await self._asked(replica, _APPLY_TEMPLATE, chat), "prompt")
        wanted = {"content": text, "add_special": True, "parse_special": True}
        tokens = _list(await self._asked(replica, _TOKENIZE, orjson.dumps(wanted)), "tokens")
        return {"text": text, "tokens": tokens, "count": len(tokens)}

    async def _asked(self, replica: ReplicaState, path: str, body: bytes) -> dict[str, Any]:
        """The JSON object that a replica answers. Raises GatewayError and ReplicaFailure."""
        answer = await self._core.upstream.open(replica.url, ReplicaCall("POST", path, _LINES, body), RENDER_S)
        try:
            raw = await answer.read(MAX_ANSWER)
        finally:
            answer.close()
        if answer.status in _ABSENT:
            raise log_error(501, "render_unsupported", f"A replica of this model has no {path}.", "model")
        if answer.status != 200:
            raise _failed(f"POST {path} answers {answer.status}")
        if exceeds(raw, MAX_ANSWER):
            raise too_complex()
        try:
            found = orjson.loads(raw)
        except orjson.JSONDecodeError:
            found = None
        if not isinstance(found, dict):
            raise _failed(f"the answer to POST {path} is no object")
        return found


def model_of(asked: Mapping[str, str]) -> str:
    """The model that a query names. Raises GatewayError 400."""
    model = asked.get("model", "")
    if not model:
        raise invalid("'model' must name a model.", "model")
    return model


def _list(found: dict[str, Any], name: str) -> list[int]:
    value = found.get(name)
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise _failed(f"its answer has no list {name!r}")
    return value


def _text(found: dict[str, Any], name: str) -> str:
    value = found.get(name)
    if not isinstance(value, str):
        raise _failed(f"its answer has no text {name!r}")
    return value


def _failed(reason: str) -> GatewayError:
    public = "A replica could not show the prompt."
    return GatewayError(502, "render_failed", f"{public} {reason}", param="model", public=public, members={})
