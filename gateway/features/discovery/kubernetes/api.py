"""Lists and watches objects of one kind by the Kubernetes API: https://kubernetes.io/docs/reference/using-api/api-concepts/

A watch is a long answer with an event per line. The server ends it after a while, and the next watch continues from the last
version (`resourceVersion`). If a version is too old (410), the objects must be listed again.

All failures are KubernetesErrors. Everything that is read is bounded. A page of a list, or a line of a watch, is parsed in one
turn of the event loop: about 30 ms for 2 MB, the size of 100 pods. Unneeded parts are dropped before the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import aiohttp
import orjson

from gateway.cluster.member_source import SourceError
from gateway.config.addresses import base_url
from gateway.features.discovery.section import KubernetesConfig
from gateway.sockets import end_with_peer

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # in every pod, unless disabled
CONNECT_S: Final = 5.0
HEAD_S: Final = 15.0  # time limit for the head of an answer
LIST_S: Final = 20.0
WATCH_S: Final = 240.0  # a watch lasts this time plus up to a quarter, so that many gateways do not restart it together
GRACE_S: Final = 15.0  # a server that is silent for longer has failed
LOST_S: Final = 15  # the same for a connection
MAX_OBJECTS: Final = 10_000
MAX_PAGE_BYTES: Final = 16 << 20
MAX_TOKEN_BYTES: Final = 64 << 10
MAX_LINE_BYTES: Final = 4 << 20  # a slice has up to 1,000 endpoints of 400 bytes
_PAGE: Final = 100  # objects per answer; a pod has 10 to 20 kB
_MAX_TEXT: Final = 200

BOOKMARK, DELETED = "BOOKMARK", "DELETED"
GONE: Final = 410
_TYPES: Final = ("ADDED", "MODIFIED", DELETED, BOOKMARK)

Object = Mapping[str, Any]


class KubernetesError(SourceError):
    """The server sent no usable answer. retry_after_s: the pause that it asks for."""

    def __init__(self, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class RelistNeeded(KubernetesError):
    """Events were missed, so the objects must be listed again. expected: the server keeps events for a limited time (410)."""

    def __init__(self, text: str, *, expected: bool = False) -> None:
        super().__init__(text)
        self.expected = expected


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """Access to an API server. prefix: for the names of its pods. token_file: None: no token. ca_file: None: the system's
    certificates.
    """

    url: str
    namespace: str
    prefix: str = ""
    token_file: Path | None = None
    ca_file: Path | None = None


def access_of(config: KubernetesConfig, env: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> ApiAccess:
    """The configured access. Raises KubernetesError outside of a cluster, if the configuration names no server."""
    own = _own_namespace(account)
    namespace = config.namespace or own
    prefix = "" if namespace == own else f"{namespace}/"
    token_file, ca_file = (Path(each) if each else None for each in (config.token_file, config.ca_file))
    if config.server:  # possibly another cluster, which must not get this cluster's token
        return ApiAccess(config.server, namespace, prefix, token_file, ca_file)
    host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise KubernetesError("this is not a Kubernetes pod (KUBERNETES_SERVICE_HOST is not set): set kubernetes.server")
    url = base_url(host, int(port) if port.isdecimal() else 443, tls=True)
    return ApiAccess(url, namespace, prefix, token_file or account / "token", ca_file or account / "ca.crt")


def _own_namespace(account: Path) -> str:
    try:
        return (account / "namespace").read_text("utf-8").strip() or "default"
    except OSError:
        return "default"


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ObjectList(Generic[T]):
    """The parsed objects, by name, at this version."""

    objects: Mapping[str, T]
    version: str


@dataclass(frozen=True, slots=True)
class Event:
    """type: ADDED, MODIFIED, DELETED, or BOOKMARK, which has only a version."""

    type: str
    name: str
    version: str
    object: Object


class Api:
    """The objects of one path with certain labels. path: relative to the server's URL, without a leading slash. watch_s:
    duration of a watch. head_s: time limit for the head of an answer. chance: varies the duration of watches, so that many
    gateways do not restart them together.
    """

    def __init__(
        self,
        access: ApiAccess,
        path: str,
        labels: str,
        watch_s: float,
        chance: Callable[[], float],
        head_s: float = HEAD_S,
    ) -> None:
        self._access = access
        self._url = f"{access.url}/{path}"
        self._labels = labels
        self._watch_s = watch_s
        self._chance = chance
        self._head_s = head_s
        self._session: aiohttp.ClientSession | None = None

    async def renew(self) -> None:
        """Called after a failure: reloads certificates from a file, because they may have been replaced."""
        if self._access.ca_file:
            await self.close()

    async def close(self) -> None:
        """Closes the connections. The next request opens them again."""
        session, self._session = self._session, None
        if session:
            await session.close()

    async def list_all(self, read: Callable[[Object], T]) -> ObjectList[T]:
        """All objects, parsed by `read`. Raises KubernetesError."""
        objects: dict[str, T] = {}
        params = {"limit": str(_PAGE)}
        for _ in range(MAX_OBJECTS // _PAGE):
            async with self._answer(params, aiohttp.ClientTimeout(LIST_S, connect=CONNECT_S)) as answer:
                page = _json(await _bounded(answer))
            try:
                objects.update((str(each["metadata"]["name"]), read(each)) for each in page.get("items") or ())
                version, more = str(page["metadata"]["resourceVersion"]), page["metadata"].get("continue")
            except (KeyError, TypeError, AttributeError) as error:
                raise KubernetesError("the server's list cannot be read") from error
            if not more:
                return ObjectList(objects, version)
            params["continue"] = str(more)
        raise KubernetesError(f"the server lists more than {MAX_OBJECTS:,} objects")

    async def watch(self, version: str) -> AsyncGenerator[list[Event], None]:
        """Events after that version, until the server ends the watch. The first batch is empty: the watch has begun.

        Raises KubernetesError; RelistNeeded if the version is too old, or an event cannot be parsed.
        """
        lasts_s = self._watch_s * (1 + self._chance() / 4)
        limits = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=lasts_s + GRACE_S)
        params = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(int(lasts_s) or 1),
        }
        async with self._answer(params, limits) as answer:
            yield []
            async for lines in _lines(answer):
                events = list[Event]()
                for line in lines:
                    try:
                        events.append(_event(line))
                    except RelistNeeded:
                        yield events  # the earlier events are valid
                        raise
                yield events

    @contextlib.asynccontextmanager
    async def _answer(self, params: Mapping[str, str], limits: aiohttp.ClientTimeout) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer with status 200. Raises KubernetesError, also for errors while it is read."""
        try:
            headers = {"Accept": "application/json"}
            if self._access.token_file:  # read each time, because the kubelet replaces it about every hour
                headers["Authorization"] = f"Bearer {await asyncio.to_thread(_token_in, self._access.token_file)}"
            if self._session is None:
                self._session = await _session_of(self._access)
            async with asyncio.timeout(self._head_s):
                answer = await self._session.get(
                    self._url,
                    params={"labelSelector": self._labels, **params},
                    headers=headers,
                    timeout=limits,
                    allow_redirects=False,
                )
            async with answer:
                if answer.status != 200:
                    raise await _error_of(answer)
                yield answer
        except aiohttp.ClientError as error:
            raise KubernetesError(str(error)[:_MAX_TEXT] or type(error).__name__) from error
        except (OSError, ValueError) as failure:  # also time-outs, and tokens that are not valid in a header
            raise KubernetesError(str(failure)[:_MAX_TEXT] or "no answer in time") from failure


