"""Re-sent requests get the answer that still runs."""

from __future__ import annotations

from gateway.core import Core
from gateway.features.adoption.adoptions import Adoptions
from gateway.request.extensions import Answerer


def install(core: Core) -> None:
    adoptions = Adoptions(core)
    core.extensions.answerers.append(Answerer(adoptions.answers.claims, adoptions.answer))  # the last of them
    core.running.tell(adoptions.close)
    core.put(adoptions)
