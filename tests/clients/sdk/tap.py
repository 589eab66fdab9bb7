"""What the official clients are sent, byte for byte.

The clients build their answers without checking them, and skip what they do not know. So a tap stands between a client and its
socket: it hands on every byte, and keeps it. `Tapped.check` then validates all that has come, strictly (`grammar/`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
from anthropic import Anthropic, AsyncAnthropic
from anthropic import DefaultAsyncHttpxClient as AnthropicAsyncHttp
from anthropic import DefaultHttpxClient as AnthropicHttp
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI

from tests.clients.sdk.grammar.answers import check_answer


@dataclass(slots=True)
class Exchange:
    """One request, and what has come back."""

    path: str
    request: bytes
    status: int
    headers: httpx.Headers
    body: bytearray = field(default_factory=bytearray)


class _Stream(httpx.AsyncByteStream, httpx.SyncByteStream):
    """Hands an answer's pieces on."""

    def __init__(self, inner: Any, exchange: Exchange) -> None:
        self._inner, self._exchange = inner, exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._inner:
            self._exchange.body += piece
            yield piece

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._inner:
            self._exchange.body += piece
            yield piece

    async def aclose(self) -> None:
        await self._inner.aclose()

    def close(self) -> None:
        self._inner.close()


class _AsyncTap(httpx.AsyncHTTPTransport):
    def __init__(self, exchanges: list[Exchange]) -> None:
        super().__init__(verify=False)  # loading the certificates takes longer than most exchanges
        self._exchanges = exchanges

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await super().handle_async_request(request)
        return _tapped(request, answer, self._exchanges)


class _SyncTap(httpx.HTTPTransport):
    def __init__(self, exchanges: list[Exchange]) -> None:
        super().__init__(verify=False)  # loading the certificates takes longer than most exchanges
        self._exchanges = exchanges

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return _tapped(request, super().handle_request(request), self._exchanges)


def _tapped(request: httpx.Request, answer: httpx.Response, exchanges: list[Exchange]) -> httpx.Response:
    exchange = Exchange(request.url.path, request.content, answer.status_code, answer.headers)
    exchanges.append(exchange)
    answer.stream = _Stream(answer.stream, exchange)
    return answer


@dataclass(slots=True)
class Tapped:
    """The four official clients of one address. exchanges: all that they have asked, in order.

    foreign: the answers are an engine's own bytes, which may have fields that the SDKs do not know.
    """

    url: str
    retries: int = 0
    foreign: bool = False
    exchanges: list[Exchange] = field(default_factory=list)

    def openai(self, **options: Any) -> AsyncOpenAI:
        http = DefaultAsyncHttpxClient(transport=_AsyncTap(self.exchanges))
        given: dict[str, Any] = {"max_retries": self.retries, "api_key": "k", "http_client": http, **options}
        return AsyncOpenAI(base_url=self.url + "/v1", **given)

    def anthropic(self, **options: Any) -> AsyncAnthropic:
        http = AnthropicAsyncHttp(transport=_AsyncTap(self.exchanges))
        given: dict[str, Any] = {"max_retries": self.retries, "api_key": "k", "http_client": http, **options}
        return AsyncAnthropic(base_url=self.url, **given)

    def openai_sync(self) -> OpenAI:
        http = DefaultHttpxClient(transport=_SyncTap(self.exchanges))
        return OpenAI(base_url=self.url + "/v1", api_key="k", max_retries=self.retries, http_client=http)

    def anthropic_sync(self) -> Anthropic:
        http = AnthropicHttp(transport=_SyncTap(self.exchanges))
        return Anthropic(base_url=self.url, api_key="k", max_retries=self.retries, http_client=http)

    def check(self) -> list[Any]:
        """Every answer is what its API promises: its shape, and in streams the order and the sum of its events.

        Returns the values of the answers; None: an error, or a stream that ends with one.
        """
        assert self.exchanges, "nothing was asked"
        return [self._value(exchange) for exchange in self.exchanges]

    def _value(self, exchange: Exchange) -> Any:
        kind = exchange.headers.get("content-type", "").partition(";")[0]
        return check_answer(exchange.path, exchange.status, kind, bytes(exchange.body), exchange.request, foreign=self.foreign)
