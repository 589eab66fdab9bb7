"""HTTP client of running gateways, for commands: of the endpoints for operators, and of those for clients."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import ssl
import sys
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from gateway.config.listen import UNIX
from gateway.config.schema import ADMIN_PORT_OFFSET, DEFAULT_LISTEN

if TYPE_CHECKING:
    from rich.console import RenderableType

KEY: Final = "WARMROUTE_ADMIN_KEY"
CLIENT_KEY: Final = "WARMROUTE_API_KEY"
CONNECT_S: Final = 10.0
ANSWER_S: Final = 45.0  # a gateway with several workers waits up to 34 s for them, perhaps after a reload
MOST_BYTES: Final = 64 << 20  # of an answer
_PORT: Final = int(DEFAULT_LISTEN.rpartition(":")[2])
DEFAULT_ADMIN: Final = f"http://127.0.0.1:{_PORT + ADMIN_PORT_OFFSET}"
DEFAULT_URL: Final = f"http://127.0.0.1:{_PORT}"

LISTENER: Final = (
    f"of an admin listener (admin_listen), or {UNIX}/PATH (default: %(default)s). With an admin key, set {KEY} to it"
)


@dataclass(frozen=True, slots=True)
class GatewayListener:
    """A kind of listener. key: the environment variable with its key. unset, wrong: messages for a 401. hint: where it is."""

    article: str
    name: str
    key: str
    unset: str
    wrong: str
    hint: str


ADMIN: Final = GatewayListener(
    "an",
    "admin listener",
    KEY,
    f"it has an admin key: set {KEY} to it",
    f"{KEY} is not its admin key",
    f"Its log line `listening` has the URL of its admin listener as admin_url, and {DEFAULT_ADMIN} is the default.",
)
CLIENTS: Final = GatewayListener(
    "a",
    "listener for clients",
    CLIENT_KEY,
    f"it asks for a key: set {CLIENT_KEY} to yours",
    f"{CLIENT_KEY} is none of its keys",
    f"Its log line `listening` has the URL as url, and {DEFAULT_URL} is the default.",
)


class OperatorError(Exception):
    """A gateway does not execute a command; the text is the reason. It may quote a server's answer, so it has no control
    characters, which a terminal would obey.
    """

    def __init__(self, text: str) -> None:
        super().__init__(shown(text))


class OperatorRow(Struct, frozen=True):
    """A replica in GET /warmroute/replicas; fields that are not shown are omitted."""

    name: str
    pool: str | None
    up: bool
    error: str | None
    draining: bool
    leaving: bool
    inflight: int
    booked_tokens: int
    held_tokens: int
    hung: bool = False
    asleep: bool = False
    role: str = ""


class SourceRow(Struct, frozen=True):
    """A source of replicas."""

    name: str
    replicas: int
    problem: str | None = None
    note: str | None = None


class ReplicasAnswer(Struct, frozen=True):
    """GET /warmroute/replicas."""

    replicas: list[OperatorRow]
    sources: list[SourceRow]


class RefusedGatewayRow(Struct, frozen=True):
    """A gateway that is not followed."""

    gateway: str
    error: str


class SharingAnswer(Struct, frozen=True):
    """GET /warmroute/sharing."""

    configured: bool
    up: bool
    problem: str | None
    cluster: str | None
    gateways: list[Any]
    refused: list[RefusedGatewayRow]


class DrainAnswer(Struct, frozen=True):
    """POST /warmroute/drain and undrain."""

    name: str
    draining: bool
    inflight: int


class _Failure(Struct, frozen=True):
    message: str


class _CommandFailure(Struct, frozen=True):
    error: _Failure


T = TypeVar("T", bound=Struct)


def admins_of(options: argparse.Namespace) -> list[str]:
    return [admin.strip() for admin in options.admin.split(",")]


def ask(
    admin: str,
    method: str,
    path: str,
    body: Any = None,
    env: Mapping[str, str] = os.environ,
    answer_s: float = ANSWER_S,
    listener: GatewayListener = ADMIN,
) -> bytes:
    """The body of a successful answer. admin: URL of a gateway's listener, host:port, or unix:/path. Raises OperatorError."""
    headers = _credentials(listener, env)
    connection, prefix = _connected(admin, listener)
    connection.sock.settimeout(answer_s)
    watch, failed = _Watch(connection.sock, answer_s), None
    try:
        connection.request(method, prefix + path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        code, raw = response.status, _body(response)
    except (OSError, http.client.HTTPException, ValueError, OverflowError) as error:
        failed, code, raw = error, 0, b""
    finally:
        late = watch.end()
        connection.close()
    if late or isinstance(failed, TimeoutError):
        raise OperatorError(f"{admin} has not answered within {answer_s:g} s; it may still do it") from failed
    if failed or code >= 300:
        raise OperatorError(_refusal(admin, listener, code, raw, has_key=bool(headers))) from failed
    return raw


def stream(
    url: str,
    path: str,
    body: Any,
    env: Mapping[str, str] = os.environ,
    listener: GatewayListener = CLIENTS,
) -> Generator[bytes, None, None]:
    """The lines of the streamed answer to a POST, as they come. To be closed, and the connection with it. Raises OperatorError.

    A gateway sends a sign of life more often than every ANSWER_S.
    """
    headers = _credentials(listener, env)
    connection, prefix = _connected(url, listener)
    connection.sock.settimeout(ANSWER_S)
    try:
        connection.request("POST", prefix + path, json.dumps(body), headers)
        response = connection.getresponse()
        if response.status >= 300:
            raise OperatorError(_refusal(url, listener, response.status, _body(response), has_key=bool(headers)))
        while line := response.readline(MOST_BYTES):
            yield line
    except TimeoutError as error:
        raise OperatorError(f"{url} has sent nothing for {ANSWER_S:g} s") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise OperatorError(f"{url}: its answer broke off") from error
    finally:
        connection.close()


def _credentials(listener: GatewayListener, env: Mapping[str, str]) -> dict[str, str]:
    """The headers with the key, if there is one. Raises OperatorError."""
    key = env.get(listener.key, "").strip()  # a secret's file ends with a line end
    if not (key.isascii() and key.isprintable()):
        raise OperatorError(f"{listener.key} has a character that a header cannot have")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _connected(admin: str, listener: GatewayListener) -> tuple[http.client.HTTPConnection, str]:
    """A connection to a listener, and the prefix of its paths. Raises OperatorError."""
    try:
        connection, prefix = _connection(admin)
        with contextlib.ExitStack() as failed:
            failed.callback(connection.close)
            connection.connect()
            failed.pop_all()
    except ssl.SSLCertVerificationError as error:
        raise OperatorError(
            f"{admin} has a certificate that is not trusted: {error.verify_message}. SSL_CERT_FILE names a file of authorities"
        ) from error
    except OSError as error:
        why = error.strerror or error
        raise OperatorError(f"{admin} cannot be reached: {why}. Is the gateway running? {listener.hint}") from error
    except (http.client.HTTPException, ValueError) as error:
        raise OperatorError(
            f"{admin!r} is no URL of {listener.article} {listener.name}: {type(error).__name__}: {error}"
        ) from error
    return connection, prefix


class _Watch:
    """Cuts a connection that takes too long in total, even if bytes keep arriving."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock = sock
        self._late = False
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def _cut(self) -> None:
        self._late = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def end(self) -> bool:
        """End the watch. True if the connection was cut."""
        self._timer.cancel()
        return self._late


def _body(response: http.client.HTTPResponse) -> bytes:
    """The whole body. Raises HTTPException."""
    parts, size = list[bytes](), 0
    while part := response.read1():
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise http.client.HTTPException("its answer does not end")
    return b"".join(parts)


def _connection(admin: str) -> tuple[http.client.HTTPConnection, str]:
    """A connection that is not opened yet, and the prefix of its paths. Raises ValueError."""
    if admin.startswith(UNIX):
        return _UnixConnection(admin.removeprefix(UNIX)), ""
    parts = urlsplit(admin if "://" in admin else f"http://{admin}")
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    if parts.scheme not in kinds or not parts.hostname:
        raise ValueError(f"http://HOST:PORT, https://HOST:PORT or {UNIX}/PATH is expected")
    return kinds[parts.scheme](parts.hostname, parts.port, timeout=CONNECT_S), parts.path.rstrip("/")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(CONNECT_S)
        self.sock.connect(self._path)


def read(admin: str, raw: bytes, kind: type[T]) -> T:
    """The decoded answer. Raises OperatorError if no gateway answers so."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise OperatorError(_other(admin, 200)) from None


def whole(admin: str, raw: bytes, listener: GatewayListener = ADMIN) -> Any:
    """The answer as JSON. Raises OperatorError."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise OperatorError(_other(admin, 200, listener)) from None


def _refusal(admin: str, listener: GatewayListener, code: int, raw: bytes, *, has_key: bool) -> str:
    """The message of an error answer."""
    try:
        text = msgspec.json.decode(raw, type=_CommandFailure).error.message
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _other(admin, code, listener)
    if code == 401:
        text = listener.wrong if has_key else listener.unset
    return f"{admin}: {text}"


def _other(admin: str, code: int, listener: GatewayListener = ADMIN) -> str:
    """The message for an answer of another server. code: its status; 0: no answer."""
    answers = f"it answers {code}" if code else "it does not answer as HTTP servers do"
    return f"{admin} is no {listener.name} of a gateway of this release: {answers}"


def shown(text: str) -> str:
    """The text for a terminal, without control characters."""
    return "".join([char if char.isprintable() else "?" for char in text])


def picture(answer: ReplicasAnswer, sharing: SharingAnswer) -> list[RenderableType]:
    """A table of the replicas, and a line for each source and gateway."""
    from gateway.commands.tables import line, number, table, text

    columns = [
        text("replica", max((len(row.name) for row in answer.replicas), default=0)),
        text("pool"),
        text("state"),
        number("in flight"),
        number("booked tokens"),
        number("held tokens"),
    ]
    rows = [
        [
            shown(row.name),
            shown(f"{row.pool or ''} {row.role}".strip()),
            shown(_state(row)),
            *(f"{tokens:,}" for tokens in (row.inflight, row.booked_tokens, row.held_tokens)),
        ]
        for row in answer.replicas
    ]
    lines = list[str]()
    for source in answer.sources:
        remarks = [remark for remark in (source.problem, source.note) if remark]
        lines.append(", ".join([f"{source.name}: {source.replicas} replicas", *remarks]))
    if sharing.configured:
        up = f"other gateways: {len(sharing.gateways)}" if sharing.up else f"the store is away: {sharing.problem}"
        lines.append(f"sharing as {sharing.cluster}: {up}")
        lines += [f"not followed: gateway {each.gateway}: {each.error}" for each in sharing.refused]
    return [table(columns, rows), *[line(shown(each)) for each in lines]]


def _state(row: OperatorRow) -> str:
    states = {"leaving": row.leaving, "draining": row.draining, "hangs": row.hung, "asleep": row.asleep}
    words = [word for word, holds in states.items() if holds]
    return ", ".join([*words, *(["up"] if row.up else [f"down ({row.error or 'not probed yet'})"])])


def failure(error: OperatorError) -> str:
    return f"warmroute: {error}"


def failed(error: OperatorError) -> int:
    print(failure(error), file=sys.stderr)
    return 1
