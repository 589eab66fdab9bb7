"""A replica's key and TLS files.

    options (names of variables and files) ── load ──► Credentials (header lines, SSL context) ── stale? ──► load again

The configuration only names variables and files. They are read before the first connection to the replica, and again when a
file has changed, which is checked at most every RECHECK_S while requests or probes are sent there. A secret that cannot be read
is a failure of the replica, with the reason for operators: the client's own key never replaces it.

No text that is logged, shown or raised here contains a key.
"""

from __future__ import annotations

import os
import re
import ssl
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gateway.config.schema import KeyConfig, TlsConfig
from gateway.errors import NO_ACCESS, ReplicaFailure

RECHECK_S: Final = 1.0
MAX_KEY_BYTES: Final = 16 << 10
MAX_CONTEXTS: Final = 256
MAX_PEM_BYTES: Final = 4 << 20  # a bundle of all authorities has 250 kB

_KEY: Final = re.compile(r"[!-~]+(?: [!-~]+)*")  # fits into one line of a header
_CREDENTIALS: Final = re.compile(rb"^(?:authorization|x-api-key|api-key):[^\r\n]*\r\n", re.IGNORECASE | re.MULTILINE)

_VERSION_LINE: Final = b"anthropic-version: 2023-06-01\r\n"
_VERSION: Final = re.compile(rb"^anthropic-version:", re.IGNORECASE | re.MULTILINE)
_OF_CLIENTS: Final = re.compile(
    rb"^(?:authorization|x-api-key|api-key|x-tenant-id|cookie):[^\r\n]*\r\n", re.IGNORECASE | re.MULTILINE
)

Version = tuple[int, ...] | None
"""Identifies the content of a file: it differs when the file has changed. None: the file is inaccessible."""


class Credentials:
    """The read credentials. authorization: a header line, b"" without a key of the gateway. tls: None for http URLs."""

    __slots__ = ("_of_anthropic", "authorization", "tls", "versions")

    def __init__(self, authorization: bytes, tls: ssl.SSLContext | None, versions: Mapping[str, Version]) -> None:
        self.authorization = authorization
        self._of_anthropic = authorization.startswith(b"x-api-key")
        self.tls = tls
        self.versions = versions

    def is_stale(self) -> bool:
        """True if one of the files has changed. A call of `stat` for each."""
        return any(version_of(path) != seen for path, seen in self.versions.items())

    def headers(self, lines: bytes) -> bytes:
        """A client's header lines for the replica: the gateway's key, if there is one, replaces the client's keys."""
        if not self.authorization:
            return lines
        lines = _CREDENTIALS.sub(b"", lines) + self.authorization
        if self._of_anthropic and not _VERSION.search(lines):  # probes, and clients of other APIs, send none
            lines += _VERSION_LINE
        return lines

    def __repr__(self) -> str:
        return f"<Credentials {'with' if self.authorization else 'without'} a key, of {len(self.versions)} files>"


class TlsContexts:
    """SSL contexts of TLS options, each created once: replicas with the same options and files share one. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[TlsConfig, tuple[Mapping[str, Version], ssl.SSLContext]] = {}

    def of(self, tls: TlsConfig) -> ssl.SSLContext:
        """The context of these options. Raises ReplicaFailure that names the file."""
        with self._lock:
            versions = {path: version_of(path) for path in _files(tls)}
            known = self._made.get(tls)
            if known is not None and known[0] == versions:
                return known[1]
            made = context_of(tls)
            if len(self._made) >= MAX_CONTEXTS:
                self._made.clear()  # replicas keep the contexts that they use
            self._made[tls] = versions, made
            return made

    def __len__(self) -> int:
        return len(self._made)


def without_client_keys(lines: bytes) -> bytes:
    """A client's header lines without its keys for this gateway, and without a tenant header, which the client may have
    forged.
    """
    return _OF_CLIENTS.sub(b"", lines)


def load(
    key: KeyConfig | None, tls: TlsConfig | None, contexts: TlsContexts | None, env: Mapping[str, str] = os.environ
) -> Credentials:
    """Read the key and the TLS files; blocks for some milliseconds. contexts: None for an http URL. Raises ReplicaFailure."""
    files = [*([key.file] if key and key.file else ()), *(_files(tls) if tls else ())]
    versions = {path: version_of(path) for path in files}  # before reading: a file that changes meanwhile is read again
    context = contexts.of(tls) if contexts is not None and tls is not None else None
    return Credentials(_authorization(key, env) if key else b"", context, versions)


def _files(tls: TlsConfig) -> Sequence[str]:
    return [path for path in (tls.ca_file, tls.cert_file, tls.key_file) if path]


def version_of(path: str) -> Version:
    try:
        seen = os.stat(path)
    except (OSError, ValueError):  # no path can have a NUL
        return None
    return seen.st_mtime_ns, seen.st_ctime_ns, seen.st_size, seen.st_ino, seen.st_dev


def context_of(tls: TlsConfig) -> ssl.SSLContext:
    """An SSL context of these options. Raises ReplicaFailure that names the file."""
    for path in _files(tls):
        _read(path, MAX_PEM_BYTES)
    try:
        context = ssl.create_default_context(cafile=tls.ca_file or None)
    except (OSError, ValueError) as error:
        raise _no_access(f"the certificates in {tls.ca_file or 'the system'} cannot be used: {_reason(error)}") from error
    if tls.cert_file:
        _add_own(context, tls)
    return context


def _add_own(context: ssl.SSLContext, tls: TlsConfig) -> None:
    """Add the gateway's certificate. Raises ReplicaFailure."""
    try:
        # Without a password function OpenSSL would ask for one on the terminal.
        context.load_cert_chain(tls.cert_file, tls.key_file or None, password=lambda: "")
    except (OSError, ValueError) as error:
        files = f"{tls.cert_file} and its key {tls.key_file}" if tls.key_file else tls.cert_file
        raise _no_access(f"the client certificate {files} cannot be used: {_reason(error)}") from error


def _authorization(key: KeyConfig, env: Mapping[str, str]) -> bytes:
    """The header line of the key. Raises ReplicaFailure, without any part of the key."""
    text = env.get(key.env, "") if key.env else _read(key.file, MAX_KEY_BYTES).decode("utf-8", "replace")
    text = text.strip()
    if not text:
        raise _no_access(f"its key is missing: {key.place} is {'not set' if key.env else 'empty'}")
    if not _KEY.fullmatch(text):
        raise _no_access(f"its key cannot be used: {key.place} has more than one line of printable ASCII characters")
    start = "Authorization: Bearer" if key.header == "authorization" else f"{key.header}:"
    return f"{start} {text}\r\n".encode("ascii")


def _read(path: str, most: int) -> bytes:
    """The content of a file. Raises ReplicaFailure."""
    try:
        if not Path(path).is_file():  # opening a pipe would block
            raise _no_access(f"the file {path} {'is not a regular file' if os.path.exists(path) else 'does not exist'}")
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise _no_access(f"the file {path} cannot be read: {_reason(error)}") from error
    if len(data) > most:
        raise _no_access(f"the file {path} is larger than {most} bytes")
    return data


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__)[:200]


def _no_access(text: str) -> ReplicaFailure:
    return ReplicaFailure(NO_ACCESS, text, reached=0)
