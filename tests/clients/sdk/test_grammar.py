"""The grammars themselves: a stream that lacks an event, has one twice or two in the wrong order, is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from pydantic import ValidationError

from tests.clients.sdk import told
from tests.clients.sdk.grammar.answers import frames_of
from tests.clients.sdk.grammar.chat import completion_of
from tests.clients.sdk.grammar.messages import message_of
from tests.clients.sdk.grammar.responses import response_of

Frames = list[tuple[str, bytes]]
WRONG = (AssertionError, ValidationError, KeyError, IndexError, ValueError)
MESSAGES = frames_of(told.thinking_message())
RESPONSES = frames_of(told.reasoning_response())
CHAT = frames_of(told.thinking_chat())


def is_free(frame: tuple[str, bytes]) -> bool:
    """An event that may be missing or come twice, for all that the stream shows: a ping, a piece of a text, a signature."""
    data = frame[1]
    texts = (b'"text_delta"', b'"thinking_delta"', b'"signature_delta"', b'"input_json_delta"')
    return frame[0] == "ping" or any(one in data for one in texts)


def changed(frames: Frames) -> Iterator[tuple[str, Frames]]:
    for at, frame in enumerate(frames):
        if not is_free(frame):
            yield f"without {at}", frames[:at] + frames[at + 1 :]
            if frame[0] != "message_delta":  # there may be several
                yield f"{at} twice", frames[: at + 1] + frames[at:]
    for at, (one, other) in enumerate(pairwise(frames)):
        if not is_free(one) and not is_free(other):
            yield f"{at} and {at + 1} exchanged", [*frames[:at], other, one, *frames[at + 2 :]]


@pytest.mark.parametrize(
    ("grammar", "frames"), [(message_of, MESSAGES), (response_of, RESPONSES)], ids=["messages", "responses"]
)
def test_every_change_is_noticed(grammar: Callable[[Frames], Any], frames: Frames) -> None:
    assert grammar(frames)
    unnoticed = list[str]()
    for name, other in changed(frames):
        try:
            grammar(other)
            unnoticed.append(name)
        except WRONG:
            """As it should."""
    assert len(list(changed(frames))) > 30
    assert not unnoticed


def test_ends_of_a_chat_are_noticed() -> None:
    assert completion_of(CHAT)
    for frames in (
        CHAT[:-1],
        CHAT[1:],
        [*CHAT[:-2], CHAT[-1], CHAT[-2]],
        [one for one in CHAT if b'tool_calls"}' not in one[1]],
    ):
        with pytest.raises(WRONG):
            completion_of(frames)


@pytest.mark.parametrize("field", ["index", "type"])
def test_fields_of_the_wrong_type_are_noticed(field: str) -> None:
    start = next(at for at, one in enumerate(MESSAGES) if one[0] == "content_block_start")
    broken = json.loads(MESSAGES[start][1])
    broken[field] = "0"
    with pytest.raises(WRONG):
        message_of([*MESSAGES[:start], (MESSAGES[start][0], json.dumps(broken).encode()), *MESSAGES[start + 1 :]])
