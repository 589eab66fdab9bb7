"""A worker: the gateway as one process runs it, which hears from its supervisor what the others do.

It is told all it needs: its listening sockets are open when it starts, its configuration comes through the channel. SIGTERM
lets its requests finish; so does the end of its supervisor.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import signal
import socket
from collections.abc import Mapping, Sequence

from gateway import logs
from gateway.app import compose, serve
from gateway.config import Config
from gateway.everywhere import Local
from gateway.exposition import packed
from gateway.loops import LoopGuard
from gateway.process import relax_garbage_collection, run
from gateway.sockets import SideSockets
from gateway.workers.channel import SERVING, TOLD, WELCOME, Channel
from gateway.workers.peers import Peers, part_of

log = logging.getLogger("warmroute.workers")


def main(arguments: Sequence[str]) -> None:
    """arguments: the file descriptor of the channel, the gateway's id (`loops.py`), and the file descriptors of the sockets to
    accept on: clients=N, admin=N, metrics=N, and that of the connections that the supervisor hands over: handed=N.
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

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop.add_signal_handler(signal.SIGTERM, on_signal)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # the supervisor's business
    _, channel = await loop.create_unix_connection(Channel, sock=sock)
    kind, who, _, payload = await channel.first()
    assert kind == WELCOME
    whole: Config = pickle.loads(payload)
    requests = logs.configure(whole.log_level, worker=who)

    def orphaned() -> None:
        if not stop.is_set():
            log.error("the supervisor is gone: going down")
            stop.set()

    def everywhere(local: Local) -> Peers:
        return Peers(local, channel, orphaned)

    gateway = compose(part_of(whole), requests, everywhere=everywhere, loops=loops)
    sides = SideSockets(sockets["admin"], sockets["metrics"])
    await serve(gateway, stop, hurry, lambda _url: channel.send(SERVING), sockets["clients"], sides, sockets["handed"][0])
    channel.send(TOLD, payload=packed(gateway.local.page()))  # the last word on what was counted here
    channel.close()
    await channel.closed.wait()
