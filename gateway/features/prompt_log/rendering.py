"""The text and the tokens of a chat request, as a replica's own template and tokenizer make them.

chat ── vLLM, ours: /tokenize ──► tokens ── /detokenize ──► text
     └─ llama.cpp: /apply-template ──► text ── /tokenize ──► tokens

If a replica fails, the next one is asked, REPLICAS at most. An answer has a bound that follows from the request, is charged
while it is read, and is parsed as bodies are: a large one in the parser process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any, Final

import orjson

from gateway.admission.memory import MemoryLease, parsing
from gateway.errors import GatewayError, ReplicaFailure
from gateway.features.prompt_log.bases import log_error
from gateway.features.prompt_log.render_job import text_member, token_ids
from gateway.fleet.state import ReplicaState
from gateway.parser.parsing import Parsing
from gateway.upstream.client import ReplicaCall, UpstreamClient

TOKENS_OPERATION: Final = "prompt_log.token_ids"
TEXT_OPERATION: Final = "prompt_log.text_member"
REPLICAS: Final = 3  # asked for one rendering
RENDER_S: Final = 20.0  # for all calls of a replica
TOKEN_BYTES: Final = 12  # of an id in JSON; a token has a byte of the prompt at least
ANSWER_BYTES: Final = 1 << 20  # of an answer beside its ids or its text
_TOKENIZE, _DETOKENIZE, _APPLY_TEMPLATE = "/tokenize", "/detokenize", "/apply-template"
_LINES: Final = b"Content-Type: application/json\r\nAccept-Encoding: identity\r\n"
_BY_TEMPLATE: Final = "llamacpp"
_ENGINES: Final = ("vllm", "warmroute", _BY_TEMPLATE)
UNSUPPORTED: Final = 501
TOO_LARGE: Final = 413  # for the parser process
_ABSENT: Final = (404, 405, UNSUPPORTED)


class Renderer:
    """Asks replicas. render_s: for all calls of one of them."""

    def __init__(self, upstream: UpstreamClient, parse: Parsing) -> None:
        self._upstream = upstream
        self._parsing = parse
        self.render_s = RENDER_S

    async def render(self, replicas: Iterable[ReplicaState], model: str, chat: bytes, lease: MemoryLease) -> dict[str, Any]:
        """{text, tokens, count, engine}, the first two as JSON. Raises GatewayError: 501 if no replica can do it, 502 if all
        capable replicas have failed.
        """
        text = "No replica of this model can show its prompts: vLLM, warmroute replica and llama.cpp can."
        failed = log_error(UNSUPPORTED, "render_unsupported", text, "model")
        for replica in islice((each for each in replicas if each.engine.name in _ENGINES), REPLICAS):
            asked = _Question(self._upstream, self._parsing, replica, chat, lease)
            by_template = replica.engine.name == _BY_TEMPLATE
            try:
                async with asyncio.timeout(self.render_s):
                    found = await (asked.by_template() if by_template else asked.by_chat(model))
                return {**found, "engine": replica.engine.name}
            except _UnusableAnswer as error:
                failed = error.answer if failed.status == UNSUPPORTED else failed
            except ReplicaFailure as failure:
                failed = _failed(str(failure))
            except TimeoutError:
                failed = _failed(f"It took longer than {self.render_s:g} s.")
        raise failed


class _UnusableAnswer(Exception):
    """A replica's answer is of no use. answer: the error for the client, if no other replica can be asked."""

    def __init__(self, answer: GatewayError) -> None:
        super().__init__(str(answer))
        self.answer = answer


class _Question:
    """The calls of one replica for one prompt. All raise GatewayError, _UnusableAnswer and ReplicaFailure."""

    def __init__(
        self, upstream: UpstreamClient, parse: Parsing, replica: ReplicaState, chat: bytes, lease: MemoryLease
    ) -> None:
        self._upstream = upstream
        self._parsing = parse
        self._replica = replica
        self._chat = chat
        self._lease = lease

    async def by_chat(self, model: str) -> dict[str, Any]:
        """vLLM and ours: the tokens of messages, and their text."""
        ids, count = await self._tokens(self._chat)
        text = await self._text(_DETOKENIZE, b'{"model":%b,"tokens":%b}' % (orjson.dumps(model), ids))
        return _rendered(text, ids, count)

    async def by_template(self) -> dict[str, Any]:
        """llama.cpp: the text of messages, and its tokens, as the server itself makes them of a chat request."""
        text = await self._text(_APPLY_TEMPLATE, self._chat)
        ids, count = await self._tokens(b'{"content":%b,"add_special":true,"parse_special":true}' % text)
        return _rendered(text, ids, count)

    async def _tokens(self, body: bytes) -> tuple[bytes, int]:
        """The ids of tokens as a JSON list, and their number."""
        found: tuple[bytes, int] = await self._answer(_TOKENIZE, body, token_ids, (TOKENS_OPERATION,))
        if not found[0]:
            raise _UnusableAnswer(_failed(f"its answer to {_TOKENIZE} has no list 'tokens'"))
        return bytes(found[0]), found[1]

    async def _text(self, path: str, body: bytes) -> bytes:
        """A text, as JSON."""
        (found,) = await self._answer(path, body, text_member, (TEXT_OPERATION,))
        if not found:
            raise _UnusableAnswer(_failed(f"its answer to {path} has no text 'prompt'"))
        return bytes(found)

    async def _answer(self, path: str, body: bytes, work: Callable[[bytes], Any], operation: tuple[str]) -> Any:
        """The result of a function of `render_job.py` for the answer at a path. Its bytes stay charged, the answer's do not."""
        held, most = 0, ANSWER_BYTES + TOKEN_BYTES * len(self._chat)

        def charge(size: int) -> None:
            nonlocal held
            self._lease.charge(size)
            held += size

        answer = await self._upstream.open(self._replica.url, ReplicaCall("POST", path, _LINES, body), RENDER_S)
        try:
            if answer.status in _ABSENT:
                text = f"A replica of this model has no {path}."
                raise _UnusableAnswer(log_error(UNSUPPORTED, "render_unsupported", text, "model"))
            if answer.status != 200:
                raise _UnusableAnswer(_failed(f"POST {path} answers {answer.status}"))
            raw = await answer.read_begin(most, charge)
            if len(raw) > most:
                raise _UnusableAnswer(_failed(f"its answer to {path} has more than {most:,} bytes"))
            found = await self._parsed(raw, work, operation)
            self._lease.charge(2 * len(found[0]))  # beside it, in the answer
            return found
        finally:
            answer.close()
            self._lease.shrink(held)

    async def _parsed(self, raw: bytes, work: Callable[[bytes], Any], operation: tuple[str]) -> Any:
        client = self._lease.account.client
        if self._parsing.is_quick(raw, client):
            return await self._parsing.turns.take(partial(work, raw), client)
        with parsing(self._lease, len(raw)):
            try:
                return await self._parsing.process.run(operation, raw, client)
            except GatewayError as error:
                if error.status == TOO_LARGE:
                    raise _UnusableAnswer(_failed("its answer is too large")) from None
                raise


def _rendered(text: bytes, ids: bytes, count: int) -> dict[str, Any]:
    return {"text": orjson.Fragment(text), "tokens": orjson.Fragment(ids), "count": count}


def _failed(reason: str) -> GatewayError:
    public = "A replica could not show the prompt."
    return GatewayError(502, "render_failed", f"{public} {reason}", param="model", public=public, members={})
