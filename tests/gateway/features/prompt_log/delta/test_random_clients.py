"""Random clients through two gateways: they go on, fork, rewrite, drop reasoning, give calls other ids, and change their frame,
while the store is purged. The engine always gets the conversation that the client has sent.
"""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gateway.features.prompt_log.naming.forms import names_in
from tests.gateway.features.prompt_log.delta.test_delta_end_to_end import ids, unreasoned
from tests.gateway.features.prompt_log.delta.two_gateways import called, engine_turns, history_of, result_of, two_gateways
from tests.gateway.features.prompt_log.kept import FORMS, SYSTEM, TOOLS, body_of
from tests.support.fakes import FakeReplica, FakeRequest, http, writes

STEPS = 50


class RandomClient:
    """key: of the client. turns: its history. frame: further members of its bodies."""

    def __init__(self, path: str, key: str, chance: random.Random) -> None:
        self.path, self.key, self._chance = path, key, chance
        self.turns: list[Any] = [self._user()]
        self.frame: dict[str, Any] = {}

    def reads(self, raw: bytes) -> None:
        """The answer to the last request, and the client's next turn."""
        chance, said = self._chance, history_of(self.path, json.loads(raw))
        if chance.random() < 0.3:
            said = [unreasoned(each) for each in said if each.get("type") != "reasoning"]
        self.turns += said
        call = ids(said)[-1]
        if chance.random() < 0.8:
            self.turns.append(result_of(self.path, call, f"result {chance.random()}"))
        if chance.random() < 0.5:
            self.turns.append(self._user())
        if self.turns[-1] is said[-1]:
            self.turns.append(self._user())

    def changes(self) -> None:
        """A change that a client may make between two requests."""
        chance = self._chance
        kind = chance.choice(["none", "none", "none", "fork", "edit", "order", "frame", "ids"])
        users = [at for at, turn in enumerate(self.turns) if turn.get("role") == "user" and isinstance(turn["content"], str)]
        if kind == "fork":
            del self.turns[chance.choice(users) + 1 :]
        elif kind == "edit":
            self.turns[chance.choice(users)] = self._user()
        elif kind == "order":
            self.turns = [json.loads(json.dumps(turn, sort_keys=True)) for turn in self.turns]
        elif kind == "frame":
            self.frame = chance.choice([{}, SYSTEM[self.path], {"tools": TOOLS[self.path]}])
        elif kind == "ids":
            old = chance.choice(ids(self.turns) or ["none"])
            self.turns = json.loads(json.dumps(self.turns).replace(f'"{old}"', f'"{old}x"'))

    def _user(self) -> Any:
        return {"role": "user", "content": f"{self._chance.random()} " * 20}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("path", FORMS)
async def test_the_engine_gets_what_random_clients_send(path: str, seed: int, tmp_path: Path) -> None:
    chance, number = random.Random(seed), 0

    async def engine(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal number
        number += 1
        answer = called(path, f"c{number % 7}", chance.choice(["I look.", "So."]), chance.choice(["", "Hm."]))
        await writes(http(200, json.dumps(answer).encode()))(request, writer)

    async with FakeReplica([engine]) as replica, two_gateways(replica, tmp_path) as two:
        clients = [RandomClient(path, key, chance) for key in ("one", "two", "one")]
        for step in range(STEPS):
            client = chance.choice(clients)
            client.changes()
            code, _, raw = await two.ask(path, client.turns, client.key, **client.frame)
            assert code == 200, raw
            sent = json.dumps(body_of(path, client.turns, **client.frame)).encode()
            ours, theirs = names_in(sent, FORMS[path]), names_in(replica.requests[-1].body, FORMS[path])
            assert (theirs.frame, theirs.chain) == (ours.frame, ours.chain)
            assert orphans(engine_turns(replica, path)) == orphans(client.turns)
            client.reads(raw)
            if step % 20 == 19:
                with sqlite3.connect(tmp_path / "state.db") as file:
                    file.execute("delete from warmroute_responses")
        counts = await two.counts()
        assert len(replica.requests) == STEPS
        assert counts["delta"] > STEPS / 2
        assert counts["replayed"] >= 1


def orphans(turns: list[Any]) -> int:
    """The number of results whose id is that of no earlier call: engines refuse them."""
    calls, found = set[str](), 0
    for turn in turns:
        content = turn.get("content")
        parts = [turn, *(turn.get("tool_calls") or ()), *(content if isinstance(content, list) else ())]
        for part in parts:
            if part.get("type") in ("function", "tool_use", "function_call"):
                calls.add(part["call_id"] if part["type"] == "function_call" else part["id"])
            result = part.get("tool_call_id") or part.get("tool_use_id")
            result = part["call_id"] if part.get("type") == "function_call_output" else result
            found += result is not None and result not in calls
    return found
