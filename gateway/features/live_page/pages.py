"""Serves the files of the live page (`static/`) from the package. They are read once, at the first request.

They are public, contain nothing of this gateway, and are served without a key; the page's data come from endpoints that require
one. No file refers to an external address: the policy below forbids a browser to load anything else, and to run inline scripts
or apply inline styles.

A name is looked up in a table, and never used as a path.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from gateway.errors import GatewayError
from gateway.server.http.request import HttpRequest
from gateway.server.routing import Response, Route, get

ROOT: Final = "/warmroute/ui"
INDEX: Final = "index.html"
TYPES: Final[Mapping[str, str]] = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
    "json": "application/json",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # revalidated each time, mostly with the answer 304
}


_NEVER: Final = re.compile(r"q\s*=\s*0(?:\.0{0,3})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class StaticFile:
    """packed: the body, compressed by gzip. etag: of the body."""

    body: bytes
    packed: bytes
    etag: str
    content_type: str


class Pages:
    """The handlers; `routes` mounts them."""

    def routes(self) -> list[Route]:
        return [get(ROOT, self.redirect), get(ROOT + "/{name:.*}", self.page)]

    async def redirect(self, _request: HttpRequest) -> Response:
        """Redirects to the folder, so that relative names of files work, also behind a proxy that adds a path in front."""
        return Response(status=308, headers={**_HEADERS, "Location": "ui/"})

    async def page(self, request: HttpRequest) -> Response:
        name = request.parameters["name"] or INDEX
        page = self._pages.get(name)
        if page is None:
            raise GatewayError(404, "not_found", f"The live page has no file {name[:100]!r}; it begins at {ROOT}/.")
        zipped = _takes_gzip(request.fields.joined("Accept-Encoding"))
        etag, body = (f"{page.etag}-gzip", page.packed) if zipped else (page.etag, page.body)
        headers = {**_HEADERS, "ETag": f'"{etag}"', "Vary": "Accept-Encoding"}
        known = [each.strip().removeprefix("W/") for each in request.fields.joined("If-None-Match").split(",")]
        if f'"{etag}"' in known or "*" in known:
            return Response(status=304, headers=headers)
        if zipped:
            headers["Content-Encoding"] = "gzip"
        return Response(body, content_type=page.content_type, headers=headers)

    @cached_property
    def _pages(self) -> dict[str, StaticFile]:
        found: dict[str, StaticFile] = {}
        _collect(files("gateway.features.live_page") / "static", "", found)
        return found


def _takes_gzip(accepted: str) -> bool:
    """True if an Accept-Encoding header allows gzip: it contains gzip, or else *, and not with q=0."""
    taken = dict[str, bool]()
    for part in accepted.lower().split(","):
        name, _, quality = part.partition(";")
        taken[name.strip()] = not _NEVER.fullmatch(quality.strip())
    return taken.get("gzip", taken.get("*", False))


def _collect(folder: Traversable, prefix: str, found: dict[str, StaticFile]) -> None:
    for each in folder.iterdir():
        name = prefix + each.name
        if each.is_dir():
            _collect(each, name + "/", found)
        elif (suffix := name.rpartition(".")[2]) in TYPES:
            body = each.read_bytes()
            etag = hashlib.sha256(body).hexdigest()[:32]
            found[name] = StaticFile(body, gzip.compress(body, mtime=0), etag, TYPES[suffix])
