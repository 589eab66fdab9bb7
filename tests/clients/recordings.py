"""Requests as coding agents have sent them, for tests where the agents are not installed: tests/corpus/agents/NAME.json.gz.

    python -m tests.clients.recordings        (needs scripts/clients.sh; writes them anew)

Only their form is kept: names and short identifiers as they are, every other text replaced by a word that is repeated to the
same length (equal texts by equal ones), so that no agent's prompt is in this project.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import xxhash

from tests.support.paths import ROOT

FOLDER: Final = ROOT / "tests" / "corpus" / "agents"
_IDENTIFIER: Final = re.compile(r"[\w.:+-]{1,64}\Z", re.ASCII)
_DROPPED: Final = frozenset(
    [
        "host",
        "authorization",
        "x-api-key",
        "content-length",
        "accept-encoding",
        "connection",
        "user-agent",
        "accept",
        "content-type",
    ]
)


def scrubbed(value: Any) -> Any:
    """The same value with other texts."""
    if isinstance(value, str):
        return value if _IDENTIFIER.match(value) else filler(value)
    if isinstance(value, list):
        return [scrubbed(one) for one in value]
    if isinstance(value, dict):
        return {key: scrubbed(one) for key, one in value.items()}
    return value


def filler(text: str) -> str:
    """As long as the text. A text that is JSON stays JSON: the arguments of a call, metadata."""
    if text[:1] in "{[":
        try:
            return json.dumps(scrubbed(json.loads(text)))
        except ValueError:
            pass
    word = f"{xxhash.xxh3_64_hexdigest(text.encode())} "
    return (word * (len(text) // len(word) + 1))[: len(text)]


def load(name: str) -> list[dict[str, Any]]:
    """Of one session, in their order: path, headers, body."""
    recorded: list[dict[str, Any]] = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    return recorded


def save(name: str, requests: list[Any]) -> None:
    rows = [{"path": one.path, "headers": kept(one.headers), "body": scrubbed(one.json)} for one in requests]
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode(), mtime=0))


def kept(headers: Mapping[str, str]) -> dict[str, str]:
    shown = {name: value for name, value in headers.items() if name not in _DROPPED and not name.startswith("x-warmroute")}
    return {name: scrubbed(value) for name, value in shown.items() if name != "x-request-id"}


async def record() -> None:
    from tests.clients.test_agents import AGENTS_UNDER_TEST, fleet

    for agent, (begin, _header, path) in AGENTS_UNDER_TEST.items():
        async with fleet() as (gateway, engines):
            with tempfile.TemporaryDirectory() as home:
                await begin(Path(home) / "home", gateway.url, 1)
            requests = [one for engine in engines for one in engine.requests if one.path.startswith(path)]
            requests.sort(key=lambda one: len(one.body))
            save(agent.replace(", ", "-"), requests)


if __name__ == "__main__":
    asyncio.run(record())
