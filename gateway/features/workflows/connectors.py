"""Connectors: services beside models. The operator registers them; the steps of a document call them by name.

    POST url, `with` as JSON, Idempotency-Key: RUN.STEP ──► JSON

Redirects are failures, and link-local and metadata addresses are refused after each resolution of the name. No header of the
client is sent. Each call has its own connection.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from gateway.config.live import Live
from gateway.errors import GatewayError, ReplicaFailure
from gateway.features.workflows.language.values import MAX_VALUE_BYTES, EvaluationError, bytes_of
from gateway.features.workflows.running.messages import StepFailure
from gateway.features.workflows.section import ConnectorConfig
from gateway.upstream.client import ReplicaCall, UpstreamClient
from gateway.upstream.resolver import Resolver

_REPEATED: Final = frozenset([408, 425, 429])


class Connectors:
    """The operator's connectors. configured: at present, by name. env: with their keys."""

    def __init__(
        self,
        configured: Callable[[], Mapping[str, ConnectorConfig]],
        live: Live,
        resolver: Resolver | None = None,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        self._configured = configured
        self._client = UpstreamClient(live, resolver)
        self._env = env

    @property
    def repeatable(self) -> frozenset[str]:
        """Names of connectors that may be called again."""
        return frozenset(name for name, each in self._configured().items() if each.retries)

    def allows(self, use: str, tenant: str) -> bool:
        """True if this tenant may use this connector."""
        found = self._configured().get(use)
        return found is not None and (not found.tenants or tenant in found.tenants)

    async def call(self, use: str, arguments: Any, key: str) -> Any:
        """The answer, or a StepFailure. key: of idempotency. Raises CancelledError."""
        connector = self._configured().get(use)
        if connector is None:
            return _failed(f"There is no connector {use!r}.", repeat=False)
        try:
            async with asyncio.timeout(connector.timeout_s):
                return await self._call(use, connector, orjson.dumps(arguments), key)
        except TimeoutError:
            return _failed(f"The connector {use!r} did not answer within {connector.timeout_s:g} s.", repeat=True)
        except ReplicaFailure as failure:
            return _failed(f"The connector {use!r} failed: {failure.reason}.", repeat=True)
        except GatewayError as error:
            return _failed(f"The connector {use!r} failed: {error.code}.", repeat=not error.permanent)

    async def _call(self, use: str, connector: ConnectorConfig, body: bytes, key: str) -> Any:
        parts = urlsplit(connector.url)
        base, path = f"{parts.scheme}://{parts.netloc}", (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._client.guard(base)
        lines = f"Accept: application/json\r\nContent-Type: application/json\r\nIdempotency-Key: {key}\r\n"
        if connector.key_env:
            lines += f"Authorization: Bearer {self._env.get(connector.key_env, '')}\r\n"
        request = ReplicaCall("POST", path, lines.encode("latin-1", "replace"), body, repeatable=False)
        answer = await self._client.open(base, request, connector.timeout_s, fresh=True)
        try:
            if answer.status != 200:
                repeat = answer.status >= 500 or answer.status in _REPEATED
                return _failed(f"The connector {use!r} answered {answer.status}.", repeat=repeat)
            raw = b"" if (answer.head.length or 0) > MAX_VALUE_BYTES else await answer.read_begin(MAX_VALUE_BYTES)
            if len(raw) > MAX_VALUE_BYTES or not answer.exhausted:
                return _failed(f"The answer of the connector {use!r} has more than a MiB.", repeat=False)
        finally:
            answer.close()
        try:
            value = orjson.loads(raw)
            bytes_of(value)
        except (ValueError, EvaluationError) as error:
            return _failed(f"The answer of the connector {use!r} cannot be used: {error}.", repeat=False)
        return value

    def close(self) -> None:
        self._client.close()


def _failed(message: str, *, repeat: bool) -> StepFailure:
    return StepFailure("connector_failed", message, 502, repeat)
