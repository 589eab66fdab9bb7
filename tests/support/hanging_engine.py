"""An engine that can hang: it goes on answering its probes and its page of metrics, and generates nothing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from tests.support.fakes import (
    STREAM_HEAD,
    Behaviour,
    FakeReplica,
    FakeRequest,
    answers,
    chunk,
    event,
    models,
    status,
    streams,
    writes,
)

OPENING = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
)
PING = b": keep-alive\n\n"
PING_S = 0.02


class HangingEngine(FakeReplica):
    """A fake vLLM. works: cleared, it hangs. stuck: requests that never get a token, though it works. opens: it begins streams
    with a role and keep-alives, before a token. counts: it has metrics of its progress. computed: its tokens so far.
    """

    def __init__(
        self, *, counts: bool = True, opens: bool = False, stuck: Callable[[FakeRequest], bool] = lambda _: False
    ) -> None:
        pages = {"/metrics": self._page if counts else status(404, "no")}
        super().__init__([self._generate], listing=models("m", owner="vllm" if counts else "someone"), pages=pages)
        self.works, self.computed = asyncio.Event(), 0
        self._opens, self._stuck = opens, stuck
        self.works.set()

    @property
    def checks(self) -> int:
        """The number of checks by the gateway."""
        return sum(request.json.get("max_tokens") == 1 for request in self.requests)

    async def _page(self, request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        page = f"vllm:num_requests_running 1\nvllm:generation_tokens_total {self.computed}\nvllm:kv_cache_usage_perc 0.1\n"
        await writes(_plain(page.encode()))(request, writer)

    async def _generate(self, request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        opens = self._opens and request.json.get("stream") is True
        if opens:
            writer.write(STREAM_HEAD + chunk(OPENING))
        while self._stuck(request) or not self.works.is_set():
            if not opens:
                await (asyncio.Event() if self._stuck(request) else self.works).wait()
                continue
            writer.write(chunk(PING))
            await asyncio.sleep(PING_S)
        self.computed += 3
        if not opens:
            behaviour: Behaviour = streams("a", "b", "c") if request.json.get("stream") else answers()
            await behaviour(request, writer)
            return
        writer.write(chunk(event("a") + event("b") + event("c", "stop") + b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _plain(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def texts_of(answer: bytes) -> list[str]:
    """The texts of a chat stream."""
    return re.findall(r'"content":\s*"([^"]+)"', answer.decode())
