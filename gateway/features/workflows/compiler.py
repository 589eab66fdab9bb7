"""Documents and programs of clients as workflows: a program is compiled in the parser process, a long document in a thread."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from xxhash import xxh3_128_digest

from gateway.core import Core
from gateway.errors import GatewayError
from gateway.features.workflows.language.compiling import JSON, compile_text
from gateway.features.workflows.language.faults import refused
from gateway.features.workflows.language.reading import MAX_DOCUMENT_BYTES
from gateway.features.workflows.language.workflow import Workflow

COMPILE: Final = "workflows.compile"
CACHED_BYTES: Final = 16 << 10  # of a document whose workflow is kept for the next run
_INLINE_BYTES: Final = 4 << 10  # of a document that is compiled in the event loop: 4 ms
_MAX_CACHED: Final = 64
MAX_BODY_BYTES: Final = 16 << 20  # of a request: its inputs have at most MAX_MESSAGES_BYTES, but texts may be escaped


class WorkflowCompiler:
    """Compiles documents and programs; remembers the workflows of some documents."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._compiled: OrderedDict[bytes, Workflow] = OrderedDict()

    async def program(self, program: str, client: str) -> Workflow:
        """client: whose share of the parser process it takes. Raises GatewayError."""
        text = program.encode("utf-8", "surrogatepass")
        (document,) = await self._core.parsing.process.run((COMPILE,), text, client)
        return await self.document(document)

    async def document(self, raw: bytes) -> Workflow:
        """raw: JSON. Raises DocumentError."""
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise refused("workflow", "it is not UTF-8") from None
        key = xxh3_128_digest(raw)
        workflow = self._compiled.get(key)
        if workflow is None:
            small = len(text) <= _INLINE_BYTES
            workflow = compile_text(text, JSON) if small else await asyncio.to_thread(compile_text, text, JSON)
            if len(text) <= CACHED_BYTES:
                self._compiled[key] = workflow
                if len(self._compiled) > _MAX_CACHED:
                    self._compiled.popitem(last=False)
        return workflow


def require_size(document: str | bytes) -> None:
    """Raises GatewayError 413."""
    if len(document) > MAX_DOCUMENT_BYTES:
        text = f"A document has at most {MAX_DOCUMENT_BYTES >> 10} KiB."
        raise GatewayError(413, "workflow_too_large", text, param="workflow")


def require_body_size(raw: bytes) -> None:
    """Raises GatewayError 413."""
    if len(raw) > MAX_BODY_BYTES:
        text = f"A request for a workflow has at most {MAX_BODY_BYTES >> 20} MiB."
        raise GatewayError(413, "workflow_too_large", text)
