"""The engines behind the models of a workflow: whose calls wait at the gate, who takes choices in a member of their own."""

from __future__ import annotations

from gateway.core import Core
from gateway.errors import GatewayError
from gateway.features.workflows.language.document import ModelCall
from gateway.features.workflows.language.workflow import Workflow
from gateway.features.workflows.running.call_prices import model_of
from gateway.features.workflows.running.messages import EngineTraits, GatedEngine
from gateway.features.workflows.section import AUTO, WORKFLOWS


def engine_traits(workflow: Workflow, core: Core) -> EngineTraits:
    """The traits of the present engines. O(steps + replicas of their models)."""
    config = WORKFLOWS.of(core.config)
    models = {step.work.model for step in workflow.graph.steps.values() if isinstance(step.work, ModelCall)}
    gated, choosing = dict[str, GatedEngine](), set[str]()
    for name in models:
        try:
            target = core.fleet.target(model_of(name, core.live))
        except GatewayError:  # the step will fail
            continue
        engines = [state.engine for state in target.replicas.values()]
        slots = any(map(core.router.has_slots, target.replicas))
        if config.gate is True:
            gated[name] = GatedEngine(slots=slots, most_s=config.max_s)
        elif config.gate == AUTO and not all(core.router.shares_inflight(replica) for replica in target.replicas):
            rates = [core.router.ledger.rates.of(replica) for replica in target.replicas]
            rate = min((rate.value for rate in rates if rate.pool.known), default=0.0)
            gated[name] = GatedEngine(rate, slots, token_bytes=core.router.units_per_token(target.label))
        if engines and target.fallback is None and all(engine.choices for engine in engines):
            choosing.add(name)
    return EngineTraits(gated, frozenset(choosing))
