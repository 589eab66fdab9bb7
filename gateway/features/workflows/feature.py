"""Adds workflows to a gateway: an answerer that claims their paths. The rest is imported with the first of these requests."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gateway.core import Core
from gateway.dialects.models.listing import OwnModels
from gateway.features.histories.lazy import LazyStore
from gateway.features.workflows.quick_look import is_for_workflow
from gateway.features.workflows.recent_runs import TOPIC, RecentRuns, RunEndpoints
from gateway.features.workflows.section import WORKFLOWS
from gateway.request.client import ClientReply
from gateway.request.exchange import Exchange
from gateway.request.extensions import Answerer

if TYPE_CHECKING:
    from gateway.features.workflows.api import WorkflowApi

LOOK_S: Final = 30.0
# Imported in a thread, with the libraries of databases.
STORES: Final = ("gateway.features.workflows.stored.store", "gateway.features.workflows.background.store")


def install(core: Core) -> None:
    core.parsing.process.operations["workflows.compile"] = "gateway.features.workflows.jobs:compile_program"
    endpoint = WorkflowEndpoint(core)
    core.extensions.answerers.insert(0, Answerer(is_for_workflow, endpoint.answer))  # before background responses are started
    core.put(endpoint)
    if (state := core.part(LazyStore)) is not None:
        state.tables += STORES
        core.work.tasks.append(endpoint.run_background)
    core.topics.answers(TOPIC, endpoint.recent.answer)
    core.work.sweeps.append(endpoint.recent.sweep)
    core.endpoints.append(lambda operator, _local, control: RunEndpoints(operator, control).routes())
    if WORKFLOWS.of(core.config).directory:
        core.own_models.append(endpoint.models)
        core.work.starts.append(endpoint.read_directory)
        core.work.reloads.append(endpoint.read_directory)


class WorkflowEndpoint:
    """Answers requests for workflows. models: the workflows of the directory, as models."""

    def __init__(self, core: Core) -> None:
        self.models = OwnModels()
        self._core = core
        self._api: WorkflowApi | None = None
        self._used = asyncio.Event()
        self.recent = RecentRuns(core.clock)

    async def answer(self, exchange: Exchange) -> ClientReply:
        """Raises GatewayError."""
        record = exchange.record
        record.answer.own = True
        record.subject.generates = record.subject.metered = False  # each step has its own record
        return await self.api.answer(exchange)

    async def read_directory(self) -> None:
        """Read the operator's workflows, again after a reload. Errors are logged, and do not end the start."""
        await asyncio.to_thread(self.api.read_directory, Path(WORKFLOWS.of(self._core.config).directory))
        self.models.entries = self.api.operators.model_entries()

    async def run_background(self) -> None:
        """Adopts runs of gateways that have stopped, until cancelled. Begins with the first request for a workflow, or when the
        store may have such runs, for which it is looked at every LOOK_S.
        """
        from gateway.features.workflows.background.unfinished import may_have_runs

        url = self._core[LazyStore].url
        while not (unfinished := await asyncio.to_thread(may_have_runs, url)) and not self._used.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._used.wait()
        await self.api.background.watch(at_once=unfinished)

    @property
    def api(self) -> WorkflowApi:
        if self._api is None:
            from gateway.features.workflows.api import WorkflowApi

            self._api = WorkflowApi(self._core, self.recent)
            self._used.set()
        return self._api
