"""A simulated replica that keeps some memory with each request, and takes much more while it answers one: the fuzzer has to
notice the former.

python -m tests.replica.fuzz.leaking --port 0
"""

from __future__ import annotations

import argparse
import faulthandler
import signal
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from replica.api.server import create_app
from replica.process import bind
from replica.sim.cost import SimConfig
from replica.sim.engine import SimEngine

KEPT_MB, TAKEN_MB = 32, 64
MAX_KEPT = 60  # 2 GB, on a machine that is fast enough for so many requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    port: int = parser.parse_args().port
    kept = list[bytes]()

    @web.middleware
    async def keep(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        if request.method != "POST":
            return await handler(request)
        if len(kept) < MAX_KEPT:
            kept.append(b"k" * (KEPT_MB << 20))
        taken = b"t" * (TAKEN_MB << 20)
        try:
            return await handler(request)
        finally:
            del taken

    app = create_app(SimEngine(SimConfig(prefill_rate=1e6, decode_rate=1e4)), "sim")
    app.middlewares.append(keep)
    web.run_app(app, sock=bind("127.0.0.1", port), print=partial(print, flush=True), handler_cancellation=True)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    main()
