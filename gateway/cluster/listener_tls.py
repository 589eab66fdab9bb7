"""TLS of the gateway's own listeners: its certificate, which is read again when its files change.

    files differ, and are the same at two looks ──► read in a thread ──► good? ──► for new connections
                                                         └─ no: one error in the log, the former certificate stays

The files of a certificate and its key are replaced one after the other: a pair that does not fit is looked at again at the next
change. Open connections keep the certificate with which they began.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import stat
from typing import Final

from gateway.config.parse import ConfigError, Problem
from gateway.config.schema import ListenerTlsConfig

log = logging.getLogger("warmroute.gateway")

LOOK_S: Final = 1.0  # between two looks at the files

_Versions = tuple[tuple[int, ...] | None, ...]


class ListenerTls:
    """The certificate of the listeners. context: for the next connection."""

    def __init__(self, config: ListenerTlsConfig, *, look_s: float = LOOK_S) -> None:
        """Raises ConfigError if the files cannot be used."""
        self._config = config
        self._look_s = look_s
        self._read = self._seen = _versions(config)
        self.context = context_of(config)

    async def run(self) -> None:
        """Follow the files until cancelled."""
        while True:
            await asyncio.sleep(self._look_s)
            seen, before = _versions(self._config), self._seen
            self._seen = seen
            if seen == before and seen != self._read:
                await self.read_again()

    async def read_again(self) -> None:
        """Read the files now. A failure is logged, and changes nothing."""
        seen = _versions(self._config)
        try:
            self.context = await asyncio.to_thread(context_of, self._config)
        except ConfigError as error:
            log.error("certificate not read again: the former one stays", extra={"error": str(error)})
        else:
            if seen != self._read:
                log.info("certificate read again", extra={"file": self._config.cert_file})
        self._read = seen

    def __repr__(self) -> str:
        return f"<ListenerTls {self._config.cert_file}>"


def context_of(config: ListenerTlsConfig) -> ssl.SSLContext:
    """A context with the certificate. Raises ConfigError, without the content of the files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        for path in filter(None, (config.cert_file, config.key_file)):
            if not stat.S_ISREG(os.stat(path).st_mode):  # reading a pipe or a device might never end
                raise ValueError(f"{path} is no regular file")
        # Without a password function OpenSSL would ask for one on the terminal.
        context.load_cert_chain(config.cert_file, config.key_file or None, password=lambda: "")
    except (OSError, ValueError) as error:
        files = f"{config.cert_file} and its key {config.key_file}" if config.key_file else config.cert_file
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, ssl.SSLError):
            reason = f"no certificate in PEM with its key, without a password ({reason})"
        raise ConfigError(Problem(("tls", "cert_file"), f"{files} cannot be used: {reason}")) from error
    return context


def _versions(config: ListenerTlsConfig) -> _Versions:
    return tuple([_version(path) for path in (config.cert_file, config.key_file) if path])


def _version(path: str) -> tuple[int, ...] | None:
    """None: there is no file."""
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_ctime_ns, seen.st_size, seen.st_ino, seen.st_dev
