"""The prompt log: names of conversations, and their verification."""

from __future__ import annotations

from gateway.core import Core
from gateway.features.prompt_log.metrics import PromptLogMetrics
from gateway.features.prompt_log.naming_phase import OPERATION, NamingPhase
from gateway.request.extensions import Answerer, Preparer


def install(core: Core) -> None:
    phase = NamingPhase(core.parsing, core.metrics.of(PromptLogMetrics), core.wall_clock)
    core.parsing.process.operations[OPERATION] = "gateway.features.prompt_log.job:compute"
    core.extensions.answerers.insert(0, Answerer(phase.in_background, phase.refuse))  # before runs are started
    core.extensions.preparers.append(Preparer(phase.concerns, phase.prepare))
