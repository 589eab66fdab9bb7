"""Stored turns as answers: the counts that a client reads are those of the generation, whatever its API calls them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.finished_answer import STOP, FinishedAnswer
from gateway.dialects.usage import Usage
from gateway.features.histories.records import StoredResponse, TurnNames
from gateway.features.prompt_log.naming.forms import CHAT, MESSAGES
from gateway.features.prompt_log.once.repeating import RepeatedAnswer, facts_of

OUTPUTS = {
    CHAT: {"role": "assistant", "content": "hello"},
    MESSAGES: {"role": "assistant", "content": [{"type": "text", "text": "hello"}]},
}
COUNTS = {
    CHAT: {"prompt_tokens": 100, "completion_tokens": 4, "total_tokens": 104},
    MESSAGES: {"input_tokens": 100, "output_tokens": 4},
}
CACHED = {
    CHAT: {**COUNTS[CHAT], "prompt_tokens_details": {"cached_tokens": 60}},
    MESSAGES: {"input_tokens": 40, "output_tokens": 4, "cache_read_input_tokens": 60},
}


def repeated(form: str, usage: Usage) -> RepeatedAnswer:
    answer = FinishedAnswer()
    answer.finish_reason = STOP
    row = StoredResponse(
        owner="o",
        id="turn_1",
        created_at=1.0,
        status="completed",
        input=b"",
        output=json.dumps(OUTPUTS[form]).encode(),
        response=facts_of(answer, usage),
        log=TurnNames(form=form),
    )
    return RepeatedAnswer(row, "m", {})


def told(events: list[bytes]) -> dict[str, Any]:
    """The counts of a stream, the later ones last."""
    found: dict[str, Any] = {}
    for event in events:
        text = event.decode().partition("data: ")[2]
        data = {} if text.startswith("[DONE]") else json.loads(text)
        found |= data.get("usage") or data.get("message", {}).get("usage") or {}
    return found


@pytest.mark.parametrize("form", OUTPUTS)
@pytest.mark.parametrize(("cached", "wanted"), [(None, COUNTS), (60, CACHED)])
def test_a_repeated_answer_has_the_counts_of_its_generation(form: str, cached: int | None, wanted: dict[str, Any]) -> None:
    answer = repeated(form, Usage(100, 4, cached))
    assert json.loads(answer.plain())["usage"] == wanted[form]
    assert told([*answer.streamed(usage=True)]) == wanted[form]
