"""The prompt log: names of conversations, their verification, and turns that are kept by name."""

from __future__ import annotations

import secrets
from typing import Final

from gateway.core import Core
from gateway.features.histories.lazy import LazyStore
from gateway.features.prompt_log import appending, log_models, naming_phase, own_turns, quick_looks, rendering
from gateway.features.prompt_log.appending import LogAppender
from gateway.features.prompt_log.base_phase import BasePhase
from gateway.features.prompt_log.delta import outlines
from gateway.features.prompt_log.delta.delta_form import DeltaForm
from gateway.features.prompt_log.delta.outlines import Outlines
from gateway.features.prompt_log.delta.passed_heads import PassedHeads
from gateway.features.prompt_log.log_api import LogApi
from gateway.features.prompt_log.log_jobs import OPERATIONS
from gateway.features.prompt_log.log_models import LogModels
from gateway.features.prompt_log.metrics import PromptLogMetrics
from gateway.features.prompt_log.naming_phase import NamingPhase
from gateway.features.prompt_log.once import answering
from gateway.features.prompt_log.once.answering import OnceAnswers
from gateway.features.prompt_log.once.runs import OnceRuns
from gateway.features.prompt_log.rendering import Renderer
from gateway.features.prompt_log.section import PROMPT_LOG
from gateway.request.client import ClientReply
from gateway.request.exchange import Exchange
from gateway.request.extensions import Answerer, Preparer

TABLES: Final = ("gateway.features.prompt_log.once.tables",)  # imported in a thread, with the libraries of databases


def install(core: Core) -> None:
    _install_delta(core)
    if PROMPT_LOG.of(core.config):
        _install_header(core)


def _install_delta(core: Core) -> None:
    core.parsing.process.operations[outlines.OPERATION] = "gateway.features.prompt_log.delta.job:outlined"
    passed = None if PROMPT_LOG.of(core.config) else PassedHeads(core.objects)
    form = DeltaForm(
        Outlines(core.parsing, secrets.randbits(62)),
        core.metrics.of(PromptLogMetrics),
        core.wall_clock,
        core.clock,
        passed,
    )
    core.put(form)

    def use() -> None:
        """Has attempts ask for the form, once a pool has the option."""
        if form.of not in core.extensions.forms and any(pool.delta for pool in core.live.config.pools):
            core.extensions.forms.append(form.of)
            if passed is not None:
                core.extensions.preparers.append(Preparer(passed.concerns, passed.prepare))
                core.extensions.preparers.append(Preparer(passed.looks_up, passed.find))

    async def reloaded() -> None:
        use()

    use()
    core.work.reloads.append(reloaded)


def _install_header(core: Core) -> None:
    store, metrics = core.part(LazyStore), core.metrics.of(PromptLogMetrics)
    if store is not None:
        store.tables += TABLES
    base = BasePhase(core.live, core.parsing, store, metrics, core.extensions.entering)
    naming = NamingPhase(core.live, core.parsing, store, metrics, core.wall_clock)
    core.parsing.process.operations[own_turns.OPERATION] = "gateway.features.prompt_log.job:own"
    core.parsing.process.operations[naming_phase.OPERATION] = "gateway.features.prompt_log.job:compute"
    core.parsing.process.operations[appending.OPERATION] = "gateway.features.prompt_log.job:appended"
    core.parsing.process.operations[log_models.OPERATION] = "gateway.features.prompt_log.render_job:rendering_body"
    core.parsing.process.operations[rendering.TOKENS_OPERATION] = "gateway.features.prompt_log.render_job:token_ids"
    core.parsing.process.operations[rendering.TEXT_OPERATION] = "gateway.features.prompt_log.render_job:text_member"
    core.parsing.process.operations.update(OPERATIONS)
    core.parsing.process.operations[answering.OPERATION] = "gateway.features.prompt_log.once.digest:request_digest"
    runs = OnceRuns(core, store) if store is not None else None
    if runs is not None:
        core.work.tasks.append(runs.run)
        core.work.finishes.append(runs.close)
        core.put(runs)
    once = OnceAnswers(core, base, store, runs)
    core.put(once)
    renderer = Renderer(core.upstream, core.parsing)
    core.put(renderer)
    append = LogAppender(core.live, core.parsing, metrics, core.wall_clock)
    logs = LogApi(core, store, append, LogModels(core, renderer))

    async def at_endpoint(exchange: Exchange) -> ClientReply | None:
        if once.stops(exchange):
            return await once.stop(exchange)
        return await logs.answer(exchange) if logs.claims(exchange) else None

    core.extensions.answerers.append(Answerer(quick_looks.may_have_token, once.answer))
    core.extensions.answerers.append(Answerer(quick_looks.is_endpoint, at_endpoint))
    core.extensions.answerers.insert(0, Answerer(quick_looks.in_background, base.refuse))  # before runs are started
    core.extensions.preparers.insert(0, Preparer(quick_looks.has_header, base.prepare))  # before histories are joined
    core.extensions.preparers.append(Preparer(quick_looks.is_named, naming.prepare))
