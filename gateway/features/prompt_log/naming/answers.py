"""An answer as entries, equal to its entries in the history of the client's next request. Pure.

A plain answer is read as a message, or as items. A stream is read from its value (`dialects/finished_answer.py`), which has the
members that clients assemble from events.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from gateway.dialects import finished_answer as form
from gateway.dialects.finished_answer import FinishedAnswer
from gateway.dialects.json_structure import exceeds
from gateway.features.prompt_log.naming.canonical import NoNameError
from gateway.features.prompt_log.naming.chat import message_entry
from gateway.features.prompt_log.naming.entries import Entry, OpenCalls, call_of, entry_of, object_in, sealed_of
from gateway.features.prompt_log.naming.forms import CHAT, MESSAGES
from gateway.features.prompt_log.naming.messages import message_entries
from gateway.features.prompt_log.naming.parts import parts_of
from gateway.features.prompt_log.naming.responses import item_entries

MAX_VALUES: Final = 1 << 14  # of an answer that is read in the event loop, and of the arguments in it


def entries_in(body: bytes, form_: str) -> list[Entry]:
    """The entries of a whole plain answer. Raises NoNameError."""
    if len(body) > form.MAX_ANSWER or exceeds(body, MAX_VALUES):
        raise NoNameError("the answer is too large")
    try:
        answer = object_in(orjson.loads(body), "the answer")
        if form_ == CHAT:
            return [message_entry({"role": "assistant", **answer["choices"][0]["message"]}, OpenCalls())]
        if form_ == MESSAGES:
            return message_entries({"role": "assistant", "content": answer["content"]}, OpenCalls())
        return item_entries(answer["output"], OpenCalls())
    except (orjson.JSONDecodeError, LookupError, TypeError):
        raise NoNameError("the answer has another form") from None


def entries_of(answer: FinishedAnswer, form_: str) -> list[Entry]:
    """The entries of a streamed answer. Raises NoNameError."""
    for call in answer.calls:
        if exceeds(bytes(call.written), MAX_VALUES):
            raise NoNameError("the arguments have too many values")
    calls = [call_of(call.name, call.text) for call in answer.calls]
    if form_ == CHAT:
        refusal = answer.refusal
        content, more = parts_of(answer.text), {"refusal": refusal} if refusal else None
    else:
        spoken = [part.text for part in answer.parts if part.kind in (form.TEXT, form.REFUSAL)]
        content, more = [{"text": text} for text in spoken if text], None
    label = "redacted_thinking" if form_ == MESSAGES else "reasoning"
    sealed = [sealed_of(label, part.text) for part in answer.of(form.SEALED)]
    return [entry_of("assistant", content, reasoning=answer.reasoning, calls=calls, sealed=sealed, more=more)]


def response_entries(response: Any, answer: FinishedAnswer | None) -> list[Entry]:
    """The entries of a response at the end of its stream. answer: its value, for engines that leave the output out there.

    Raises NoNameError.
    """
    output = object_in(response, "the response").get("output")
    if output and isinstance(output, list):
        return item_entries(output, OpenCalls())
    if answer is None:
        raise NoNameError("the answer is too large")
    return entries_of(answer, "responses") if answer.parts else []
