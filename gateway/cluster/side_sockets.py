"""Listening sockets for operators (`admin_listen`) and for Prometheus (`metrics_listen`).

They are opened once, before anything is served. Several workers accept on the same sockets, and any worker answers for all. The
socket of a Unix address is a file for the gateway's own user and group.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gateway.cluster.listeners import addresses_of, listen, url_of
from gateway.config.listen import AUTO, UNIX, ListenAddress
from gateway.config.schema import Config

log = logging.getLogger("warmroute.gateway")

_BACKLOG = 128


class ListenError(Exception):
    """The gateway cannot listen on a configured address."""


@dataclass(frozen=True, slots=True)
class SideSockets:
    """admin, metrics: listening sockets, none if that listener is off. admin_tls: connections of operators have TLS."""

    admin: Sequence[socket.socket] = ()
    metrics: Sequence[socket.socket] = ()
    admin_tls: bool = False

    @property
    def urls(self) -> dict[str, str]:
        """For the log: admin_url and metrics_url of the open listeners."""
        found = (("admin_url", self.admin, self.admin_tls), ("metrics_url", self.metrics, False))
        return {name: _url_of(sockets[0], secure=secure) for name, sockets, secure in found if sockets}

    def __iter__(self) -> Iterator[tuple[str, socket.socket]]:
        """("admin" or "metrics", socket) of each listener."""
        yield from (("admin", each) for each in self.admin)
        yield from (("metrics", each) for each in self.metrics)


NO_SIDES = SideSockets()


@contextlib.contextmanager
def side_sockets(config: Config) -> Iterator[SideSockets]:
    """Opens the sockets, and closes them at the end. Raises ListenError; for the default address of operators, which was not
    configured, only a warning is logged.
    """
    with contextlib.ExitStack() as stack:
        yield SideSockets(_admin(config, stack), _open("metrics_listen", config.metrics, stack), config.admin_tls)


def _admin(config: Config, stack: contextlib.ExitStack) -> Sequence[socket.socket]:
    try:
        return _open("admin_listen", config.admin, stack)
    except ListenError as error:
        if config.admin_listen != AUTO:
            raise
        log.warning("no operator endpoints: set admin_listen", extra={"error": str(error)})
        return ()


def _open(name: str, endpoint: ListenAddress | None, stack: contextlib.ExitStack) -> Sequence[socket.socket]:
    """name: the key of the configuration, for errors."""
    if endpoint is None:
        return ()
    try:
        if endpoint.path:
            made = [_listen_on_path(endpoint.path)]
            stack.callback(_remove, endpoint.path, os.stat(endpoint.path).st_ino)
        else:
            made = listen(addresses_of(endpoint.host, endpoint.port), shared=False)
    except OSError as error:
        raise ListenError(f"cannot listen on {endpoint} ({name}): {error.strerror or error}") from error
    for each in made:
        stack.enter_context(each)
    return made


def _listen_on_path(path: str) -> socket.socket:
    """A socket on a Unix path. Raises OSError. Replaces the file of a dead gateway, not of a running one."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_abandoned(path):
            os.unlink(path)
        before = os.umask(0o117)  # creates the file with its final mode: rw for user and group
        try:
            sock.bind(path)
        finally:
            os.umask(before)
        sock.setblocking(False)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_abandoned(path: str) -> bool:
    """True if the path is a socket on which no process listens."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                return probe.connect_ex(path) == errno.ECONNREFUSED
    return False


def _remove(path: str, inode: int) -> None:
    """Removes the file, unless it belongs to another gateway by now."""
    with contextlib.suppress(OSError):
        if os.lstat(path).st_ino == inode:
            os.unlink(path)


def _url_of(sock: socket.socket, *, secure: bool) -> str:
    name = sock.getsockname()
    return f"{UNIX}{name}" if isinstance(name, str) else url_of(name, secure=secure)
