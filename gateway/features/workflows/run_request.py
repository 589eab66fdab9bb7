"""The body of a request for a run or a plan, read and checked. What can be refused is refused before anything is spent.

body ──► its members ──► document (a program is compiled in the parser process, a long document in a thread) ──► Workflow
     ──► inputs ──► plan, within the bounds of the gateway, the document and the request ──► RunOrder
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson
from xxhash import xxh3_128_digest

from gateway.core import Core
from gateway.dialects.json_edits import read_object
from gateway.errors import GatewayError, bad_request
from gateway.features.workflows.connectors import Connectors
from gateway.features.workflows.language.compiling import JSON, compile_text
from gateway.features.workflows.language.document import ConnectorCall, ModelCall
from gateway.features.workflows.language.faults import OVER_LIMITS, DocumentFaults, refused
from gateway.features.workflows.language.inputs import read_inputs
from gateway.features.workflows.language.plan import RunAllowance, WorkflowPlan, plan_of
from gateway.features.workflows.language.reading import MAX_DOCUMENT_BYTES
from gateway.features.workflows.language.workflow import RunLimits, Workflow
from gateway.features.workflows.library import NamedWorkflow, WorkflowLibrary
from gateway.features.workflows.model_engines import engine_traits
from gateway.features.workflows.running.run import RunOrder
from gateway.features.workflows.section import WORKFLOWS, WorkflowsConfig
from gateway.request.client import Caller

COMPILE: Final = "workflows.compile"
MAX_METADATA: Final = 16 << 10  # bytes
_INLINE_BYTES: Final = 4 << 10  # of a document that is compiled in the event loop: 4 ms
_CACHED_BYTES: Final = 16 << 10  # of a document whose workflow is kept for the next run
_MAX_CACHED: Final = 64
_MAX_SCANNED: Final = 1 << 21  # strings and brackets of a body
_KEYS: Final = ("workflow", "program", "inputs", "stream", "background", "limits", "metadata")
_LIMITS: Final = ("calls", "output_tokens", "seconds", "cost_usd")


class RunRequestBody(NamedTuple):
    """The members of a body. workflow: a name, or the text of a document. inputs: None: there are none."""

    workflow: str | bytes
    program: str
    inputs: Any
    stream: bool
    limits: RunLimits
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A workflow that may run. named: of the library; None: it came with the request."""

    workflow: Workflow
    plan: WorkflowPlan
    limits: RunLimits
    named: NamedWorkflow | None


class RunRequests:
    """Reads requests for runs and plans (see the module)."""

    def __init__(self, core: Core, library: WorkflowLibrary, connectors: Connectors) -> None:
        self._core, self._library, self._connectors = core, library, connectors
        self._compiled: OrderedDict[bytes, Workflow] = OrderedDict()

    async def planned(self, body: RunRequestBody, caller: Caller, client: str) -> PlannedRun:
        """client: whose share of the parser process it takes. Raises DocumentError or GatewayError."""
        named = None
        if isinstance(body.workflow, str) and body.workflow:
            named = self._library.find(body.workflow, caller)
            workflow = named.workflow
        else:
            if not self._config.inline:
                text = (
                    "Documents and programs in requests are off here (workflows.inline); name a workflow of GET /v1/workflows."
                )
                raise GatewayError(403, "workflow_not_allowed", text, param="workflow")
            workflow = await self._compile(body, client)
            self._require_models(workflow, caller)
        self._require_connectors(workflow, caller)
        limits = _lower(workflow.limits, body.limits)
        plan = plan_of(workflow, self._allowance)
        _require_limits(plan, limits, self._config.max_s)
        return PlannedRun(workflow, plan, limits, named)

    def order(self, planned: PlannedRun, body: RunRequestBody, *, see_replicas: bool, passed: str = "") -> RunOrder:
        """passed: a step whose text the client gets as it comes. Raises DocumentError for the inputs."""
        config, limits = self._config, planned.limits
        inputs = read_inputs(planned.workflow.inputs, {} if body.inputs is None else body.inputs)
        seconds = config.max_s if limits.seconds is None else min(limits.seconds, config.max_s)
        version = planned.named.version if planned.named else None
        return RunOrder(
            planned.workflow,
            planned.plan,
            inputs,
            config.max_tokens,
            seconds,
            limits.cost_usd,
            version,
            see_replicas,
            engine_traits(planned.workflow, self._core),
            passed,
            planned.named is not None,
            body.metadata,
        )

    @property
    def _config(self) -> WorkflowsConfig:
        return WORKFLOWS.of(self._core.config)

    @property
    def _allowance(self) -> RunAllowance:
        config = self._config
        return RunAllowance(config.max_calls, config.max_output_tokens, config.max_tokens, config.max_s)

    async def _compile(self, body: RunRequestBody, client: str) -> Workflow:
        """Raises DocumentError or GatewayError."""
        raw = body.workflow
        if body.program:
            program = body.program.encode("utf-8", "surrogatepass")
            (raw,) = await self._core.parsing.process.run((COMPILE,), program, client)
        assert isinstance(raw, bytes)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise refused("workflow", "it is not UTF-8") from None
        key = xxh3_128_digest(raw)
        workflow = self._compiled.get(key)
        if workflow is None:
            small = len(text) <= _INLINE_BYTES
            workflow = compile_text(text, JSON) if small else await asyncio.to_thread(compile_text, text, JSON)
            if len(text) <= _CACHED_BYTES:
                self._compiled[key] = workflow
                if len(self._compiled) > _MAX_CACHED:
                    self._compiled.popitem(last=False)
        return workflow

    def _require_models(self, workflow: Workflow, caller: Caller) -> None:
        """Raises GatewayError 403 or 404 for a model that a step could not use."""
        for step in workflow.graph.steps.values():
            if not isinstance(step.work, ModelCall):
                continue
            name, aliases = step.work.model, self._core.live.aliases
            model = (aliases.of(name) if aliases else "") or name
            try:
                if caller.grant is not None:
                    caller.grant.require_model(model)
                self._core.fleet.target(model, "" if model == name else name)
            except GatewayError as error:
                path = f"{step.path}.{step.work.kind}.model"
                raise GatewayError(error.status, error.code, error.message, param=path, public=error.public) from None

    def _require_connectors(self, workflow: Workflow, caller: Caller) -> None:
        faults = DocumentFaults()
        for step in workflow.graph.steps.values():
            if isinstance(step.work, ConnectorCall) and not self._connectors.allows(step.work.use, caller.tenant):
                faults.add(f"{step.path}.call.use", f"there is no connector {step.work.use!r} for you here")
        faults.require_none()


