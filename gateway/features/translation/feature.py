"""Translation: replicas that do not speak a request's dialect are asked in chat, engines that take texts only in plain chat."""

from __future__ import annotations

from gateway.core import Core
from gateway.features.translation.forms import OPERATION, ChatForms


def install(core: Core) -> None:
    core.parsing.process.operations[OPERATION] = "gateway.features.translation.jobs:translate"
    core.extensions.forms.append(ChatForms(core.parsing.process).of)
