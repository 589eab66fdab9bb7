"""The answer of POST /v1/workflows/plan: the bounds of a run, an estimate of its tokens and price, and its warm prefixes.

The bounds and shared prefixes are the document's. Tokens and prices are estimated from the given inputs. A prefix is warm as
far as the router believes that the replica of its first call holds it. The router is asked for the beginning that inputs alone
give, and for at most MAX_ASKED bytes in a plan. The answer may show whether others have sent the same prompt, so only those
get it who get the header with the predicted cached tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

import orjson

from gateway.admission.memory import parsing
from gateway.core import Core
from gateway.errors import GatewayError
from gateway.features.workflows.language.document import ConnectorCall, ModelCall
from gateway.features.workflows.language.estimate import RunEstimate, estimate_of
from gateway.features.workflows.language.operations import WorkBudget
from gateway.features.workflows.language.plan import PlanWarning, copies_of
from gateway.features.workflows.language.prefixes import known_beginning
from gateway.features.workflows.language.values import EvaluationError
from gateway.features.workflows.language.workflow import Workflow
from gateway.features.workflows.run_request import PlannedRun, RunRequestBody
from gateway.features.workflows.running.call_prices import CallPrices
from gateway.features.workflows.running.calls import PATHS
from gateway.features.workflows.section import WORKFLOWS
from gateway.request.exchange import Exchange
from gateway.request.phases.scopes import prompt_of, scope_of

MAX_ASKED: Final = 4 << 20


class PlanAnswers:
    """Makes plans. Nothing is run, booked or charged."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._prices = CallPrices(core)

    async def answer(self, planned: PlannedRun, body: RunRequestBody, exchange: Exchange) -> dict[str, Any]:
        """Raises GatewayError."""
        plan, inputs = planned.plan, body.inputs if isinstance(body.inputs, dict) else {}
        copies = copies_of(planned.workflow)
        max_tokens = WORKFLOWS.of(self._core.config).max_tokens
        estimate = estimate_of(planned.workflow, copies, inputs, max_tokens, self._prices.bytes_per_token)
        warnings = [*plan.warnings, *_of_rate(planned.workflow, copies, exchange)]
        return {
            "workflow": planned.workflow.name,
            "calls": plan.calls,
            "output_tokens": plan.output_tokens,
            "widest": plan.widest,
            **self._sums(estimate),
            "prefixes": await self._prefixes(planned, inputs, estimate, exchange),
            "warnings": [asdict(each) for each in warnings],
        }

    def _sums(self, estimate: RunEstimate | None) -> dict[str, Any]:
        """Tokens and the worst price, as far as the given inputs show them; null: unknown."""
        if estimate is None:
            return {"prompt_tokens": None, "least_tokens": None, "cost_usd": None}
        steps = estimate.steps.values()
        cost = sum(each.copies * self._prices.worst_usd(each.model, each.prompt, each.answer) for each in steps)
        return {"prompt_tokens": estimate.prompt_tokens, "least_tokens": estimate.least_tokens, "cost_usd": round(cost, 9)}

    async def _prefixes(
        self, planned: PlannedRun, inputs: Mapping[str, Any], estimate: RunEstimate | None, exchange: Exchange
    ) -> list[dict[str, Any]]:
        found, warm, left, budget = [], dict[bytes, dict[str, Any] | None](), MAX_ASKED, WorkBudget()
        shown = self._core.access.sees_headers(exchange.request)
        hidden = planned.defined and not self._core.access.is_operator(exchange.request)  # its prompts are the operator's
        for each in planned.plan.prefixes:
            pieces = estimate.steps[each.steps[0]].pieces[: len(each.pieces)] if estimate is not None else None
            row: dict[str, Any] = {**asdict(each), "tokens": sum(pieces) if pieces is not None else None, "warm": None}
            if hidden:
                row["pieces"] = None
            found.append(row)
            if not shown:
                continue
            try:
                body = known_beginning(planned.workflow.graph, each, inputs, budget)
            except EvaluationError:  # a wrong input, or too much work
                continue
            raw = orjson.dumps(body)
            if not body or (raw not in warm and len(raw) > left):
                continue
            if raw not in warm:
                left -= len(raw)
                call = planned.workflow.graph.steps[each.steps[0]].work
                assert isinstance(call, ModelCall)
                warm[raw] = await self._warm(PATHS[call.kind], raw, exchange)
            row["warm"] = warm[raw]
        return found

    async def _warm(self, path: str, raw: bytes, exchange: Exchange) -> dict[str, Any] | None:
        """The replica that would get this body, and the tokens of it that it holds. None: it holds none."""
        core, caller, lease = self._core, exchange.caller, exchange.request.lease
        dialect, client, aliases = core.around.dialects.at(path), lease.account.client, core.live.aliases
        lease.charge(len(raw))
        try:
            api = await core.parsing.in_turn(dialect, raw, aliases, client)
            if api is None:
                with parsing(lease, len(raw)):
                    api = await core.parsing.parse(dialect, raw, scope_of(core.live, caller), client, aliases)
            target = core.fleet.target(api.model, api.alias)
            target.require()
        except GatewayError:  # the step will fail
            return None
        prompt = prompt_of(core.live, api, caller, target.label, client, target.adapter_of(api))
        best = core.router.rank(prompt, target.replicas, core.clock())[0].best
        return {"replica": best.replica, "tokens": best.matched_tokens} if best.matched_tokens else None


def _of_rate(workflow: Workflow, copies: Mapping[str, int], exchange: Exchange) -> Iterator[PlanWarning]:
    steps, grant = workflow.graph.steps, exchange.caller.grant
    requests = sum(copies[name] for name, step in steps.items() if isinstance(step.work, ModelCall | ConnectorCall))
    if grant is not None and 0 < grant.requests < requests:
        text = f"a run could have {requests:,} requests, and the key has {grant.requests:,} a minute: steps wait for it"
        yield PlanWarning("over_rate", "", text)