def read_body(raw: bytes) -> RunRequestBody:
    """Raises GatewayError 400 or 413."""
    try:
        spans = read_object(raw, most=_MAX_SCANNED).spans
        members = {key: raw[slice(*spans[key])] for key in spans if key in _KEYS}
        values = {key: orjson.loads(members[key]) for key in members if key != "workflow"}
    except (ValueError, IndexError):
        raise bad_request(
            'The body must be a JSON object such as {"workflow": {...}, "inputs": {...}}.', code="invalid_json"
        ) from None
    if unknown := [key for key in spans if key not in _KEYS]:
        raise bad_request(f"{unknown[0][:60]!r} is unknown; the body has {', '.join(_KEYS)}.", unknown[0][:60])
    if ("workflow" in members) == ("program" in members):
        raise bad_request("Exactly one of 'workflow' (a document or a name) and 'program' (Python) is expected.", "workflow")
    workflow: str | bytes = members.get("workflow", b"").strip()
    if isinstance(workflow, bytes) and workflow.startswith(b'"'):
        workflow = _text_in(workflow)
    if len(workflow) > MAX_DOCUMENT_BYTES:
        raise GatewayError(
            413, "workflow_too_large", f"A document has at most {MAX_DOCUMENT_BYTES >> 10} KiB.", param="workflow"
        )
    for key, kind, what in (("program", str, "a text"), ("stream", bool, "true or false"), ("metadata", dict, "an object")):
        if key in values and values[key] is not None and not isinstance(values[key], kind):
            raise bad_request(f"{key!r} must be {what}.", key)
    if values.get("background"):
        raise bad_request("Runs in the background are not available here; leave 'background' out.", "background", "state_off")
    metadata = values.get("metadata") or {}
    if len(members.get("metadata", b"")) > MAX_METADATA:
        raise bad_request(f"'metadata' has at most {MAX_METADATA >> 10} KiB.", "metadata")
    return RunRequestBody(
        workflow,
        values.get("program") or "",
        values.get("inputs"),
        bool(values.get("stream")),
        _limits(values.get("limits")),
        metadata,
    )


def _text_in(raw: bytes) -> str:
    try:
        return str(orjson.loads(raw))
    except ValueError:
        raise bad_request("'workflow' is not valid JSON.", "workflow", "invalid_json") from None


def _limits(value: Any) -> RunLimits:
    """The member `limits`. Raises GatewayError 400."""
    if value is None:
        return RunLimits()
    if not isinstance(value, dict) or not value.keys() <= set(_LIMITS):
        raise bad_request(f"'limits' is an object with {', '.join(_LIMITS)}.", "limits")
    for key, each in value.items():
        whole = key in ("calls", "output_tokens")
        if isinstance(each, bool) or not isinstance(each, int if whole else (int, float)) or not 0 <= each <= 1e9:
            raise bad_request(f"'limits.{key}' must be a {'whole ' * whole}number from 0.", f"limits.{key}")
    return RunLimits(*(value.get(key) for key in _LIMITS))


def _lower(one: RunLimits, other: RunLimits) -> RunLimits:
    pairs = ((getattr(one, key), getattr(other, key)) for key in _LIMITS)
    return RunLimits(*(min((each for each in pair if each is not None), default=None) for pair in pairs))


def _require_limits(plan: WorkflowPlan, limits: RunLimits, max_s: float) -> None:
    """The limits of the request, too. Raises DocumentError."""
    faults = DocumentFaults()
    for key, found, most in (("calls", plan.calls, limits.calls), ("output_tokens", plan.output_tokens, limits.output_tokens)):
        if most is not None and found > most:
            faults.add(
                f"limits.{key}", f"a run could have {found:,} {key.replace('_', ' ')}, the limit is {most:,}", OVER_LIMITS
            )
    faults.require_none()
