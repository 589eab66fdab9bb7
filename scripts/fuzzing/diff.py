"""The same bytes of an answer through three readers: http1, aiohttp's client, nginx as a reverse proxy.

To be stricter than both is allowed, and listed; to read something else than one of them, or what neither takes, is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_parser import HttpResponseParser

from scripts.fuzzing.answers import TOKENS, Outcome, Refused, invent, read
from scripts.fuzzing.answers import cases as answer_cases
from scripts.fuzzing.mutate import mutate

Verdict = tuple[int, bytes] | None  # the final status and the body; None: refused

_CONFIG = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors;
events {{ worker_connections 200; }}
http {{
    access_log off;
    client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
    uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
    server {{
        listen unix:{folder}/front;
        error_page 502 504 =599 /refused;
        location = /refused {{ internal; return 599; }}
        location / {{
            proxy_pass http://unix:{folder}/back:;
            proxy_http_version 1.1; proxy_set_header Connection close; proxy_buffering off; proxy_next_upstream off;
        }}
    }}
}}
"""


def nginx_program() -> str | None:
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


def ours(data: bytes) -> tuple[Verdict, str]:
    """And why it is refused."""
    found = read([data])
    return (None, found.why) if isinstance(found, Refused) else ((found.status, found.body), "")


async def aiohttp_verdict(data: bytes) -> Verdict:
    """Byte by byte, up to the end of the first final answer; the rest is ignored."""
    loop = asyncio.get_running_loop()
    parser: Any = HttpResponseParser(BaseProtocol(loop), loop, 1 << 20, read_until_eof=True, auto_decompress=False)
    final: Any = None
    try:
        for byte in data:
            messages, upgraded, _ = parser.feed_data(bytes([byte]))
            final = final or next((pair for pair in messages if pair[0].code >= 200), None)
            if upgraded or (final and final[1].is_eof()):
                break
        else:
            parser.feed_eof()
        if final is None or not final[1].is_eof():
            return None
        return final[0].code, await final[1].read()
    except Exception:  # noqa: BLE001  (any refusal)
        return None


@dataclass(slots=True)
class Nginx:
    """An nginx in front of a server that answers with given bytes."""

    folder: Path
    sayings: dict[str, bytes] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def verdict(self, data: bytes) -> Verdict:
        path = f"/{next(self._numbers)}"
        self.sayings[path] = data
        reader, writer = await asyncio.open_unix_connection(str(self.folder / "front"))
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            async with asyncio.timeout(20):
                received = await reader.read()
        except ConnectionError:
            return None
        finally:
            writer.close()
        found = read([received])
        return (found.status, found.body) if isinstance(found, Outcome) and found.status != 599 else None

    async def back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(self.sayings.pop(head.split(b" ")[1].decode()))
            await writer.drain()
            writer.write_eof()
        writer.close()


async def _listens(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(str(path))
    except OSError:
        return False
    writer.close()
    return True


@contextlib.asynccontextmanager
async def nginx(program: str) -> AsyncIterator[Nginx]:
    with tempfile.TemporaryDirectory() as name:
        front = Nginx(Path(name))
        (front.folder / "nginx.conf").write_text(_CONFIG.format(folder=name))
        server = await asyncio.start_unix_server(front.back, front.folder / "back")
        errors = front.folder / "errors"
        process = await asyncio.create_subprocess_exec(program, "-e", str(errors), "-c", f"{name}/nginx.conf", "-p", name)
        try:
            async with asyncio.timeout(20):
                while not await _listens(front.folder / "front"):  # bound is not enough
                    assert process.returncode is None, errors.read_text()
                    await asyncio.sleep(0.01)
            yield front
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
            server.close()
            await server.wait_closed()


@dataclass(frozen=True, slots=True)
class Row:
    """One input and the three verdicts on it."""

    data: bytes
    why: str
    ours: Verdict
    aiohttp: Verdict
    nginx: Verdict
    interim: bool  # nginx (before 1.29) takes an interim answer for the final one

    @property
    def wrong(self) -> bool:
        if self.ours is None:
            return False
        others = [self.aiohttp] if self.interim else [self.aiohttp, self.nginx]
        taken = [other for other in others if other is not None]
        return not taken or any(other != self.ours for other in taken)


_INTERIM = re.compile(rb"HTTP/1\.[01] 1")


async def compare(data: bytes, front: Nginx) -> Row:
    verdict, why = ours(data)
    return Row(data, why, verdict, await aiohttp_verdict(data), await front.verdict(data), bool(_INTERIM.match(data)))


async def compare_all(inputs: Iterable[bytes], program: str) -> list[Row]:
    async with nginx(program) as front:
        return [await compare(data, front) for data in inputs]


def inputs(chance: Random, count: int) -> list[bytes]:
    """The systematic ones, and as many at random."""
    made = [mutate(invent(chance), chance, TOKENS) if number % 2 else invent(chance) for number in range(count)]
    return [*answer_cases(), *made]


# -- the table


def table(rows: list[Row], version: str) -> str:
    """Markdown: what we refuse and others take, by reason, with the shortest input of each kind."""
    kinds: dict[tuple[str, bool, bool], list[Row]] = {}
    for row in rows:
        if row.ours is None:
            kinds.setdefault((row.why, row.aiohttp is not None, row.nginx is not None), []).append(row)
    both = sum(row.ours is not None for row in rows)
    wrong = [row for row in rows if row.wrong]
    out = [
        f"{len(rows)} answers, {version}: {both} taken by http1, each read as the others that take it read it,",
        f"{len(rows) - both} refused; {len(wrong)} read wrongly.",
        "",
        "| http1 refuses because | aiohttp | nginx | answers | the shortest |",
        "| --- | --- | --- | ---: | --- |",
    ]
    for (why, first, second), found in sorted(kinds.items(), key=lambda kind: (kind[0][0], -len(kind[1]))):
        short = min((row.data for row in found), key=len)
        shown = repr(short[:90])[2:-1].replace("|", "\\|") + ("…" if len(short) > 90 else "")
        out.append(f"| {why} | {_word(first)} | {_word(second)} | {len(found)} | `{shown}` |")
    out += [f"WRONG: {row}" for row in wrong]
    return "\n".join(out) + "\n"


def _word(taken: bool) -> str:
    return "takes" if taken else "refuses"


def compared(count: int, chance: Random) -> tuple[list[Row], str]:
    """The systematic answers and `count` random ones, and with whom they were compared. Ends the program without nginx."""
    program = nginx_program()
    if program is None:
        raise SystemExit("nginx is not installed (Debian: apt-get install nginx-light)")
    version = subprocess.run([program, "-v"], check=True, capture_output=True, text=True).stderr.strip()
    version = version.removeprefix("nginx version: ")
    return asyncio.run(compare_all(inputs(chance, count), program)), f"{version}, aiohttp/{aiohttp.__version__}"


def main(out: Path | None, seconds: int, chance: Random) -> int:
    """Exit status 1 if something was read wrongly. seconds: about 500 random answers in each."""
    rows, version = compared(seconds * 500, chance)
    text = table(rows, version)
    print(text)
    if out:
        out.write_text(text, "utf-8")
    return int(any(row.wrong for row in rows))
