"""The body of a request for a run or a plan, read and checked. Errors are found before anything is spent.

body ──► its members ──► document (a program is compiled in the parser process, a long document in a thread) ──► Workflow
     ──► inputs ──► plan, within the bounds of the gateway, the document and the request ──► RunOrder
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from gateway.core import Core
from gateway.dialects.json_structure import exceeds, too_complex
from gateway.errors import GatewayError, bad_request
from gateway.features.histories.lazy import LazyStore
from gateway.features.workflows.compiler import WorkflowCompiler, require_body_size, require_size
from gateway.features.workflows.connectors import Connectors
from gateway.features.workflows.directory import OPERATOR, NamedWorkflow, WorkflowLibrary
from gateway.features.workflows.language.document import ConnectorCall, ModelCall
from gateway.features.workflows.language.faults import OVER_LIMITS, DocumentFaults
from gateway.features.workflows.language.inputs import read_inputs
from gateway.features.workflows.language.keys import LIMITS
from gateway.features.workflows.language.plan import RunAllowance, WorkflowPlan, plan_of
from gateway.features.workflows.language.values import EvaluationError, bytes_of
from gateway.features.workflows.language.workflow import RunLimits, Workflow
from gateway.features.workflows.model_engines import engine_traits
from gateway.features.workflows.running.call_prices import model_of
from gateway.features.workflows.running.run_order import RunOrder
from gateway.features.workflows.section import WORKFLOWS, WorkflowsConfig
from gateway.features.workflows.stored.documents import StoredWorkflows
from gateway.features.workflows.stored.naming import WorkflowNames
from gateway.request.client import Caller
from gateway.request.exchange import Exchange

MAX_METADATA: Final = 16 << 10  # bytes
_MAX_QUOTES: Final = 1 << 22  # `exceeds` takes 25 ns for each
_NONE: Final = msgspec.Raw()
_KEYS: Final = ("workflow", "program", "inputs", "stream", "background", "limits", "metadata")
_Members: Final = msgspec.defstruct("_Members", [(key, msgspec.Raw, _NONE) for key in _KEYS], forbid_unknown_fields=True)
_read_members: Final = msgspec.json.Decoder(_Members).decode
_UNKNOWN: Final = "unknown field `"  # in an error of msgspec


class RunRequestBody(NamedTuple):
    """The members of a body. workflow: a name, or the text of a document. inputs: None: there are none."""

    workflow: str | bytes
    program: str
    inputs: Any
    stream: bool
    limits: RunLimits
    metadata: Mapping[str, Any]
    background: bool = False


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A workflow that may run. named: by its name; None: it came with the request."""

    workflow: Workflow
    plan: WorkflowPlan
    limits: RunLimits
    named: NamedWorkflow | None

    @property
    def defined(self) -> bool:
        """True if the operator has defined it."""
        return self.named is not None and self.named.source == OPERATOR


class RunRequests:
    """Reads requests for runs and plans (see the module)."""

    def __init__(self, core: Core, library: WorkflowLibrary, connectors: Connectors) -> None:
        self._core, self._connectors = core, connectors
        self._compiler = compiler = WorkflowCompiler(core)
        stored = StoredWorkflows(core.part(LazyStore), compiler, core.clock, core.wall_clock)
        self.names = WorkflowNames(library, stored, compiler, self._plan, core.access.is_operator)

    async def planned(self, body: RunRequestBody, exchange: Exchange) -> PlannedRun:
        """Raises DocumentError or GatewayError."""
        caller, named = exchange.caller, None
        if isinstance(body.workflow, str):
            named = await self.names.find(body.workflow, exchange)
            workflow = named.workflow
        else:
            if not self._config.inline:
                text = (
                    "Documents and programs in requests are off here (workflows.inline); name a workflow of GET /v1/workflows."
                )
                raise GatewayError(403, "workflow_not_allowed", text, param="workflow")
            if body.program:
                workflow = await self._compiler.program(body.program, exchange.request.lease.account.client)
            else:
                assert isinstance(body.workflow, bytes)
                workflow = await self._compiler.document(body.workflow)
        limits = _lower(workflow.limits, body.limits)
        plan = self._plan(workflow)
        _require_limits(plan, limits)
        planned = PlannedRun(workflow, plan, limits, named)
        if not planned.defined:
            self._require_models(workflow, caller)
        self._require_connectors(workflow, caller)
        return planned

    def order(self, planned: PlannedRun, body: RunRequestBody, exchange: Exchange, primary: str = "") -> RunOrder:
        """primary: an output whose text the client gets as it comes. Raises DocumentError for the inputs."""
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
            self._core.access.is_operator(exchange.request),
            engine_traits(planned.workflow, self._core),
            primary,
            planned.defined,
            body.metadata,
            exchange.notes,
        )

    @property
    def _config(self) -> WorkflowsConfig:
        return WORKFLOWS.of(self._core.config)

    def _plan(self, workflow: Workflow) -> WorkflowPlan:
        """Raises DocumentError for a workflow beyond the bounds of the gateway."""
        config = self._config
        return plan_of(workflow, RunAllowance(config.max_calls, config.max_output_tokens, config.max_tokens, config.max_s))

    def _require_models(self, workflow: Workflow, caller: Caller) -> None:
        """Raises GatewayError 403 or 404 for a model that a step could not use."""
        for step in workflow.graph.steps.values():
            if not isinstance(step.work, ModelCall):
                continue
            name = step.work.model
            model = model_of(name, self._core.live)
            try:
                if caller.grant is not None:
                    caller.grant.require_model(model)
                self._core.fleet.target(model, "" if model == name else name)
            except GatewayError as error:
                path = f"{step.path}.{step.work.kind}.model"
                text = f"{path}: {error.message}"
                raise GatewayError(error.status, error.code, text, param=path, public=error.public) from None

    def _require_connectors(self, workflow: Workflow, caller: Caller) -> None:
        faults = DocumentFaults()
        for step in workflow.graph.steps.values():
            if isinstance(step.work, ConnectorCall) and not self._connectors.allows(step.work.use, caller.tenant):
                faults.add(f"{step.path}.call.use", f"there is no connector {step.work.use!r} for you here")
        faults.require_none()


