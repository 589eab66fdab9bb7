"""Workflows by name: of the operator's directory first, then the sender's stored ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import orjson

from gateway.errors import GatewayError
from gateway.features.workflows.compiler import WorkflowCompiler, require_size
from gateway.features.workflows.directory import PREFIX, NamedWorkflow, WorkflowLibrary
from gateway.features.workflows.language.faults import refused
from gateway.features.workflows.language.fields import WORKFLOW_NAME
from gateway.features.workflows.language.workflow import Workflow
from gateway.features.workflows.stored.documents import StoredWorkflows
from gateway.features.workflows.stored.entries import listed
from gateway.request.client import ClientRequest
from gateway.request.exchange import Exchange
from gateway.request.owner import owner
from gateway.request.rights import Rights

_VERSION: Final = re.compile(r"[1-9][0-9]{0,8}")


class WorkflowNames:
    """Finds, lists and changes named workflows for the sender of a request. check: raises DocumentError for a workflow that
    could not run here. is_operator: of a request.
    """

    def __init__(
        self,
        library: WorkflowLibrary,
        stored: StoredWorkflows,
        compiler: WorkflowCompiler,
        check: Callable[[Workflow], object],
        is_operator: Callable[[ClientRequest], bool],
    ) -> None:
        self._library, self._stored, self._compiler, self._check = library, stored, compiler, check
        self._is_operator = is_operator

    async def find(self, reference: str, exchange: Exchange) -> NamedWorkflow:
        """The workflow to run. reference: NAME or NAME@N. Raises GatewayError 403, 404 or 503, and DocumentError."""
        grant = exchange.caller.grant
        name, version = _split(reference)
        _require_allowed(grant, name)
        found = self._library.find(name) if version is None else None
        if found is None and self._may_be_stored(name, version):
            found = await self._stored.find(_owner(exchange), name, version or None)
        if found is None:
            raise self._unknown(reference, grant)
        return found

    async def shown(self, reference: str, exchange: Exchange) -> dict[str, Any]:
        """The answer of GET /v1/workflows/NAME. Raises GatewayError 403, 404 or 503."""
        grant = exchange.caller.grant
        name, version = _split(reference)
        _require_allowed(grant, name)
        named = self._library.find(name) if version is None else None
        if named is not None:  # its prompts are the operator's
            return named.as_json() | ({"workflow": named.workflow.source} if self._is_operator(exchange.request) else {})
        if self._may_be_stored(name, version):
            found = await self._stored.document(_owner(exchange), name, version or None)
            if found is not None:
                return {**listed(found.entry, found.version), "workflow": orjson.Fragment(found.document)}
        raise self._unknown(reference, grant)

    async def listed(self, exchange: Exchange) -> list[dict[str, Any]]:
        """The workflows that the sender may use. Raises GatewayError 503."""
        grant = exchange.caller.grant
        shown = [named.as_json() for named in self._library.workflows.values()]
        if self._stored.on:
            stored = await self._stored.listed(_owner(exchange), exchange.charge)
            shown += [each for each in stored if each["name"] not in self._library.workflows]
        return [each for each in shown if grant is None or grant.allows(PREFIX + each["name"])]

    async def put(self, name: str, exchange: Exchange) -> dict[str, Any]:
        """Store the document in the body. Raises GatewayError 400, 403, 409, 413, 503 or 507, and DocumentError."""
        _require_allowed(exchange.caller.grant, name)
        raw, exchange.api.body = exchange.api.body, b""
        require_size(raw)
        workflow = await self._compiler.document(raw)
        if workflow.name != name:
            raise refused("name", f"the path has the name {name[:63]!r}, the document {workflow.name!r}")
        self._check(workflow)
        if self._library.find(name) is not None:
            text = f"The operator of this gateway has a workflow {name!r}; choose another name."
            raise GatewayError(409, "workflow_exists", text, param="name")
        return await self._stored.put(_owner(exchange), workflow)

    async def delete(self, name: str, exchange: Exchange) -> dict[str, Any]:
        """Delete a stored workflow. Raises GatewayError 400, 403, 404, 409 or 503."""
        grant = exchange.caller.grant
        _require_allowed(grant, name)
        if not (WORKFLOW_NAME.fullmatch(name) and await self._stored.delete(_owner(exchange), name)):
            if self._library.find(name) is not None:
                text = f"The workflow {name!r} is the operator's, which only the operator can remove."
                raise GatewayError(409, "workflow_exists", text, param="name")
            raise self._unknown(name, grant)
        return {"name": name, "object": "workflow", "deleted": True}

    def _may_be_stored(self, name: str, version: int | None) -> bool:
        return self._stored.on and version != 0 and WORKFLOW_NAME.fullmatch(name) is not None

    def _unknown(self, reference: str, grant: Rights | None) -> GatewayError:
        name = reference.partition("@")[0]
        hint = self._library.suggestion(name, grant)
        if name != reference and self._library.find(name) is not None:
            hint = f"{name!r} is the operator's, and has no versions"
        text = f"There is no workflow {reference[:80]!r}; {hint}"
        return GatewayError(404, "workflow_not_found", text, param="workflow")


def _split(reference: str) -> tuple[str, int | None]:
    """The name and the version. 0: a version that does not exist; None: none is given."""
    name, at, version = reference.partition("@")
    if not at:
        return name, None
    return name, int(version) if _VERSION.fullmatch(version) else 0


def _require_allowed(grant: Rights | None, name: str) -> None:
    """Raises GatewayError 403."""
    if grant is not None and not grant.allows(PREFIX + name):
        text = f"The key {grant.id} may not use the workflow {name[:63]!r}."
        raise GatewayError(403, "workflow_not_allowed", text, param="workflow")


def _owner(exchange: Exchange) -> str:
    return owner(exchange.request, exchange.caller)
