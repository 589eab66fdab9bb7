"""SIGKILLs while the store is full: of one process that writes to it, and of two gateways on it, one after the other.

Whatever was acknowledged before has to be found afterwards.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable

import aiohttp

from bench.measure.ports import free_ports
from bench.state.costs import Clock, Findings, opened, response
from bench.state.requests import ask, first_answer, gateway, process, responses_of

_LANES = 16  # of each writer


async def write_for_ever(url: str) -> None:
    """In a process of its own: says of each response when it is acknowledged, after it has put all of its chain so far."""
    async with opened(url, Clock()) as (_, store):

        async def lane(name: str) -> None:
            number = 0
            while True:
                await store.put(response(f"{name}-{number}", f"{name}-{number - 1}" if number else ""))
                sys.stdout.write(f"{name}-{number}\n")
                sys.stdout.flush()
                number += 1

        await asyncio.gather(*(lane(f"kill{at}") for at in range(_LANES)))


async def kill(url: str, findings: Findings, count: int) -> None:
    """SIGKILL when so many are acknowledged; then all of them are looked for."""
    command = sys.executable, "-m", "bench.state", "--write", url
    writer = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert writer.stdout
    ids = list[str]()
    while len(ids) < count and (line := await writer.stdout.readline()):
        ids.append(line.decode().strip())
    writer.send_signal(signal.SIGKILL)
    rest = await writer.stdout.read()
    await writer.wait()
    ids += rest.decode().split("\n")[:-1]
    findings.acknowledged = len(ids)
    async with opened(url, Clock()) as (_, store):
        findings.missing = await _missing(ids, lambda id_: store.get("tenant:bench", id_))


async def kill_gateways(url: str, findings: Findings, count: int) -> None:
    """The first one is killed at half of them, and the other one goes on; a third one is asked for all of them."""
    replica, *ports = free_ports(4)
    ids = list[str]()
    with process("-m", "bench.state.requests", str(replica)):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=2 * _LANES)) as session:
            with gateway(replica, ports[0], url) as one, gateway(replica, ports[1], url) as two:
                for port in ports[:2]:
                    await first_answer(session, responses_of(port))
                lanes = [
                    (_lane(session, port, ids), each)
                    for port, each in ((ports[0], one), (ports[1], two))
                    for _ in range(_LANES)
                ]
                await _killed(lanes, ids, (count // 2, count))
            with gateway(replica, ports[2], url):
                await first_answer(session, responses_of(ports[2]))
                findings.acknowledged_of_two = len(ids)
                findings.missing_of_two = await _missing(ids, lambda id_: _get(session, ports[2], id_))


async def _killed(lanes: list[tuple[Awaitable[None], subprocess.Popen[bytes]]], ids: list[str], counts: Iterable[int]) -> None:
    """Each gateway when there are so many ids. Lanes end with theirs."""
    tasks = {asyncio.ensure_future(lane): each for lane, each in lanes}
    try:
        for each, count in zip(dict.fromkeys(tasks.values()), counts, strict=True):
            while len(ids) < count:
                done, going = await asyncio.wait(tasks, timeout=0.01)
                for task in done:
                    if tasks[task].poll() is None or not going:
                        raise RuntimeError("a gateway that was not killed has failed a request") from task.exception()
            each.send_signal(signal.SIGKILL)
            each.wait()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _lane(session: aiohttp.ClientSession, port: int, ids: list[str]) -> None:
    """A chain, until its gateway is killed."""
    previous = ""
    while True:
        found = await ask(session, responses_of(port), True, previous)
        if found.get("store") is not True:
            raise RuntimeError(f"not kept: {found}")
        previous = str(found["id"])
        ids.append(previous)


async def _get(session: aiohttp.ClientSession, port: int, id_: str) -> None:
    async with session.get(f"{responses_of(port)}/{id_}") as answer:
        found = await answer.json()
        if answer.status != 200 or found["id"] != id_:
            raise RuntimeError(f"not found: {found}")


async def _missing(ids: Iterable[str], look: Callable[[str], Awaitable[object]]) -> int:
    missing = 0
    for id_ in ids:
        try:
            await look(id_)
        except Exception:  # noqa: BLE001  (whatever it is: the client was told that it is kept)
            missing += 1
    return missing