def read_body(raw: bytes) -> RunRequestBody:
    """Raises GatewayError 400 or 413."""
    require_body_size(raw)
    if raw.count(b'"') > _MAX_QUOTES or exceeds(raw):
        raise too_complex()
    try:
        found = _read_members(raw)
        members = {key: bytes(value) for key in _KEYS if (value := getattr(found, key)) is not _NONE}
        values = {key: orjson.loads(members[key]) for key in members if key != "workflow"}
    except (ValueError, RecursionError) as error:
        _, unknown, name = str(error).partition(_UNKNOWN)
        if unknown:
            raise bad_request(f"{name[:-1][:60]!r} is unknown; the body has {', '.join(_KEYS)}.", name[:-1][:60]) from None
        raise bad_request(
            'The body must be a JSON object such as {"workflow": {...}, "inputs": {...}}.', code="invalid_json"
        ) from None
    if ("workflow" in members) == ("program" in members):
        raise bad_request("Exactly one of 'workflow' (a document or a name) and 'program' (Python) is expected.", "workflow")
    workflow: str | bytes = members.get("workflow", b"")
    if isinstance(workflow, bytes) and workflow.startswith(b'"'):
        workflow = _text_in(workflow)
    require_size(workflow)
    for key, kind, what in (
        ("program", str, "a text"),
        ("stream", bool, "true or false"),
        ("background", bool, "true or false"),
        ("metadata", dict, "an object"),
    ):
        if key in values and values[key] is not None and not isinstance(values[key], kind):
            raise bad_request(f"{key!r} must be {what}.", key)
    metadata = values.get("metadata") or {}
    try:
        bytes_of(metadata)
    except EvaluationError:
        raise bad_request("'metadata' is nested too deeply.", "metadata") from None
    if len(members.get("metadata", b"")) > MAX_METADATA:
        raise bad_request(f"'metadata' has at most {MAX_METADATA >> 10} KiB.", "metadata")
    return RunRequestBody(
        workflow,
        values.get("program") or "",
        values.get("inputs"),
        bool(values.get("stream")),
        _limits(values.get("limits")),
        metadata,
        bool(values.get("background")),
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
    if not isinstance(value, dict) or not value.keys() <= LIMITS.keys():
        raise bad_request(f"'limits' is an object with {', '.join(LIMITS)}.", "limits")
    for key, each in value.items():
        whole = LIMITS[key].whole
        if isinstance(each, bool) or not isinstance(each, int if whole else (int, float)) or not 0 <= each <= 1e9:
            raise bad_request(f"'limits.{key}' must be a {'whole ' * whole}number from 0.", f"limits.{key}")
    return RunLimits(*(value.get(key) for key in LIMITS))


def _lower(one: RunLimits, other: RunLimits) -> RunLimits:
    pairs = ((getattr(one, key), getattr(other, key)) for key in LIMITS)
    return RunLimits(*(min((each for each in pair if each is not None), default=None) for pair in pairs))


def _require_limits(plan: WorkflowPlan, limits: RunLimits) -> None:
    """The limits of the request, too. Raises DocumentError."""
    faults = DocumentFaults()
    for key, found, most in (("calls", plan.calls, limits.calls), ("output_tokens", plan.output_tokens, limits.output_tokens)):
        if most is not None and found > most:
            faults.add(
                f"limits.{key}", f"a run could have {found:,} {key.replace('_', ' ')}, the limit is {most:,}", OVER_LIMITS
            )
    faults.require_none()
