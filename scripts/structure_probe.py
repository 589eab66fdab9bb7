"""The way of a streamed chat completion through a gateway: its files, functions and calls from file to file, as JSON.

    PYTHONPATH=CHECKOUT python scripts/structure_probe.py

The gateway of the checkout runs in this process, with its default configuration and a replica on loopback. The third request is
measured, so that connections and caches are warm. A profiler sees each Python function of the event loop's thread; other
libraries are left out, `router/` counts among the functions only. The three ends: before the replica's first byte, at the first
byte for the client, and at the end of the answer.
"""

from __future__ import annotations

import http.client
import http.server
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

WARM_UP = 2
START_S = 60.0
PROBES_S = 600  # no probe during the measured request
IDLE_S = 0.05  # the gateway has time for its last step before an end
TEXT = "What is a prefix cache? " * 80
BODY = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": TEXT}]})
EVENT = {"id": "1", "object": "chat.completion.chunk", "model": "m", "choices": [{"index": 0, "delta": {"content": "A"}}]}
FIRST, LAST = f"data: {json.dumps(EVENT)}\n\n", "data: [DONE]\n\n"
MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm"}]})


class Route:
    """The calls of one request, and what had been seen at each of its ends."""

    def __init__(self, tree: Path) -> None:
        self.recording = False
        self.ends: dict[str, dict[str, Any]] = {}
        self._root = f"{tree}/"
        self._ours = (f"{tree}/gateway/", f"{tree}/router/")
        self._functions: set[tuple[str, str, int]] = set()
        self._moves: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """For sys.setprofile."""
        if not self.recording or event != "call" or not (file := self._file(frame)):
            return
        self._functions.add((file, frame.f_code.co_qualname, frame.f_code.co_firstlineno))
        if file.startswith("router/"):
            return
        caller, back = "", frame.f_back
        while back and not (caller := self._file(back)):
            back = back.f_back
        if caller and caller != file:
            self._moves.add((caller, file))

    def _file(self, frame: FrameType) -> str:
        """Relative to the tree; empty outside the gateway."""
        name = frame.f_code.co_filename
        return name.removeprefix(self._root) if name.startswith(self._ours) else ""

    def end(self, name: str) -> None:
        if self.recording:
            time.sleep(IDLE_S)
            files = sorted({file for file, _, _ in self._functions if file.startswith("gateway/")})
            self.ends[name] = {"files": files, "functions": len(self._functions), "moves": len(self._moves)}


def replica(route: Route) -> http.server.ThreadingHTTPServer:
    """Streams one event per chat."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._head(200 if self.path == "/v1/models" else 404, "application/json", MODELS)
            self.wfile.write(MODELS.encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            route.end("upstream")
            self._head(200, "text/event-stream", FIRST + LAST)
            self.wfile.write(FIRST.encode())
            self.wfile.flush()
            time.sleep(4 * IDLE_S)
            self.wfile.write(LAST.encode())

        def _head(self, status: int, kind: str, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    return http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def drive(port: int, route: Route) -> None:
    """Send the requests on one connection, then end the gateway."""
    until = time.monotonic() + START_S
    while not ready(port) and time.monotonic() < until:
        time.sleep(0.05)
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for number in range(WARM_UP + 1):
        route.recording = number == WARM_UP
        connection.request("POST", "/v1/chat/completions", BODY, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read(1)
        route.end("client")
        answer.read()
        route.end("complete")
        route.recording = False
    connection.close()
    os.kill(os.getpid(), signal.SIGINT)


def ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def main() -> None:
    from gateway import commands  # of the checkout
    from gateway.commands.cli import main as gateway

    route, port = Route(Path(commands.__path__[0]).parent.parent), free_port()
    with replica(route) as server, tempfile.TemporaryDirectory() as folder:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ["XDG_STATE_HOME"] = folder
        url = f"http://127.0.0.1:{server.server_address[1]}"
        config = {"listen": f"127.0.0.1:{port}", "pools": [{"replicas": [url]}], "health": {"interval_s": PROBES_S}}
        file = Path(folder) / "config.yaml"
        file.write_text(json.dumps(config), "utf-8")
        threading.Thread(target=drive, args=(port, route), daemon=True).start()
        sys.setprofile(route)
        gateway(["serve", "--config", str(file)])
        sys.setprofile(None)
        server.shutdown()
    print(json.dumps(route.ends))


if __name__ == "__main__":
    main()
