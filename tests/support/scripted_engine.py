"""An engine on loopback that answers by a script, counts tokens as the simulated replica does, and has a prefix cache.

    request ──► first piece of its answer ──► held ──► released, the one that is due first ──► the rest; now it is in the cache

Time is a number: a request is due its script's seconds after the moment at which it came, and `release` moves that moment. So
the order of ends is the script's, whatever the machine does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tests.support.fakes import DONE, STREAM_HEAD, FakeReplica, FakeRequest, chunk, http, models, usage
from tests.support.workflows import tokens

BLOCK = 16
NEVER = 1e9
PREFILL = 400_000  # tokens in a second
PIECE = 40  # characters


class ScriptedAnswer(NamedTuple):
    """status, code: of an error, whose message is the text. seconds: None: never."""

    text: str = "text"
    seconds: float | None = 0.0
    status: int = 200
    broken: bool = False
    code: str = "scripted"


Sharing = Literal["in flight", "first token", "end"]
Script = Callable[[dict[str, Any]], ScriptedAnswer]


@dataclass
class HeldRequest:
    body: dict[str, Any]
    answer: ScriptedAnswer
    due: float
    go: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class PrefixCache:
    """Prompts with their answers, by model."""

    rows: list[tuple[str, list[str]]] = field(default_factory=list)
    prompts: int = 0
    computed: int = 0
    calls: int = 0

    def prompt(self, model: str, prompt: list[str], *, taken: bool) -> tuple[int, list[str]]:
        """Cached tokens, and the row of this prompt. taken: the longest match is this request's until its end."""
        found = [(_common(prompt, row), at) for at, (other, row) in enumerate(self.rows) if other == model]
        shared, best = max(found, default=(0, 0))
        if taken and shared:
            del self.rows[best]
        cached = min(shared, len(prompt) - 1) // BLOCK * BLOCK
        row = list(prompt)
        self.prompts, self.computed, self.calls = (
            self.prompts + len(prompt),
            self.computed + len(prompt) - cached,
            self.calls + 1,
        )
        return cached, row


def _common(one: list[str], other: list[str]) -> int:
    return next(
        (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), min(len(one), len(other))
    )


def prompt_tokens(body: dict[str, Any]) -> list[str]:
    if "prompt" in body:
        return tokens(body["prompt"])
    found: list[str] = []
    for message in body["messages"]:
        content = message["content"]
        text = content if isinstance(content, str) else json.dumps(content)
        found += [f"<|{message['role']}|>", "\n", *tokens(text), "\n"]
    return [*found, "<|assistant|>", "\n"]


class ScriptedEngine:
    """holds: answers wait for `release` after their first piece; else they come at once. replica: to be entered. cut: requests
    that were broken off. shares: when others find a prompt; at its end: in a slot, one of them. owner: of its models, by which
    its engine is known. together: no prompt is computed before so many have come.
    """

    def __init__(
        self,
        script: Script,
        *names: str,
        holds: bool = False,
        shares: Sharing = "in flight",
        owner: str = "fake",
        together: int = 0,
    ) -> None:
        self.replica = FakeReplica([self._behave], models(*(names or ("m",)), owner=owner))
        self.cache = PrefixCache()
        self.held: list[HeldRequest] = []
        self.cut: list[dict[str, Any]] = []
        self.now = 0.0
        self.moved = self.computing = 0
        self._script, self._holds, self._shares, self._together = script, holds, shares, together
        self._all_here = asyncio.Event()

    async def _behave(self, request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        body = request.json
        answer = self._script(body)
        self.moved += 1
        prompt = prompt_tokens(body)
        if answer.status != 200:
            error = {"error": {"message": answer.text, "type": "t", "code": answer.code}}
            writer.write(http(answer.status, json.dumps(error).encode()))
            return
        cached, row = self.cache.prompt(body["model"], prompt, taken=self._shares == "end")
        if self._shares == "in flight":
            self.cache.rows.append((body["model"], row))
        self.computing += 1
        await asyncio.sleep((len(prompt) - cached) / PREFILL)  # the router learns from it
        if self.cache.calls >= self._together:
            self._all_here.set()
        await self._all_here.wait()
        self.computing -= 1
        if self._shares == "first token":
            self.cache.rows.append((body["model"], row))
        await self._stream(body, answer, (len(prompt), cached), writer)
        row.extend(tokens(answer.text)[:-1])
        if self._shares == "end":
            self.cache.rows.append((body["model"], row))

    async def hold(self, body: dict[str, Any], answer: ScriptedAnswer) -> None:
        """Wait until `release` lets it go."""
        held = HeldRequest(body, answer, self.now + (answer.seconds if answer.seconds is not None else NEVER))
        self.held.append(held)
        self.moved += 1
        try:
            await held.go.wait()
        except asyncio.CancelledError:
            self.cut.append(body)
            raise
        finally:
            self.held.remove(held)
            self.moved += 1

    async def _stream(
        self, body: dict[str, Any], answer: ScriptedAnswer, counts: tuple[int, int], writer: asyncio.StreamWriter
    ) -> None:
        assert body["stream"] is True
        writer.write(STREAM_HEAD)
        for at in range(0, len(answer.text) or 1, PIECE):
            writer.write(chunk(_event(body, answer.text[at : at + PIECE], None)))
            await writer.drain()
            if at == 0 and (self._holds or answer.seconds is None):
                await self.hold(body, answer)
        if answer.broken:
            writer.transport.abort()
            return
        writer.write(chunk(_event(body, "", "stop")))
        completion = max(1, len(tokens(answer.text)))
        data = {"id": "c", "choices": [], "usage": usage(counts[0], completion, counts[1])}
        if (body.get("stream_options") or {}).get("include_usage"):
            writer.write(chunk(b"data: " + json.dumps(data).encode() + b"\n\n"))
        writer.write(chunk(DONE) + b"0\r\n\r\n")

    def release(self) -> bool:
        """Let the request that is due first be answered. False: none is held that ends."""
        waiting = [each for each in self.held if each.answer.seconds is not None and not each.go.is_set()]
        if not waiting:
            return False
        first = min(waiting, key=lambda each: each.due)
        self.now = max(self.now, first.due)
        first.go.set()
        return True


def _event(body: dict[str, Any], text: str, reason: str | None) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
    choice |= {"text": text} if "prompt" in body else {"delta": {"content": text}}
    return b"data: " + json.dumps({"id": "c", "model": body["model"], "choices": [choice]}).encode() + b"\n\n"


async def quiet(*engines: ScriptedEngine) -> None:
    """Wait until no request has come or gone for some turns of the event loop."""
    still, before = 0, -1
    while still < 15:
        await asyncio.sleep(0.001)  # sockets of this process need real time
        moved, computing = (sum(each) for each in zip(*((one.moved, one.computing) for one in engines), strict=True))
        still, before = (still + 1, before) if moved == before and not computing else (0, moved)