async def _session_of(access: ApiAccess) -> aiohttp.ClientSession:
    """Raises KubernetesError if the certificates cannot be read."""
    try:
        tls = await asyncio.to_thread(_tls_of, access.ca_file)
    except OSError as error:
        raise KubernetesError(f"{access.ca_file}: {error.strerror or error}") from error
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls, socket_factory=_socket_with_keepalive))


def _tls_of(ca_file: Path | None) -> ssl.SSLContext:
    if ca_file:
        _check_regular(ca_file)
    return ssl.create_default_context(cafile=ca_file)


def _token_in(path: Path) -> str:
    _check_regular(path)
    with path.open("rb") as file:
        token = file.read(MAX_TOKEN_BYTES + 1)
    if len(token) > MAX_TOKEN_BYTES:
        raise OSError(f"{path} is larger than {MAX_TOKEN_BYTES >> 10} KiB")
    return token.decode("utf-8").strip()


def _check_regular(path: Path) -> None:
    """Raises OSError for other files: reading a pipe would block the thread for ever."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")


def _socket_with_keepalive(address: Any) -> socket.socket:
    """A lost server is detected within 15 s, or within three if another machine has its address."""
    made = socket.socket(*address[:3])
    end_with_peer(made, LOST_S)
    return made


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > MAX_PAGE_BYTES:
            raise KubernetesError(f"an answer of more than {MAX_PAGE_BYTES >> 20} MiB")
    return bytes(body)


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[list[bytes]]:
    """Batches of complete lines; the rest of a chunk waits for the next one. Raises RelistNeeded if a line is too long."""
    rest = bytearray()
    async for chunk in answer.content.iter_any():
        at = chunk.rfind(b"\n")
        if at < 0:
            rest += chunk
        else:
            whole, rest = bytes(rest) + chunk[:at], bytearray(chunk[at + 1 :])
            yield [line for line in whole.split(b"\n") if line.strip()]
        if len(rest) > MAX_LINE_BYTES:
            raise RelistNeeded(f"an event of more than {MAX_LINE_BYTES >> 20} MiB")


def _event(line: bytes) -> Event:
    """Raises RelistNeeded."""
    try:
        found = orjson.loads(line)
        type_, object_ = str(found["type"]), found["object"]
        if type_ == "ERROR":
            code = object_.get("code")
            raise RelistNeeded(_text(code, object_.get("message")), expected=code == GONE)
        if type_ not in _TYPES:
            raise RelistNeeded(f"an event of the type {type_[:20]!r}")
        about = object_["metadata"]
        return Event(type_, "" if type_ == BOOKMARK else str(about["name"]), str(about["resourceVersion"]), object_)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise RelistNeeded("an event cannot be read") from error


def _json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise KubernetesError("the server's answer is not JSON") from error


async def _error_of(answer: aiohttp.ClientResponse) -> KubernetesError:
    """The error of an answer with another status than 200."""
    message = ""
    with contextlib.suppress(KubernetesError, AttributeError):
        message = str(_json(await _bounded(answer)).get("message") or "")
    try:
        retry_after_s = float(answer.headers.get("Retry-After", 0))
    except ValueError:  # a date, which Kubernetes servers do not send
        retry_after_s = 0.0
    text = _text(answer.status, message)
    return RelistNeeded(text, expected=True) if answer.status == GONE else KubernetesError(text, retry_after_s)


def _text(code: object, message: object) -> str:
    return f"HTTP {str(code)[:3]}: {str(message or 'no reason given')[:_MAX_TEXT]}"
