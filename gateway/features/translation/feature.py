"""Translation: replicas that do not support a request's dialect get chat requests; engines that accept only texts get plain
chat; tokens that no replica can count are estimated.
"""

from __future__ import annotations

from gateway.core import Core
from gateway.features.translation.counting import TokenEstimates
from gateway.features.translation.forms import OPERATION, ChatForms


def install(core: Core) -> None:
    core.parsing.process.operations[OPERATION] = "gateway.features.translation.jobs:translate"
    core.extensions.forms.append(ChatForms(core.parsing).of)
    core.extensions.substitutes.append(TokenEstimates(core.router, core.replies).answer)
