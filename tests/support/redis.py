"""A separate Valkey or Redis server, on a free port of 127.0.0.1; also as a sentinel, or as a cluster of one node."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from bench.measure.ports import free_ports
from tests.support.tools import missing, tool


class RedisServer:
    """Stores nothing on disk: after `kill` and `start` it is empty. options: of its configuration. cluster: as a cluster
    node.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        password: str = "",
        tls: bool = False,
        host: str = "127.0.0.1",
        cluster: bool = False,
    ) -> None:
        self.host = host
        self.port, bus = free_ports(2)
        self.password = password
        self._tls = tls
        self._folder = folder
        # Without this the nodes' bus is 10,000 ports above, where the kernel takes those of connections from.
        clustered = ["--cluster-enabled", "yes", "--cluster-port", str(bus)] if cluster else []
        self._options = [*options, *clustered]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{'rediss' if self._tls else 'redis'}://{self.host}:{self.port}"

    @property
    def client(self) -> Any:
        """A client of the blocking library, for tests."""
        options: dict[str, Any] = {"ssl": True, "ssl_cert_reqs": "none"} if self._tls else {}
        return redis.Redis(self.host, self.port, password=self.password or None, protocol=2, **options)

    def start(self) -> None:
        """Returns when it answers."""
        program = shutil.which("valkey-server") or tool("redis-server")
        port = ["--port", "0", "--tls-port", str(self.port)] if self._tls else ["--port", str(self.port)]
        secret = ["--requirepass", self.password] if self.password else []
        log = self._folder / f"redis-{self.host}-{self.port}.log"
        common = ["--bind", self.host, "--save", "", "--dir", str(self._folder), "--logfile", str(log)]
        self._process = subprocess.Popen([program, *port, *common, *secret, *self._options])
        self.wait()

    def wait(self) -> None:
        for _ in range(400):
            assert self._process is None or self._process.poll() is None, "redis-server has ended"
            with contextlib.suppress(redis.ConnectionError), self.client as client:
                client.ping()
                return
            time.sleep(0.02)
        raise AssertionError("redis-server does not answer")

    def kill(self) -> None:
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """Stops answering, with open connections."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGCONT)


class Sentinel(RedisServer):
    """Watches one server, as `main`."""

    def __init__(self, folder: Path, watched: RedisServer, password: str = "") -> None:
        super().__init__(folder, password=password)
        file = folder / f"sentinel-{self.port}.conf"
        secret = f"requirepass {password}\n" if password else ""
        file.write_text(f"port {self.port}\nbind 127.0.0.1\n{secret}sentinel monitor main 127.0.0.1 {watched.port} 1\n")
        self._file = file

    def start(self) -> None:
        program = shutil.which("valkey-server") or tool("redis-server")
        self._process = subprocess.Popen([program, str(self._file), "--sentinel"], stdout=subprocess.DEVNULL)
        self.wait()


@contextlib.contextmanager
def serving(server: RedisServer) -> Iterator[RedisServer]:
    server.start()
    try:
        yield server
    finally:
        server.kill()


def make_cluster(server: RedisServer) -> None:
    """Makes a cluster of one node, started with `cluster`."""
    with server.client as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        for _ in range(400):
            if b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"):
                return
            time.sleep(0.02)
    missing("the cluster does not become ready")
