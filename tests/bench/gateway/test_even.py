"""Even load: each of several processes on one port gets as many requests, and its CPU is its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from bench.gateway.even import Even, even_loop
from bench.measure.replies import WORDS

SERVER = """
import asyncio, sys
from bench.measure.mock import MockReplica
async def main():
    server = await asyncio.get_running_loop().create_server(
        lambda: MockReplica(interval=0.001), "127.0.0.1", int(sys.argv[1]), reuse_port=True
    )
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@contextmanager
def two_on_one_port() -> Iterator[tuple[int, list[int]]]:
    """(the port, who shares it)."""
    with ExitStack() as stack:
        held = stack.enter_context(socket.socket())
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))  # it does not listen, so it is dealt nothing
        port = held.getsockname()[1]
        servers = [
            stack.enter_context(subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE))
            for _ in range(2)
        ]
        for server in servers:
            stack.callback(server.terminate)
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
        yield port, [server.pid for server in servers]


async def test_each_process_answers_as_much() -> None:
    with two_on_one_port() as (port, pids):
        found = await even_loop(Even([(port, pid) for pid in pids], pids, connections=3, each=5, warm=1))
        assert (found["sent"], found["good"], found["words"], found["errors"]) == (30, 30, 30 * WORDS, {})
        assert min(found["cpu_s"]) > 0  # type: ignore[call-overload]
        streams = await even_loop(Even([(port, pid) for pid in pids], pids, connections=2, each=1, warm=1, chunks=4))
        assert (streams["good"], streams["words"]) == (4, 16)


async def test_a_process_that_accepts_nothing_is_named() -> None:
    with two_on_one_port() as (port, pids), pytest.raises(RuntimeError, match=str(os.getpid())):
        await even_loop(Even([(port, os.getpid())], pids, connections=1, each=1))
