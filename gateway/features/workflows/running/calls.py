"""Calls of models: the request of a step goes through the gateway as any request of its caller, and its usage comes back.

The grant of the caller is looked up before every request, also of a connector, so that a revoked key ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

import orjson

from gateway.accounting.money import dollars
from gateway.admission.memory import parsing
from gateway.core import Core
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Dialect
from gateway.errors import GatewayError
from gateway.features.workflows.language.document import ModelCall
from gateway.features.workflows.language.results import CHAT
from gateway.features.workflows.running.call_prices import CallPrices
from gateway.features.workflows.running.messages import CallUsage, ModelAnswer, StartCall, StepContext, StepFailure
from gateway.features.workflows.running.origin import AdoptedRunOrigin
from gateway.features.workflows.running.step_request import StepReply, StepRequest, failure_of
from gateway.request.client import Caller, ClientRequest
from gateway.request.phases.reading import drop_steering, steering_of
from gateway.request.phases.scopes import scope_of
from gateway.request.record import SettledRequest

PATHS: Final = {CHAT: "/v1/chat/completions", "text": "/v1/completions"}
LEAST_BYTES: Final = 3  # of a prompt for a token, on average, unless fewer are learned
NO_USAGE: Final = CallUsage()


class SettledCall(NamedTuple):
    """answered: the status of the replica's answer, 0: it had none."""

    usage: CallUsage = NO_USAGE
    answered: int = 0


class SettledCalls:
    """An observer of the settled requests of steps. awaited: by id."""

    def __init__(self) -> None:
        self.awaited: dict[str, SettledCall] = {}

    def __call__(self, request: SettledRequest) -> None:
        if request.id not in self.awaited:
            return
        self.awaited[request.id] = SettledCall(self._usage(request), request.answer.answered)

    def _usage(self, request: SettledRequest) -> CallUsage:
        used, bill = request.spent.consumed, request.spent.bill
        if used is None:
            return CallUsage(replica=request.placement.replica if request.placement.asked else "")
        usage, reported = used.usage, request.spent.usage is not None
        # The bill of a cancelled call has no unpaid cached tokens; its engine has used the predicted ones.
        predicted = min(request.placement.predicted_cached_tokens, max(0, usage.prompt - 1))
        cached = used.cached if reported else predicted
        return CallUsage(
            usage.prompt,
            cached,
            usage.completion,
            dollars(bill.total) if bill else 0.0,
            request.placement.replica,
            reported,
            predicted,
        )


class ModelCalls:
    """Sends the requests of steps. awaited: their settled calls, by id."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._prices = CallPrices(core)
        settled = SettledCalls()
        self.awaited = settled.awaited
        core.observers.append(settled)

    def worst_usd(self, call: StartCall) -> float:
        """The highest price of a call (`CallPrices.worst_usd`), if its answer is as long as it may be. O(bytes)."""
        work = call.step.work
        assert isinstance(work, ModelCall)
        least = min(LEAST_BYTES, self._prices.bytes_per_token(work.model))
        tokens = int(len(orjson.dumps(call.body)) / least) + 1
        return self._prices.worst_usd(work.model, tokens, int(call.body["max_tokens"]))

    async def caller(self, asked: ClientRequest, *, defined: bool) -> Caller | StepFailure:
        """The caller with its present rights. asked: the request of the client. defined: the operator has defined the workflow,
        so that the caller need not have its models.
        """
        callers = self.core.callers
        try:
            if callers.looks_up:
                await callers.look_up(asked.headers)
            caller = callers.named(asked.tenant, asked.key_id) if isinstance(asked, AdoptedRunOrigin) else callers.of(asked)
            if not defined or caller.grant is None:
                return caller
            return caller.holding(caller.tenant, caller.key, caller.grant.unrestricted())
        except GatewayError as error:
            if error.status >= 500:  # keys cannot be read now
                return failure_of(error)
            return StepFailure("grant_revoked", error.message, error.status, ends_run=True, cause=error.code)

    async def require_connector(self, asked: ClientRequest, *, defined: bool) -> StepFailure | None:
        """Counts a call of a connector as a request of the caller. Returns the reason why it cannot be made now."""
        caller = await self.caller(asked, defined=defined)
        if isinstance(caller, StepFailure):
            return caller
        try:
            self.core.callers.count(caller)
        except GatewayError as error:  # the rate of its key
            return replace(failure_of(error), waits=True)
        return None

    def prepare(
        self, asked: ClientRequest, id_: str, call: StartCall, stream: Callable[[str], None], context: StepContext
    ) -> ModelCallAttempt:
        return ModelCallAttempt(self, asked, id_, call, stream, context)


class ModelCallAttempt:
    """One attempt of a step. usage: once it is over, in any way. kill: before its task is cancelled."""

    def __init__(
        self,
        calls: ModelCalls,
        asked: ClientRequest,
        id_: str,
        call: StartCall,
        stream: Callable[[str], None],
        context: StepContext,
    ) -> None:
        self.usage = NO_USAGE
        self._defined = context.defined
        self._calls, self._core, self._awaited = calls, calls.core, calls.awaited
        self._id, self._call = id_, call
        work = call.step.work
        assert isinstance(work, ModelCall)
        self._work = work
        self._path = PATHS[work.kind]
        self._dialect: Dialect = self._core.around.dialects.at(self._path)
        assembler = self._dialect.assembler()
        assert assembler is not None
        self._lease = asked.lease.account.lease()
        self._reply = StepReply(assembler, self._lease, stream)
        self._asked = asked
        self._request = StepRequest(asked, id_, self._path, self._lease, self._reply, context)

    def kill(self) -> None:
        self._request.killed = True

    async def run(self) -> ModelAnswer | StepFailure:
        """Raises CancelledError."""
        try:
            caller = await self._calls.caller(self._asked, defined=self._defined)
            if isinstance(caller, StepFailure):
                return caller
            if self._call.uncertain:
                self._request.yield_to_certain(caller.grant)
            api = await self._parsed(caller)
            self._awaited[self._id] = SettledCall()
            await self._core.lifecycle.run(self._request, api, caller)
            answered = self._awaited[self._id].answered != 0
            return self._reply.outcome(constrained=self._work.constraint is not None, by_replica=answered)
        except GatewayError as error:
            return failure_of(error)
        finally:
            self.usage = self._awaited.pop(self._id, SettledCall()).usage
            self._lease.close()

    async def _parsed(self, caller: Caller) -> ApiRequest:
        """Parsed as a body that a client has sent. Raises GatewayError."""
        raw = orjson.dumps(self._call.body)
        self._lease.charge(len(raw))
        core, client = self._core, self._lease.account.client
        aliases = core.live.aliases
        api = await core.parsing.in_turn(self._dialect, raw, aliases, client)
        if api is None:
            with parsing(self._lease, len(raw)):
                api = await core.parsing.parse(self._dialect, raw, scope_of(core.live, caller), client, aliases)
        if names := steering_of(api, core.live):
            await drop_steering(api, names, core.parsing, client)
        return api
