"""Lists and watches objects of one kind by Kubernetes' API: https://kubernetes.io/docs/reference/using-api/api-concepts/

A watch is one long answer, with an event in each line. The server ends it after a while, and the next one goes on from the last
version of the objects that was seen (`resourceVersion`). Who has fallen too far behind is told so (410), and has to list again.

Whatever goes wrong is a KubernetesError. All that is read has bounds. A page of a list, or a line of a watch, is parsed within
one turn of the event loop: some 30 ms for 2 MB, as 100 pods have. What is not needed of it is dropped before the next one.
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

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # in every pod, unless that is turned off
CONNECT_S: Final = 5.0
HEAD_S: Final = 15.0  # for the head of an answer
LIST_S: Final = 20.0
WATCH_S: Final = 240.0  # a watch lasts that long, and up to a quarter longer: many gateways do not begin anew at once
GRACE_S: Final = 15.0  # beyond that, the server is away
MAX_OBJECTS: Final = 10_000
MAX_PAGE_BYTES: Final = 16 << 20
MAX_TOKEN_BYTES: Final = 64 << 10
MAX_LINE_BYTES: Final = 4 << 20  # a slice has up to 1,000 endpoints, of 400 bytes each
_PAGE: Final = 100  # objects of one answer: a pod has 10 to 20 kB
_MAX_TEXT: Final = 200

BOOKMARK, DELETED = "BOOKMARK", "DELETED"
GONE: Final = 410
_TYPES: Final = ("ADDED", "MODIFIED", DELETED, BOOKMARK)

Object = Mapping[str, Any]


class KubernetesError(SourceError):
    """No answer, or none that can be used. retry_after_s: what the server asks for."""

    def __init__(self, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class CannotGoOn(KubernetesError):
    """Events have been missed: list again. expected: the server keeps events for a while only (410)."""

    def __init__(self, text: str, *, expected: bool = False) -> None:
        super().__init__(text)
        self.expected = expected


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """How to reach an API server. prefix: of the names of its pods. token_file: None: there is no token; ca_file: None: the
    system's certificates.
    """

    url: str
    namespace: str
    prefix: str = ""
    token_file: Path | None = None
    ca_file: Path | None = None


def access_of(config: KubernetesConfig, env: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> ApiAccess:
    """Raises KubernetesError outside of a cluster, if the configuration does not name a server."""
    own = _own_namespace(account)
    namespace = config.namespace or own
    prefix = "" if namespace == own else f"{namespace}/"
    token_file, ca_file = (Path(each) if each else None for each in (config.token_file, config.ca_file))
    if config.server:  # another cluster, perhaps: it does not get this one's token
        return ApiAccess(config.server, namespace, prefix, token_file, ca_file)
    host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise KubernetesError("this is no pod of Kubernetes (KUBERNETES_SERVICE_HOST is not set): set kubernetes.server")
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
    """What was read of all objects, by their names, as they were at this version."""

    objects: Mapping[str, T]
    version: str


@dataclass(frozen=True, slots=True)
class Event:
    """type: ADDED, MODIFIED, DELETED, or BOOKMARK, which has nothing but a version."""

    type: str
    name: str
    version: str
    object: Object


class Api:
    """The objects of one path with certain labels. path: below the server's URL, without a slash at its beginning. watch_s: how
    long a watch lasts. head_s: for the head of an answer. chance: spreads the watches of many gateways over time.
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
        """After a failure: certificates of a file are read again, for they may have been replaced."""
        if self._access.ca_file:
            await self.close()

    async def close(self) -> None:
        """It opens again at the next request."""
        session, self._session = self._session, None
        if session:
            await session.close()

    async def listed(self, read: Callable[[Object], T]) -> ObjectList[T]:
        """What `read` returns for each of them. Raises KubernetesError."""
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
        """What has happened since that version, as it comes, until the server ends it. First nothing: the watch has begun.

        Raises KubernetesError; CannotGoOn if the version is not kept any more, or an event cannot be read.
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
                    except CannotGoOn:
                        yield events  # those before it are good
                        raise
                yield events

    @contextlib.asynccontextmanager
    async def _answer(self, params: Mapping[str, str], limits: aiohttp.ClientTimeout) -> AsyncIterator[aiohttp.ClientResponse]:
        """A good one. Raises KubernetesError, also for errors while it is read."""
        try:
            headers = {"Accept": "application/json"}
            if self._access.token_file:  # the kubelet replaces it every hour or so
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
        except (OSError, ValueError) as failure:  # a time-out too; a token that no header can have
            raise KubernetesError(str(failure)[:_MAX_TEXT] or "no answer in time") from failure


async def _session_of(access: ApiAccess) -> aiohttp.ClientSession:
    """Raises KubernetesError if the certificates cannot be read."""
    try:
        tls = await asyncio.to_thread(_tls_of, access.ca_file)
    except OSError as error:
        raise KubernetesError(f"{access.ca_file}: {error.strerror or error}") from error
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls, socket_factory=_kept_alive))


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
    """Reading a pipe would block the thread for good. Raises OSError."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")


def _kept_alive(address: Any) -> socket.socket:
    """A server that is gone without a word is noticed within 15 s; that another one has its address, within three."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not on every system
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > MAX_PAGE_BYTES:
            raise KubernetesError(f"an answer of more than {MAX_PAGE_BYTES >> 20} MiB")
    return bytes(body)


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[list[bytes]]:
    """Whole lines, those that have come together: the last one may have been cut off. Raises CannotGoOn if one is too long."""
    rest = bytearray()
    async for chunk in answer.content.iter_any():
        at = chunk.rfind(b"\n")
        if at < 0:
            rest += chunk
        else:
            whole, rest = bytes(rest) + chunk[:at], bytearray(chunk[at + 1 :])
            yield [line for line in whole.split(b"\n") if line.strip()]
        if len(rest) > MAX_LINE_BYTES:
            raise CannotGoOn(f"an event of more than {MAX_LINE_BYTES >> 20} MiB")


def _event(line: bytes) -> Event:
    """Raises CannotGoOn."""
    try:
        found = orjson.loads(line)
        type_, object_ = str(found["type"]), found["object"]
        if type_ == "ERROR":
            code = object_.get("code")
            raise CannotGoOn(_text(code, object_.get("message")), expected=code == GONE)
        if type_ not in _TYPES:
            raise CannotGoOn(f"an event of the type {type_[:20]!r}")
        about = object_["metadata"]
        return Event(type_, "" if type_ == BOOKMARK else str(about["name"]), str(about["resourceVersion"]), object_)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CannotGoOn("an event cannot be read") from error


def _json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise KubernetesError("the server's answer is no JSON") from error


async def _error_of(answer: aiohttp.ClientResponse) -> KubernetesError:
    """Of an answer with another status than 200."""
    message = ""
    with contextlib.suppress(KubernetesError, AttributeError):
        message = str(_json(await _bounded(answer)).get("message") or "")
    try:
        retry_after_s = float(answer.headers.get("Retry-After", 0))
    except ValueError:  # a date, which servers of Kubernetes do not send
        retry_after_s = 0.0
    text = _text(answer.status, message)
    return CannotGoOn(text, expected=True) if answer.status == GONE else KubernetesError(text, retry_after_s)


def _text(code: object, message: object) -> str:
    return f"HTTP {str(code)[:3]}: {str(message or 'no reason given')[:_MAX_TEXT]}"
