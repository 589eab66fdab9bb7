"""JSON of all shapes and sizes, plain and compressed, to a gateway whose event loop is watched.

The fuzzer checks for any body: it is answered, either refused in the API's own error format or served; bodies within the
bounds are served, others are not; the loop never blocks for longer than LONGEST_S; the replica gets the body, byte for byte,
except where usage is requested; and the next client is served.

An input is a recipe (`bodies.py`).
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from gateway.dialects.json_structure import MAX_STRUCTURE
from gateway.dialects.openai.request import SCANNED_AT_ONCE
from gateway.parser.parsing import INLINE_BYTES, INLINE_STRUCTURE, MAX_PARTS, UNCOUNTED_BYTES
from gateway.server.http.inflate import RATIO_FROM
from gateway.upstream.sending import MAX_JOINED
from scripts.fuzzing import stage
from scripts.fuzzing.answers import Outcome
from scripts.fuzzing.bodies import (
    BODY_MB,
    BROKEN,
    CHAT,
    CODINGS,
    COMPLETION,
    CONTENTS,
    LARGEST,
    OPTIONS,
    OTHER,
    REFUSED,
    SERVED,
    SHAPES,
    VALUES,
    WHOLE,
    Sent,
    sent_of,
)
from scripts.fuzzing.stage import Errors, Pace, Recipe, error_code, read_recipe
from scripts.fuzzing.strict_replica import Received, StrictReplica
from tests.gateway.conftest import Running, eventually

CLIENTS = 2
LONGEST_S: Final = 0.1
_THRESHOLDS: Final = (
    *(0, 1000, SCANNED_AT_ONCE, MAX_JOINED, UNCOUNTED_BYTES, INLINE_BYTES, RATIO_FROM, LARGEST),
    *(3 * MAX_PARTS, INLINE_STRUCTURE, 2 * MAX_STRUCTURE, 3 * MAX_STRUCTURE // 2),
)


def invent(chance: Random) -> dict[str, Any]:
    size = chance.choice(_THRESHOLDS) + chance.randint(-200, 200) if chance.random() < 0.6 else int(10 ** chance.uniform(0, 7))
    return {
        "shape": chance.choice(SHAPES),
        "size": max(0, size),
        "pad": chance.choice([0, 0, 0, 1, 1000, 100_000]),
        "coding": chance.choice(["", "", "", *CODINGS]),
        "level": chance.choice([0, 1, 6, 9]),
        "alphabet": chance.choice([1, 2, 4, 20, 40, 66]),
        "path": chance.choice([CHAT, CHAT, CHAT, COMPLETION, OTHER]),
        "stream": chance.random() < 0.4,
        "options": chance.choice(list(OPTIONS)),
        "chunked": chance.random() < 0.2,
        "seed": chance.randrange(1000),
    }


def make(known: bytes, chance: Random) -> bytes:
    return stage.vary(known, invent, chance)


# -- the gateway


@dataclass(slots=True)
class Watched:
    """A running gateway, the pace of its event loop, its replica, and its logged errors."""

    run: Running
    pace: Pace
    replica: StrictReplica
    errors: Errors
    longest_s: float = 0.0
    slowest: bytes = b""
    _number: int = 0

    async def blame(self, inputs: list[bytes], chance: Random) -> list[str]:
        return await stage.blame(self._batch, inputs, chance)

    def notes(self) -> list[str]:
        return [
            f"The event loop stood still for {self.longest_s * 1e3:.0f} ms of its CPU time at most, for "
            f"`{self.slowest.decode()}` and what was sent beside it."
        ]

    async def _batch(self, inputs: list[bytes], _chance: Random) -> list[str]:
        recipes = [read_recipe(data) for data in inputs]
        self._number += len(inputs)
        sent = [sent_of(recipe, self._number + at) for at, recipe in enumerate(recipes)]
        self.replica.forget()
        self.errors.seen.clear()
        self.pace.take()
        answers = await asyncio.gather(*(stage.ask(self.run.url, one.data) for one in sent))
        ledger = self.run.gateway.router.ledger
        await eventually(lambda: ledger.open_leases == 0)
        stood_s = self.pace.take()
        if stood_s > self.longest_s:
            self.longest_s, self.slowest = stood_s, max(zip(map(len, (one.data for one in sent)), inputs, strict=True))[1]
        health = await stage.ask(self.run.url, b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
        assert health.status == 200, inputs
        assert stood_s < LONGEST_S, (stood_s, inputs)
        assert not self.errors.seen, (self.errors.seen, inputs)
        assert not self.replica.wrong, (self.replica.wrong, inputs)
        taken = {int(request.get(b"x-number")[0]): request for request in self.replica.taken}
        assert len(taken) == len(self.replica.taken), inputs
        return [
            _kind(recipe, one, answer, taken.get(self._number + at))
            for at, (recipe, one, answer) in enumerate(zip(recipes, sent, answers, strict=True))
        ]


def _kind(recipe: Recipe, sent: Sent, answer: Outcome, taken: Received | None) -> str:
    """The outcome of one request. Raises AssertionError for a bug."""
    context = dict(recipe), answer.status, answer.body[:300]
    if answer.status != 200:
        code = error_code(answer)
        assert sent.verdict != SERVED, context
        assert 400 <= answer.status < 500, context
        assert taken is None, context
        return f"{_family(recipe, sent)}: {answer.status} {code}"
    assert sent.verdict != REFUSED, context
    assert taken is not None, context
    _same(recipe, sent, taken, context)
    return f"{_family(recipe, sent)}: 200{', edited' if len(taken.body) != len(sent.body.raw) else ''}"


def _family(recipe: Recipe, sent: Sent) -> str:
    families = {"values": VALUES, "contents": CONTENTS, "whole": WHOLE, "broken": BROKEN}
    size = "large" if len(sent.body.raw) > INLINE_BYTES else "small"
    return f"{next(name for name, shapes in families.items() if recipe['shape'] in shapes)}, {size}"


def _same(recipe: Recipe, sent: Sent, taken: Received, context: object) -> None:
    """Assert that the replica got the client's body, except for the request for usage."""
    raw = sent.body.raw
    assert taken.get(b"content-length") == [b"%d" % len(taken.body)], context
    if coding := taken.get(b"content-encoding"):
        assert recipe["path"] == OTHER, context
        assert coding == [CODINGS[recipe["coding"]][0]], context
        assert taken.body == sent.coded, context
        return
    wanted = recipe["stream"] and recipe["path"] != OTHER and recipe["options"] != "on"
    if not wanted:
        assert taken.body == raw, context
        return
    begin = _alike(lambda size: raw[:size] == taken.body[:size], min(len(raw), len(taken.body)))
    left = min(len(raw), len(taken.body)) - begin
    behind = _alike(lambda size: raw[len(raw) - size :] == taken.body[len(taken.body) - size :], left)
    assert len(taken.body) - begin - behind <= 60, context
    assert len(raw) - begin - behind <= 10, context
    if len(raw) < 50_000:
        asked = json.loads(taken.body)
        options = asked.pop("stream_options")
        assert options.pop("include_usage") is True, context
        before = json.loads(raw)
        old = before.pop("stream_options", None) or {}
        old.pop("include_usage", None)
        assert list(asked.items()) == list(before.items()), context
        assert options == old, context


def _alike(same: Callable[[int], bool], most: int) -> int:
    """The largest number, up to `most`, for which it holds, as it does for all smaller ones."""
    return bisect.bisect_left(range(most), True, key=lambda size: not same(size + 1))


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[Watched]:
    with stage.errors_logged() as errors:
        limits = {"body_mb": BODY_MB, "inflight_mb": 1024}
        async with StrictReplica(keep=True) as replica, stage.paced(replica.url, limits=limits) as (run, pace):
            made, chance = Watched(run, pace, replica, errors), Random(1)
            await made._batch([stage.write_recipe({**invent(chance), "shape": "text", "size": INLINE_BYTES * 2})], chance)
            made.longest_s = 0.0  # the parser process has started, and everything is imported
            yield made
