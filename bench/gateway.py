"""What the gateway costs: CPU per request and per streamed chunk, beside a plain aiohttp proxy in the same run.

    python -m bench.gateway

CPU is the user and system time of the proxy's process over the run, from /proc, divided by requests or chunks: it does not
depend on who else uses the machine. Mock replicas and clients are small raw-protocol programs in processes of their own, so
that the proxy is the bottleneck. Everything is on: cost routing, metering, metrics, one log line a request.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

from aiohttp import ClientSession, TCPConnector, web

CHUNK = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
USAGE = b'"usage":{"prompt_tokens":500,"completion_tokens":16,"prompt_tokens_details":{"cached_tokens":256}}'
ANSWER = (
    b'{"id":"c","object":"chat.completion","choices":[{"message":{"role":"assistant","content":"'
    + b"x" * 200
    + b'"}}],'
    + USAGE
    + b"}"
)
MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
CHUNKS, INTERVAL_S = 100, 0.01
TICK = os.sysconf("SC_CLK_TCK")


def response(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


class MockReplica(asyncio.Protocol):
    """Answers at once; a streamed request gets CHUNKS chunks, INTERVAL_S apart."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        lower = head.lower()
        length = int(lower.partition(b"content-length: ")[2].split(b"\r\n")[0]) if b"content-length: " in lower else 0
        if not found or len(body) < length:
            return
        self.buffer = body[length:]
        if head.startswith(b"GET"):
            self.transport.write(response(MODELS))
        elif b'"stream":true' in body:
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            self.send(CHUNKS)
        else:
            self.transport.write(response(ANSWER))

    def send(self, left: int) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK))
        if left > 1:
            asyncio.get_running_loop().call_later(INTERVAL_S, self.send, left - 1)
        else:
            self.transport.write(b"0\r\n\r\n")


async def serve_mock() -> None:
    server = await asyncio.get_running_loop().create_server(MockReplica, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def serve_plain(replicas: list[str]) -> None:
    """A plain aiohttp proxy, round robin: what one writes in ten minutes."""
    session, turn = ClientSession(connector=TCPConnector(limit=0)), 0

    async def forward(request: web.Request) -> web.StreamResponse:
        nonlocal turn
        turn += 1
        body = await request.read()
        async with session.post(replicas[turn % len(replicas)] + request.path, data=body) as upstream:
            answer = web.StreamResponse(status=upstream.status, headers={"Content-Type": upstream.headers["Content-Type"]})
            await answer.prepare(request)
            async for chunk in upstream.content.iter_any():
                await answer.write(chunk)
            return answer

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/{path:.*}", forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def body_of(index: int, size: int, stream: bool) -> bytes:
    """A distinct user turn over a shared head."""
    head, turn = "You are a helpful assistant. " * 20, f"{index} " * ((size - 600) // len(f"{index} "))
    messages = [{"role": "system", "content": head}, {"role": "user", "content": turn}]
    return json.dumps({"model": "m", "messages": messages, "stream": stream}, separators=(",", ":")).encode()


async def load(port: int, bodies: list[bytes], connections: int) -> None:
    """Closed loop: each connection sends the next body when its answer is complete."""
    todo = iter(bodies)

    async def worker() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        for body in todo:
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert head.startswith(b"http/1.1 200"), head
            if b"content-length: " in head:
                await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
            else:
                await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()

    await asyncio.gather(*(worker() for _ in range(connections)))


def measure(name: str, pid: int, port: int) -> None:
    def timed(bodies: list[bytes], connections: int, units: int) -> tuple[float, float]:
        cpu, begun = cpu_seconds(pid), time.monotonic()
        asyncio.run(load(port, bodies, connections))
        return (cpu_seconds(pid) - cpu) / units * 1e6, units / (time.monotonic() - begun)

    timed([body_of(index, 2000, False) for index in range(500)], 32, 500)  # warm up
    short, rate = timed([body_of(index, 2000, False) for index in range(6000)], 32, 6000)
    long, _ = timed([body_of(index, 32_000, False) for index in range(3000)], 32, 3000)
    chunk, _ = timed([body_of(index, 2000, True) for index in range(300)], 100, 300 * CHUNKS)
    print(f"{name:<22} {short:>10.0f} {long:>11.0f} {chunk:>10.1f} {rate:>11.0f}", flush=True)


def started(arguments: list[str], port_in: Callable[[str], int], err: bool = False) -> tuple[subprocess.Popen[str], int]:
    stdout, stderr = (subprocess.DEVNULL, subprocess.PIPE) if err else (subprocess.PIPE, None)
    process = subprocess.Popen([sys.executable, *arguments], stdout=stdout, stderr=stderr, text=True)
    pipe = process.stderr if err else process.stdout
    assert pipe is not None
    port = next(found for line in pipe if (found := port_in(line)))
    if err:  # the log must not fill the pipe
        subprocess.Popen(["cat"], stdin=pipe, stdout=subprocess.DEVNULL)
    return process, port


def listening(line: str) -> int:
    event = json.loads(line)
    return int(event["url"].rpartition(":")[2]) if event["message"] == "listening" else 0


def main() -> None:
    processes = []
    try:
        urls = []
        for _ in range(2):
            process, port = started(["-m", "bench.gateway", "mock"], int)
            processes.append(process)
            urls.append(f"http://127.0.0.1:{port}")
        print(f"{'':<22} {'CPU us per request':>22} {'per chunk':>10} {'requests/s':>11}")
        print(f"{'':<22} {'2 kB':>10} {'32 kB':>11} {'us':>10} {'2 kB':>11}")
        plain, port = started(["-m", "bench.gateway", "plain", *urls], int)
        processes.append(plain)
        measure("plain aiohttp proxy", plain.pid, port)
        flags = [flag for url in urls for flag in ("--replica", url)]
        ours, port = started(["-m", "gateway.cli", "serve", "--port", "0", *flags], listening, err=True)
        processes.append(ours)
        measure("warmroute", ours.pid, port)
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["mock"]:
            asyncio.run(serve_mock())
        case ["plain", *replicas]:
            asyncio.run(serve_plain(replicas))
        case _:
            main()
