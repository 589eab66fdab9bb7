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

from gateway.core import Core
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.table import DIALECTS
from gateway.errors import GatewayError, named_model
from gateway.features.prompt_log.bases import log_error
from gateway.features.prompt_log.header import invalid
from gateway.features.prompt_log.log_jobs import charge
from gateway.features.prompt_log.naming.forms import CHAT, MESSAGES, RESPONSES
from gateway.features.prompt_log.render_job import rendering_body
from gateway.features.prompt_log.rendering import Renderer
from gateway.fleet.directory import Target
from gateway.request.exchange import Exchange
from gateway.request.phases.scopes import prompt_of, scope_of

OPERATION: Final = "prompt_log.rendering_body"
MAX_RENDERED: Final = 4 << 20  # bytes of a log
AT_ONCE: Final = 4  # renderings of this process; they cost replicas CPU
NOT_FOUND: Final = 404
PATHS: Final[Mapping[str, str]] = {CHAT: "/v1/chat/completions", MESSAGES: "/v1/messages", RESPONSES: "/v1/responses"}


class LogModels:
    """Asks the router and replicas about whole bodies (`body_of_log`)."""

    def __init__(self, core: Core, renderer: Renderer) -> None:
        self._core = core
        self._renderer = renderer
        self._places = asyncio.Semaphore(AT_ONCE)

    async def estimate(self, exchange: Exchange, body: bytes, form: str) -> dict[str, int]:
        """The prompt's tokens, and those believed to be cached at the replica that would get it. Raises GatewayError."""
        api, target = await self._target(exchange, body, form)
        target.require()
        client = exchange.request.lease.account.client
        prompt = prompt_of(self._core.live, api, exchange.caller, target.label, client, target.adapter_of(api))
        decision, _ = self._core.router.rank(prompt, target.replicas, self._core.clock())
        return {"prompt_tokens": decision.prompt_tokens, "cached_tokens": decision.best.matched_tokens}

    async def render(self, exchange: Exchange, body: bytes, form: str) -> dict[str, Any]:
        """{text, tokens, count, engine}, the first two as JSON. Raises GatewayError, 501 if no replica can do it."""
        if len(body) > MAX_RENDERED:
            text = f"With its frame the log has {len(body):,} bytes; at most {MAX_RENDERED:,} are rendered."
            raise log_error(413, "history_too_large", text, "")
        api, target = await self._target(exchange, body, form)
        target.require()
        charge(exchange.request.lease, 2 * len(body))
        chat = await self._chat(exchange, api, form)
        async with self._places:
            return await self._renderer.render(target.replicas.values(), api.model, chat, exchange.request.lease)

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


def model_of(asked: Mapping[str, str]) -> str:
    """The model that a query names. Raises GatewayError 400."""
    model = asked.get("model", "")
    if not model:
        raise invalid("'model' must name a model.", "model")
    return model
