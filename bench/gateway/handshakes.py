"""TLS handshakes of clients: how many a second one core takes, what each costs, and how long they hold up running requests.

    python -m bench.gateway.handshakes [--seconds 10] [--clients 8] [--burst 1000] [--out bench/reports]

Writes handshakes.md and handshakes.json. Full handshakes without resumption: `openssl s_time`, CLIENTS of them, each as fast as
it is served. Then BURST connections whose first messages arrive at once: each has its costly step, the signature, and no end.
The longest pause is the longest answer to a request on the other listener, which is served by the same event loop; one
follows the other. The row `idle` is that without handshakes: what the machine adds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench.gateway.systems import SYSTEMS, Running, Setting, System, good, started
from bench.measure.cpu import cores, cpu_seconds, pinned
from bench.measure.machine import REPORTS, ROOT, versions
from bench.measure.machine import command as shell_command

KEYS: Final = {
    "EC P-256": ["ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"],
    "RSA 2048": ["rsa:2048"],
    "RSA 4096": ["rsa:4096"],
}
PROBE: Final = b"GET /health HTTP/1.1\r\nHost: gateway\r\n\r\n"
PAUSE_S: Final = 0.001  # from one answer to the next request
IDLE_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Result:
    """One row. handshakes: 0: none was asked for. longest_ms, p99_ms: of the answers on the other listener."""

    key: str
    load: str
    handshakes: int
    seconds: float
    cpu_s: float
    longest_ms: float
    p99_ms: float


class Prober:
    """Asks again and again in a thread, while the context lasts. times: seconds of all answers."""

    def __init__(self, port: int) -> None:
        self.times = list[float]()
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._ended.is_set():
            begun = time.perf_counter()
            self._connection.sendall(PROBE)
            if not self._connection.recv(1 << 16):
                raise ConnectionError("the gateway has closed the connection of the probe")
            self.times.append(time.perf_counter() - begun)
            time.sleep(PAUSE_S)

    def __enter__(self) -> Prober:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._connection.close()


def system_of(tls_port: int, cert: Path, *, plain: bool) -> System:
    """Our gateway: `Setting.port` is its plain listener, for operators."""

    def command(at: Setting) -> list[str]:
        config = {
            "listen": f"127.0.0.1:{tls_port}",
            "admin_listen": f"127.0.0.1:{at.port}",
            "tls": {"cert_file": str(cert)},
            "snapshot": "off",
            "pools": [{"replicas": ["http://127.0.0.1:9"]}],
        }
        file = at.folder / "warmroute.yaml"
        file.write_text(json.dumps(config), "utf-8")
        return [at.program, "-m", "gateway", "serve", "--config", str(file)]

    ours = next(system for system in SYSTEMS if system.name == "warmroute")
    environment = {"PYTHONPATH": str(ROOT)} if plain else ours.environment
    return System(ours.name, command, package=ours.package, environment=environment)


def certificate(folder: Path, key: list[str]) -> Path:
    """A PEM file with a key and its certificate."""
    file, made = folder / "cert.pem", ["-newkey", *key, "-nodes", "-x509", "-days", "2", "-subj", "/CN=gateway"]
    subprocess.run(["openssl", "req", *made, "-keyout", folder / "key.pem", "-out", file], check=True, capture_output=True)
    file.write_bytes(file.read_bytes() + (folder / "key.pem").read_bytes())
    return file


def full(port: int, clients: int, seconds: float) -> int:
    """Handshakes of that many clients, one after the other in each."""
    command = ["nice", "-n", "19", "openssl", "s_time", "-connect", f"127.0.0.1:{port}", "-new", "-time", str(round(seconds))]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(clients)]
    said = [each.communicate()[0] for each in running]
    return sum(int(found[1]) for each in said if (found := re.search(rb"(\d+) connections in \d+ real seconds", each)))


def first_message() -> bytes:
    """A client's first message."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    out = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


async def burst(port: int, count: int) -> int:
    """The number of first messages that are answered, of `count` that are sent at once."""
    hello = first_message()
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for _, writer in opened:
        writer.write(hello)

    async def answered(reader: asyncio.StreamReader) -> bool:
        return bool(await reader.read(1))

    async with asyncio.timeout(60):
        found = await asyncio.gather(*(answered(reader) for reader, _ in opened), return_exceptions=True)
    for _, writer in opened:
        writer.transport.abort()
    return sum(each is True for each in found)


def measured(key: str, load: str, running: Running, handshakes: Callable[[], int]) -> Result:
    """handshakes() returns their number."""
    pid = running.process.pid
    with Prober(running.port) as prober:
        spent, begun = cpu_seconds(pid), time.perf_counter()
        count = handshakes()
        seconds, spent = time.perf_counter() - begun, cpu_seconds(pid) - spent
    times = sorted(prober.times)
    return Result(key, load, count, seconds, spent, 1000 * times[-1], 1000 * times[int(0.99 * len(times))])


def rows_of(key: str, options: argparse.Namespace) -> Iterator[Result]:
    system_cores, load_cores = cores()
    with tempfile.TemporaryDirectory() as name, socket.socket() as reserved:
        folder = Path(name)
        reserved.bind(("127.0.0.1", 0))
        port = int(reserved.getsockname()[1])
        reserved.close()
        ours = system_of(port, certificate(folder, KEYS[key]), plain=options.plain)
        answers = started(ours, [], folder, system_cores, lambda admin: good(admin, "GET", "/health", None))
        with answers as running, pinned(load_cores):

            def idle() -> int:
                time.sleep(IDLE_S)
                return 0

            yield measured(key, "idle", running, idle)
            clients = f"{options.clients} clients"
            yield measured(key, clients, running, lambda: full(port, options.clients, options.seconds))
            yield measured(key, f"{options.burst} at once", running, lambda: asyncio.run(burst(port, options.burst)))


def report(rows: Sequence[Result], made_by: str) -> Iterator[str]:
    yield "# TLS handshakes\n"
    yield f"{made_by}\n"
    yield (
        "One worker on one core, clients on the others. Full handshakes (TLS 1.3, no resumption), as fast as they are served;"
        " then first messages that arrive at once. Pause: the longest answer to a request that the same loop served then.\n"
    )
    yield "| key | load | handshakes | handshakes/s | CPU ms each | longest pause ms | p99 ms |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for row in rows:
        rate, each = f"{row.handshakes / row.seconds:,.0f}", f"{1000 * row.cpu_s / max(1, row.handshakes):.2f}"
        counts = [f"{row.handshakes:,}", rate, each] if row.load != "idle" else ["", "", ""]
        yield f"| {row.key} | {row.load} | {' | '.join(counts)} | {row.longest_ms:.1f} | {row.p99_ms:.1f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway.handshakes", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="of full handshakes (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--burst", type=int, default=1000, metavar="N", help="at once (default: %(default)s)")
    parser.add_argument("--keys", default=",".join(KEYS), help="default: %(default)s")
    parser.add_argument("--plain", action="store_true", help="the sources as they are, not compiled")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    options = parser.parse_args(arguments)
    rows = [row for key in options.keys.split(",") for row in rows_of(key, options)]
    options.out.mkdir(parents=True, exist_ok=True)
    made_by = f"Made by `{shell_command('bench.gateway.handshakes', arguments)}`: {versions([ssl.OPENSSL_VERSION])}."
    text = "\n".join(report(rows, made_by))
    (options.out / "handshakes.md").write_text(text + "\n", "utf-8")
    (options.out / "handshakes.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
