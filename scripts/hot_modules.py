"""Bytecodes per module and request, for the list of compiled modules in `hatch_build.py`.

    python -m scripts.hot_modules [--share 0.001]

A gateway runs in a process of its own, plain Python, with tracing of bytecodes on. The requests are the same as in
`bench.gateway.instructions`: chat, Messages and Responses, streamed and not, of 2 kB and 32 kB, native and translated; first
with the default configuration, then with a key, limits, prices and the ledger. A module is hot if it has a share of at least
`--share` in one kind of request. The table shows each module's largest share and whether `hatch_build.py` compiles it.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import hatch_build
from bench.gateway.instructions import WORKS, bodies_of
from bench.gateway.systems import mocks
from bench.measure.ports import free_ports
from gateway.commands.cli import main as gateway

ROOT = Path(__file__).parents[1]
WARM_UP = 3
REQUESTS = 3
IDLE_S = 0.1
START_S = 120.0
KEY = f"wr-k3p8w2zd-{'a' * 43}"


class Bytecodes:
    """For sys.settrace: bytecodes per file while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.counts = Counter[str]()

    def __call__(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        if not self.on:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._inside

    def _inside(self, frame: FrameType, event: str, _argument: Any) -> Any:
        self.counts[frame.f_code.co_filename] += self.on and event == "opcode"
        return self._inside


def child(url: str, *, as_chat: bool, everything: bool) -> None:
    """Prints one JSON object: kind of request -> module -> bytecodes."""
    codes, found, (port,) = Bytecodes(), dict[str, dict[str, int]](), free_ports(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_STATE_HOME"] = name
        config: dict[str, Any] = {"listen": f"127.0.0.1:{port}", "pools": [{"replicas": [url]}], "health": {"interval_s": 600}}
        if everything:
            digest = hashlib.sha256(KEY.encode()).hexdigest()
            limits = {"requests_per_minute": 10**6, "uncached_tokens_per_minute": 10**9, "budget_usd_day": 1000}
            keys = {"keys": [{"id": "k3p8w2zd", "sha256": digest, "tenant": "t", **limits}]}
            (folder / "keys.yaml").write_text(json.dumps(keys), "utf-8")
            config |= {"keys": {"url": f"{name}/keys.yaml"}, "ledger": {"url": f"sqlite:///{name}/ledger.sqlite"}}
            config |= {"prices": {"m": {"input": 0.3, "output": 1.5, "cached_input": 0.03}}}
        (folder / "config.yaml").write_text(json.dumps(config), "utf-8")
        threading.Thread(target=_drive, args=(port, codes, as_chat, found), daemon=True).start()
        sys.settrace(codes)
        gateway(["serve", "--config", str(folder / "config.yaml")])
        sys.settrace(None)
    print(json.dumps(found))


def _drive(port: int, codes: Bytecodes, as_chat: bool, found: dict[str, dict[str, int]]) -> None:
    until = time.monotonic() + START_S
    while not _ready(port) and time.monotonic() < until:
        time.sleep(IDLE_S)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    for work in WORKS:
        if work.as_chat == as_chat:
            connection, bodies = http.client.HTTPConnection("127.0.0.1", port), bodies_of(work)
            for number in range(WARM_UP + REQUESTS):
                if number == WARM_UP:
                    codes.counts.clear()
                    codes.on = True
                connection.request("POST", work.path, next(bodies), headers)
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    print(f"{work.name}: status {answer.status}", file=sys.stderr)
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(IDLE_S)  # the observers have had their turn
            codes.on = False
            found[work.name] = dict(_ours(codes.counts))
            connection.close()
    os.kill(os.getpid(), signal.SIGINT)


def _ours(counts: Counter[str]) -> Iterator[tuple[str, int]]:
    for file, count in counts.items():
        if file.startswith((f"{ROOT}/gateway/", f"{ROOT}/router/")):
            yield file.removeprefix(f"{ROOT}/"), count


def _ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def shares() -> dict[str, float]:
    """Module -> its largest share of the bytecodes of a kind of request."""
    found, cores = dict[str, float](), os.sched_getaffinity(0)
    for as_chat in (False, True):
        with mocks(1, 0.002, cores, chat_only=as_chat) as (url,):
            for everything in (False, True):
                command = [sys.executable, "-m", "scripts.hot_modules", "--child", json.dumps([url, as_chat, everything])]
                done = subprocess.run(
                    command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
                )
                for counts in json.loads(done.stdout.splitlines()[-1]).values():
                    for module, count in counts.items():
                        found[module] = max(found.get(module, 0.0), count / sum(counts.values()))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.hot_modules", description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.001, help="default: 0.001")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        url, as_chat, everything = options.child
        child(url, as_chat=as_chat, everything=everything)
        return
    compiled, found = set(hatch_build.modules()), shares()
    print("| module | largest share | compiled |")
    print("|---|--:|---|")
    for module, share in sorted(found.items(), key=lambda item: -item[1]):
        if share >= options.share or module in compiled:
            print(f"| {module} | {share:.2%} | {'yes' if module in compiled else 'no'} |")
    for module in sorted(compiled - found.keys()):
        print(f"| {module} | 0 | yes |")


if __name__ == "__main__":
    main()
