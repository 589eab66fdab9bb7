"""A database of an older version is migrated while a gateway of that version writes to it.

    git worktree add FOLDER COMMIT
    python -m bench.prompt_log.migration FOLDER [--url postgresql://...] [--conversations 100] [--seconds 30]

The gateway of FOLDER stores conversations with forks. It goes on with that while this version's gateway opens the same database
and migrates it; then conversations go on at either of them, and at the end from each acknowledged turn at the new one. The
engine's answer is a digest of all that it was sent, so a wrong or incomplete history is noticed. Without --url: SQLite.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from sqlalchemy import Connection, func, select

from bench.fleet.stage import ready
from bench.measure.ports import free_port
from bench.prompt_log.engine import engine
from gateway.database.database import Database
from gateway.dialects.events.sse import events_of, object_of
from gateway.features.histories.tables import CONTENTS, ROW, TABLES, sizes
from tests.clients.watching import name_of

RESPONSES, CHAT, MESSAGES = "/v1/responses", "/v1/chat/completions", "/v1/messages"
_LISTS: Final = {RESPONSES: "input", CHAT: "messages", MESSAGES: "messages"}
_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class KeptPoint:
    """An acknowledged turn. name: an id of Responses, or a head. texts: of the conversation, alternating."""

    path: str
    name: str
    texts: tuple[str, ...]


@dataclass(slots=True)
class Figures:
    """asked: by gateway. errors: by status. unkept: whole answers whose turn was not kept. wrong: histories that were not those
    of the client. slowest_s: of all requests.
    """

    asked: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    unkept: int = 0
    wrong: int = 0
    slowest_s: float = 0.0


class Clients:
    """Conversations, at any gateway."""

    def __init__(self, session: aiohttp.ClientSession, seed: int) -> None:
        self.points = list[KeptPoint]()
        self.figures = Figures()
        self._session = session
        self._chance = random.Random(seed)

    def begin(self, path: str) -> KeptPoint:
        return KeptPoint(path, "", ())

    def any_point(self) -> KeptPoint:
        """Nearly always one of the latest, else an old one: a fork."""
        latest = self._chance.random() < 0.7
        return self._chance.choice(self.points[-2 * _AT_ONCE :] if latest else self.points)

    async def say(self, url: str, label: str, point: KeptPoint) -> bool:
        """One turn after a point. True: its history was the whole one."""
        text = f"{self._chance.getrandbits(64):x} " * self._chance.randrange(1, 200)
        turns = [_turn(at, each) for at, each in enumerate((*point.texts, text))]
        own = {_LISTS[point.path]: turns[-1:], "model": "m", "stream": True, "max_tokens": 99}
        headers = {"Authorization": "Bearer k"}
        if point.path == RESPONSES:
            own |= {"store": True} | ({"previous_response_id": point.name} if point.name else {})
        else:
            headers["Prompt-Log"] = f'keep, base="{point.name}"' if point.name else "keep"
        begun = time.monotonic()
        self.figures.asked[label] += 1
        try:
            async with self._session.post(url + point.path, json=own, headers=headers) as answer:
                raw, status = await answer.read(), answer.status
        except (aiohttp.ClientError, ConnectionError) as error:
            self.figures.errors[type(error).__name__] += 1
            return False
        self.figures.slowest_s = max(self.figures.slowest_s, time.monotonic() - begun)
        if status != 200:
            self.figures.errors[str(status)] += 1
            return False
        name, said = _told(point.path, raw)
        whole = {"model": "m", _LISTS[point.path]: turns}
        right = said.startswith(name_of(point.path, json.dumps(whole).encode()))
        self.figures.wrong += not right
        if not name:
            self.figures.unkept += 1
            return right
        self.points.append(KeptPoint(point.path, name, (*point.texts, text, said)))
        return right


def _turn(at: int, text: str) -> dict[str, Any]:
    return {"role": "assistant" if at % 2 else "user", "content": text}


def _told(path: str, raw: bytes) -> tuple[str, str]:
    """(the name of the kept turn; "": it is not kept, its text)."""
    found = [object_of(event) for event in events_of(raw)]
    if path == RESPONSES:
        last = found[-1]["response"]
        return last["id"] if last.get("store", True) else "", last["output"][0]["content"][0]["text"]
    told = next((each["prompt_log"] for each in found if "prompt_log" in each), {})
    pieces = [each["choices"][0]["delta"].get("content", "") for each in found if each.get("choices")]
    pieces += [each["delta"].get("text", "") for each in found if each.get("type") == "content_block_delta"]
    return told["head"] if told.get("kept") else "", "".join(pieces)


@contextlib.asynccontextmanager
async def gateway(tree: Path, folder: Path, replica: str, state: str) -> AsyncIterator[str]:
    """A gateway of a source tree. Yields its URL."""
    port, config = free_port(), folder / f"{tree.name}.json"
    listen = {"listen": f"127.0.0.1:{port}", "admin_listen": "off", "pools": [{"replicas": [replica]}]}
    config.write_text(json.dumps({**listen, "state": {"url": state}, "log_level": "error"}))
    command, url = [sys.executable, "-m", "gateway", "serve", "--config", str(config)], f"http://127.0.0.1:{port}"
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    process = await asyncio.create_subprocess_exec(*command, cwd=tree, env=environment)
    try:
        await ready([url], "/health")
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        await process.wait()


async def counted(state: str) -> tuple[int, int]:
    """(the counter of all owners' bytes, the sum of all rows)."""

    def work(connection: Connection) -> tuple[int, int]:
        total = 0
        for table, size in CONTENTS.items():
            total += connection.execute(select(func.coalesce(func.sum(size + ROW), 0)).select_from(table)).scalar_one()
        return int(connection.execute(select(func.coalesce(func.sum(sizes.c.size), 0))).scalar_one()), int(total)

    database = Database(state, TABLES)
    await database.open()
    try:
        return await database.read(work)
    finally:
        await database.close()


async def measured(options: argparse.Namespace, folder: Path) -> None:
    state = options.url or f"sqlite:///{folder}/state.db"
    here, limit = Path(__file__).parents[2], asyncio.Semaphore(_AT_ONCE)
    async with aiohttp.ClientSession() as session, engine() as replica, gateway(options.before, folder, replica, state) as old:
        clients, stop = Clients(session, options.seed), asyncio.Event()
        paths = [RESPONSES, *([CHAT, MESSAGES] if options.keeps else [])]

        async def one(url: str, label: str, point: KeptPoint) -> bool:
            async with limit:
                return await clients.say(url, label, point)

        await asyncio.gather(*(one(old, "old", clients.begin(paths[at % len(paths)])) for at in range(options.conversations)))
        for _ in range(4):
            await asyncio.gather(*(one(old, "old", clients.any_point()) for _ in range(options.conversations)))
        before, urls = len(clients.points), [old]

        async def goes_on(number: int) -> None:
            while not stop.is_set():
                at = number % len(urls)
                await one(urls[at], ("old", "new")[at], clients.any_point())

        going = [asyncio.create_task(goes_on(number)) for number in range(_AT_ONCE)]
        async with gateway(here, folder, replica, state) as new:
            urls.append(new)
            await asyncio.sleep(options.seconds)
            stop.set()
            await asyncio.gather(*going)
            during, acknowledged = clients.figures, list(clients.points)
            clients.figures = Figures()
            last = await asyncio.gather(*(one(new, "new", point) for point in acknowledged))
    counter, total = await counted(state)
    print(f"turns before the new version: {before:,}; during its migration and beside it: {len(acknowledged) - before:,}")
    print(f"requests: {dict(during.asked)}; errors: {dict(during.errors)}; not kept: {during.unkept}; wrong: {during.wrong}")
    print(f"the slowest request: {during.slowest_s:.2f} s")
    print(f"gone on from each of {len(acknowledged):,} turns at the new one: {sum(last):,} with the whole history", end="")
    print(f", errors: {dict(clients.figures.errors)}")
    print(f"counted bytes: {counter:,}; bytes of all rows: {total:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=lambda text: Path(text).absolute(), help="a source tree of the version before")
    parser.add_argument("--url", help="a new database")
    parser.add_argument("--keeps", action="store_true", help="that version has prompt logs")
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30.0, help="for which both gateways write")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measured(options, Path(folder)))


if __name__ == "__main__":
    main()
