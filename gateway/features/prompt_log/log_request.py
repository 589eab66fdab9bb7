"""A request with wishes, between the phases that read and name it, and the tap of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.errors import GatewayError
from gateway.features.prompt_log.header import Wishes
from gateway.features.prompt_log.kept_turn import KeptTurn
from gateway.features.prompt_log.metrics import PromptLogMetrics
from gateway.features.prompt_log.naming.forms import CHAT, MESSAGES, RESPONSES
from gateway.request.exchange import Exchange
from gateway.request.slots import Slot

FORMS_BY_PATH: Final[Mapping[str, str]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}
"""The paths on which the header counts."""


class LogRequest:
    """form: of its body. names: the chain of its log, its frame's name, the number of its entries; None: not computed yet.
    turn: in the log; None: it is only named. told: members of the answer's header so far. sealed_by: the pool that has made the
    sealed parts of the body; "": unknown.
    """

    def __init__(self, wishes: Wishes, form: str) -> None:
        self.wishes = wishes
        self.form = form
        self.names: tuple[bytes, str, int] | None = None
        self.turn: KeptTurn | None = None
        self.told = dict[str, str | int | bool]()
        self.sealed_by = ""

    def __repr__(self) -> str:
        return f"<LogRequest {self.wishes.kind} in {self.form}>"


LOG_REQUEST: Final = Slot[LogRequest]("prompt_log.request")


def count_refusal(exchange: Exchange, error: GatewayError, metrics: PromptLogMetrics) -> None:
    """Counts the error of a log, and, unless the gateway caused it, the request for the limits of its key."""
    if error.members is not None:
        metrics.refused.add((error.code,))
        exchange.record.answer.own = error.status < 500
