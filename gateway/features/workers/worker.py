"""Main program of a worker process: one gateway, connected to the other workers through the supervisor.

It inherits its listening sockets, and gets its configuration through the channel. It drains on SIGTERM, and when its supervisor
ends.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Mapping, Sequence

from gateway.app import compose, serve
from gateway.cluster.commands import LocalControl
from gateway.cluster.messages import decode_config
from gateway.cluster.process import relax_garbage_collection, run
from gateway.cluster.side_sockets import SideSockets
from gateway.core import Surroundings
from gateway.features.table import WholeConfig
from gateway.features.workers.channel import Channel
from gateway.features.workers.handover import Receiver
from gateway.features.workers.messages import COUNTERS, Heartbeat, Publish, Welcome, from_hub
from gateway.features.workers.peers import Peers, connect, worker_share
from gateway.telemetry import logs
from gateway.telemetry.exposition import packed
from gateway.upstream.loop_guard import LoopGuard

log = logging.getLogger("warmroute.workers")


def main(arguments: Sequence[str]) -> None:
    """arguments: the file descriptor of the channel, the gateway's id (`loop_guard.py`), and the sockets to accept on:
    clients=N, admin=N, metrics=N, and handed=N for connections from the supervisor.
    """
    channel, gateway_id, *named = arguments
    sockets: dict[str, list[socket.socket]] = {"clients": [], "admin": [], "metrics": [], "handed": []}
    for name, _, number in (text.partition("=") for text in named):
        sockets[name].append(socket.socket(fileno=int(number)))
    relax_garbage_collection()
    run(_work(socket.socket(fileno=int(channel)), sockets, LoopGuard(gateway_id)))


async def _work(sock: socket.socket, sockets: Mapping[str, Sequence[socket.socket]], loops: LoopGuard) -> None:
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    _, channel = await loop.create_unix_connection(lambda: Channel(from_hub), sock=sock)

    def on_signal() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()
        channel.send(Heartbeat("stopping"))

    loop.add_signal_handler(signal.SIGTERM, on_signal)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # handled by the supervisor
    worker, welcome = await channel.first()
    assert isinstance(welcome, Welcome)
    whole = decode_config(WholeConfig, welcome.config)
    requests = logs.configure(whole.log_level, worker=worker, log_format=whole.log_format)

    def orphaned() -> None:
        if not stop.is_set():
            log.error("the supervisor is gone: going down")
            stop.set()

    def control_plane(local: LocalControl) -> Peers:
        return connect(local, channel, orphaned)

    gateway = compose(worker_share(whole), requests, Surroundings(control_plane=control_plane, loops=loops))
    sides = SideSockets(sockets["admin"], sockets["metrics"])

    def started(_url: str) -> None:
        channel.send(Heartbeat("serving"))

    await serve(
        gateway,
        stop,
        hurry,
        started,
        sockets["clients"],
        sides,
        [lambda server: Receiver(sockets["handed"][0], server, server.tls)],
    )
    channel.send(Publish(COUNTERS, packed(gateway.local.page())))  # the last snapshot
    channel.close()
    await channel.closed.wait()
