"""Reads the public keys of an issuer: its discovery document, then the key set at the address in that document.

    ISSUER/.well-known/openid-configuration ── jwks_uri ──► keys          with `jwks_url`: only the second step

Redirects are failures. A document has at most MAX_BYTES; both together take at most FETCH_S. An address from the discovery
document must be https and not link-local.
"""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import urlsplit

from gateway.config.addresses import AddressError
from gateway.config.live import Live
from gateway.config.schema import TlsConfig
from gateway.errors import GatewayError, ReplicaFailure
from gateway.features.keys.section import OidcConfig
from gateway.features.keys.tokens.jwks import JwksError, PublicKey, keys_of, parsed
from gateway.features.keys.urls import jwks_url
from gateway.upstream.access.options import ConnectionOptions
from gateway.upstream.client import ReplicaCall, UpstreamClient
from gateway.upstream.resolver import Resolver

DISCOVERY: Final = "/.well-known/openid-configuration"
MAX_BYTES: Final = 512 << 10
FETCH_S: Final = 10.0
_HEADERS: Final = b"Accept: application/json\r\nUser-Agent: warmroute\r\n"


class FetchFailed(Exception):
    """The keys could not be read. The message says why."""


class Fetcher:
    """Reads key sets through its own client."""

    def __init__(self, live: Live, resolver: Resolver | None = None) -> None:
        self._client = UpstreamClient(live, resolver)

    async def fetch(self, issuer: OidcConfig) -> list[PublicKey]:
        """The usable public keys of the issuer. Raises FetchFailed."""
        url = issuer.jwks_url or issuer.issuer.rstrip("/") + DISCOVERY
        try:
            async with asyncio.timeout(FETCH_S):
                if not issuer.jwks_url:
                    url = await self._discovered(issuer, url)
                document = await self._read(url, issuer.ca_file, guarded=not issuer.jwks_url)
                return await asyncio.to_thread(keys_of, document)
        except TimeoutError:
            raise FetchFailed(f"{url} did not answer within {FETCH_S:g} s") from None
        except (ReplicaFailure, GatewayError) as failure:
            raise FetchFailed(f"{url}: {failure.message}") from failure
        except (JwksError, OSError) as error:
            raise FetchFailed(f"{url}: {error}") from error

    async def _discovered(self, issuer: OidcConfig, url: str) -> str:
        """The address of the key set. Raises FetchFailed, JwksError and the exceptions of _read."""
        document = parsed(await self._read(url, issuer.ca_file, guarded=False))
        if document.get("issuer") != issuer.issuer:
            raise FetchFailed(f"{url} is the document of another issuer: {str(document.get('issuer'))[:200]!r}")
        found = document.get("jwks_uri")
        if not isinstance(found, str) or not found or len(found) > 2048:
            raise FetchFailed(f"{url} has no jwks_uri")
        try:
            return jwks_url(found)
        except AddressError as error:
            raise FetchFailed(f"{url}: jwks_uri: {error}") from error

    async def _read(self, url: str, ca_file: str, *, guarded: bool) -> bytes:
        """guarded: refuse link-local addresses. Raises FetchFailed, ReplicaFailure, GatewayError."""
        parts = urlsplit(url)
        base, path = f"{parts.scheme}://{parts.netloc}", (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if guarded:
            self._client.guard(base)
        if ca_file and parts.scheme == "https":
            self._client.set_options(base, ConnectionOptions(tls=TlsConfig(ca_file=ca_file)))
        try:
            answer = await self._client.open(base, ReplicaCall("GET", path, _HEADERS, b"", probe=True), FETCH_S, fresh=True)
            try:
                if answer.status != 200:
                    further = " (redirects are not followed: set jwks_url)" if 300 <= answer.status < 400 else ""
                    raise FetchFailed(f"{url} answered {answer.status}{further}")
                return await answer.read(MAX_BYTES)
            finally:
                answer.close()
        finally:
            self._client.forget(base)
