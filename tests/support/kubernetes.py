"""A Kubernetes API server for tests of lists and watches, with the observed behaviour of kube-apiserver 1.20.

Objects have a resourceVersion that grows with each change. A watch replays the events of a bounded window; an older version
gets status 200 and an ERROR event with the code 410. Streams end at `timeoutSeconds`, can be cut, and have bookmarks. The
attributes make the server hostile or defective.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

Object = dict[str, Any]
SLICES, PODS = "endpointslices", "pods"
HISTORY = 50


def endpoint(address: str, pod: str = "", uid: str = "", **conditions: bool) -> Object:
    """An endpoint of an EndpointSlice."""
    made: Object = {"addresses": [address], "conditions": {"ready": True, "serving": True, "terminating": False, **conditions}}
    if pod:
        made["targetRef"] = {"kind": "Pod", "namespace": "default", "name": pod, "uid": uid or f"uid-of-{pod}"}
    return made


def slice_of(name: str, *endpoints: Object, service: str = "vllm", port: int = 8000, family: str = "IPv4") -> Object:
    return {
        "metadata": {"name": name, "namespace": "default", "labels": {"kubernetes.io/service-name": service}},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
    }


def pod_of(name: str, address: str, number: int = 8000, *, ready: bool = True, uid: str = "", **annotations: str) -> Object:
    """annotations: without our prefix, with underscores for dashes."""
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid or f"uid-of-{name}",
            "labels": {"app": "vllm"},
            "annotations": {f"warmroute.io/{key.replace('_', '-')}": value for key, value in annotations.items()},
        },
        "spec": {"containers": [{"name": "vllm", "ports": [{"containerPort": number, "name": "http"}]}]},
        "status": {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


class FakeKubernetes:
    """window: number of stored events.

    token: required of clients, "" for none. bookmark_s: between two bookmarks, 0 for none. refusals: statuses and headers of
    the next answers. lines: sent first in each watch. late: events sent first in the next watch of their path: (path, type,
    object), as in `history`, which has the last of all events. lists, watches: number of requests. expired: number of watches
    with a version that is too old. bookmarks: the versions sent in them. page: the answer to each list; None: not JSON.
    hold_watches: while cleared, watches are not answered; held: their number.
    """

    def __init__(self, window: int = 100) -> None:
        self.version = 100
        self.token = ""
        self.bookmark_s = 0.0
        self.refusals: list[tuple[int, dict[str, str]]] = []
        self.lines: list[bytes] = []
        self.late: list[tuple[str, str, Object]] = []
        self.history: list[tuple[str, str, Object]] = []
        self.lists = self.watches = self.expired = 0
        self.page: object = ...
        self.hold_watches = asyncio.Event()
        self.hold_watches.set()
        self.held = 0
        self.asked: list[web.Request] = []
        self.bookmarks: list[int] = []
        self.url = ""
        self._window = window
        self._objects: dict[tuple[str, str], Object] = {}
        self._events: list[tuple[int, str, str, Object]] = []  # version, path, type, object
        self._compacted = 0
        self._changed = asyncio.Condition()
        self._streams: dict[int, web.Request] = {}
        self._port = 0

    # -- what happens in the cluster

    async def put(self, path: str, object_: Object) -> None:
        """Adds an object, or replaces the object of its name."""
        self.version += 1
        made = copy.deepcopy(object_)
        made["metadata"]["resourceVersion"] = str(self.version)
        key = path, made["metadata"]["name"]
        kind = "MODIFIED" if key in self._objects else "ADDED"
        self._objects[key] = made
        await self._event(path, kind, made)

    async def delete(self, path: str, name: str) -> None:
        self.version += 1
        gone = copy.deepcopy(self._objects.pop((path, name)))
        gone["metadata"]["resourceVersion"] = str(self.version)
        await self._event(path, "DELETED", gone)

    def take(self, path: str, name: str) -> Object:
        """Removes an object without an event."""
        return self._objects.pop((path, name))

    async def compact(self) -> None:
        """Drops all earlier events."""
        self._events.clear()
        self._compacted = self.version
        async with self._changed:
            self._changed.notify_all()

    def restore(self, version: int) -> None:
        """Restores the objects of that version, without events."""
        self.version, self._compacted = version, 0
        self._events.clear()

    async def _event(self, path: str, kind: str, object_: Object) -> None:
        self._events.append((self.version, path, kind, copy.deepcopy(object_)))
        self.history = [*self.history[-HISTORY:], (path, kind, copy.deepcopy(object_))]
        while len(self._events) > self._window:
            self._compacted = self._events.pop(0)[0]
        async with self._changed:
            self._changed.notify_all()

    def cut_streams(self) -> None:
        """Resets the connections of all watches."""
        cut, self._streams = self._streams, {}
        for request in cut.values():
            if request.transport:
                request.transport.abort()

    # -- the server

    @contextlib.asynccontextmanager
    async def serving(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeKubernetes]:
        """Serves at the same port each time."""
        app = web.Application()
        app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/{namespace}/{path:endpointslices}", self._get)
        app.router.add_get("/api/v1/namespaces/{namespace}/{path:pods}", self._get)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port, ssl_context=tls)
        await site.start()
        self._port = runner.addresses[0][1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._port}"
        try:
            yield self
        finally:
            self.cut_streams()
            await runner.cleanup()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        watching = request.query.get("watch") == "1"
        self.watches += watching
        self.lists += not watching
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if self.refusals:
            code, headers = self.refusals.pop(0)
            return _status(code, f"refused with {code}", headers)
        if not watching:
            return self._list(request)
        if not self.hold_watches.is_set():
            self.held += 1
            await self.hold_watches.wait()
        return await self._watch(request)

    def _list(self, request: web.Request) -> web.Response:
        if self.page is not ...:
            return web.json_response(self.page) if self.page is not None else web.Response(body=b"no json")
        path, selected = request.match_info["path"], _selector(request)
        found = [each for (where, _), each in sorted(self._objects.items()) if where == path and selected(each)]
        begin = int(request.query.get("continue") or 0)
        end = begin + int(request.query.get("limit") or len(found) or 1)
        about = {"resourceVersion": str(self.version), **({"continue": str(end)} if end < len(found) else {})}
        return web.json_response({"metadata": about, "items": found[begin:end]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        self._streams[id(request)] = request
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                for line in self.lines:
                    await answer.write(line)
                await self._tell(request, answer)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._streams.pop(id(request), None)
        return answer

    async def _tell(self, request: web.Request, answer: web.StreamResponse) -> None:
        path, selected, since = request.match_info["path"], _selector(request), int(request.query["resourceVersion"])
        late = [(kind, object_) for where, kind, object_ in self.late if where == path and selected(object_)]
        self.late = [each for each in self.late if each[0] != path]
        for kind, object_ in late:
            await answer.write(_line(kind, object_))
        while id(request) in self._streams:
            if since < self._compacted:
                self.expired += 1
                await answer.write(
                    _line("ERROR", _status_object(410, f"too old resource version: {since} ({self._compacted})"))
                )
                return
            for version, where, kind, object_ in [each for each in self._events if each[0] > since]:
                since = version
                if where == path and selected(object_):
                    await answer.write(_line(kind, object_))
            try:
                async with asyncio.timeout(self.bookmark_s or None), self._changed:
                    if since >= self.version:
                        await self._changed.wait()
            except TimeoutError:
                if since < self.version:  # an event has come at the same time: it is told first
                    continue
                if request.query.get("allowWatchBookmarks") == "true":
                    since = self.version
                    self.bookmarks.append(since)
                    await answer.write(_line("BOOKMARK", {"metadata": {"resourceVersion": str(since)}}))


def _selector(request: web.Request) -> Callable[[Object], bool]:
    wanted = [each.split("=", 1) for each in request.query.get("labelSelector", "").split(",") if each]
    return lambda object_: all(object_["metadata"]["labels"].get(key) == value for key, value in wanted)


def _line(kind: str, object_: Object) -> bytes:
    return json.dumps({"type": kind, "object": object_}).encode() + b"\n"


def _status_object(code: int, message: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "code": code}


def _status(code: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(_status_object(code, message), status=code, headers=headers)
