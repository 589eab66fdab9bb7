"""A stored turn as an answer: for a token whose generation has ended. Pure. O(length).

The original pieces of a stream are not stored, so each text is one event. The usage is that of the generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import orjson

from gateway.dialects import finished_answer as value
from gateway.dialects.finished_answer import FinishedAnswer
from gateway.dialects.json_edits import apply, read_object
from gateway.dialects.usage import Usage
from gateway.features.histories.records import StoredResponse
from gateway.features.histories.replay import replayed
from gateway.features.prompt_log.naming.forms import CHAT, MESSAGES
from gateway.features.prompt_log.turns.answers import INCOMPLETE

Told = Mapping[str, str | int | bool]
_STOP_REASONS: Final = {
    value.STOP: "end_turn",
    value.LENGTH: "max_tokens",
    value.TOOL_CALLS: "tool_use",
    value.CONTENT_FILTER: "refusal",
}


def facts_of(answer: FinishedAnswer, usage: Usage | None) -> bytes:
    """The facts of an answer of chat or Messages that are not in its turn, to be stored beside it (JSON)."""
    counts = [usage.prompt, usage.completion, usage.cached] if usage is not None else None
    facts = {"id": answer.id, "model": answer.model, "reason": answer.finish_reason, "stop": answer.stop, "usage": counts}
    return orjson.dumps(facts)


class RepeatedAnswer:
    """An answer of chat, Messages or Responses. row: its turn. model: that the client has asked for. told: about the log."""

    def __init__(self, row: StoredResponse, model: str, told: Told) -> None:
        self._row = row
        self._told = told
        facts = orjson.loads(row.response) if row.response and row.log.form in (CHAT, MESSAGES) else {}
        reason = value.LENGTH if row.status == INCOMPLETE else value.STOP
        self._id = facts.get("id") or row.id
        self._model = facts.get("model") or model
        self._reason = facts.get("reason") or reason
        self._stop = facts.get("stop") or None
        self._counts: list[int | None] = facts.get("usage") or [None, None, None]

    def plain(self) -> bytes:
        """The body."""
        form = self._row.log.form
        if form == CHAT:
            choice = {"index": 0, "message": orjson.Fragment(self._row.output), "logprobs": None, "finish_reason": self._reason}
            return orjson.dumps({**self._chat("chat.completion"), "choices": [choice], **self._chat_usage()})
        if form == MESSAGES:
            message = self._message(orjson.loads(self._row.output)["content"])
            return orjson.dumps({**message, "stop_reason": self._stop_reason, "stop_sequence": self._stop})
        return self._row.response

    def streamed(self, *, usage: bool) -> Iterator[bytes]:
        """The events. usage: a client of chat has asked for it."""
        form = self._row.log.form
        if form == CHAT:
            return self._chunks(usage=usage)
        return self._events() if form == MESSAGES else self._response_events()

    # -- chat

    def _chat(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": int(self._row.created_at), "model": self._model}

    def _chat_usage(self) -> dict[str, Any]:
        prompt, completion, cached = self._counts
        if prompt is None or completion is None:
            return {}
        counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {"usage": counts if cached is None else counts | {"prompt_tokens_details": {"cached_tokens": cached}}}

    def _chunks(self, *, usage: bool) -> Iterator[bytes]:
        delta = {name: member for name, member in orjson.loads(self._row.output).items() if member is not None}
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        yield self._chunk([{"index": 0, "delta": delta, "finish_reason": None}])
        yield self._chunk([{"index": 0, "delta": {}, "finish_reason": self._reason}])
        if usage and (counts := self._chat_usage()):
            yield self._chunk([], **counts)
        yield self._chunk([], prompt_log=self._told)
        yield b"data: [DONE]\n\n"

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: %b\n\n" % orjson.dumps({**self._chat("chat.completion.chunk"), "choices": choices, **more})

    # -- Messages

    @property
    def _stop_reason(self) -> str:
        return "stop_sequence" if self._stop else _STOP_REASONS.get(self._reason, self._reason)

    def _message(self, content: list[Any]) -> dict[str, Any]:
        prompt, completion, cached = self._counts
        counts = {"input_tokens": (prompt or 0) - (cached or 0), "output_tokens": completion or 0}
        if cached is not None:
            counts["cache_read_input_tokens"] = cached
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, "stop_reason": None, "stop_sequence": None, "usage": counts}

    def _events(self) -> Iterator[bytes]:
        yield _event("message_start", message=self._message([]))
        for index, block in enumerate(orjson.loads(self._row.output)["content"]):
            begun, deltas = _parts_of(block)
            yield _event("content_block_start", index=index, content_block=begun)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop}
        yield _event("message_delta", delta=delta, usage={"output_tokens": self._counts[1] or 0})
        yield _event("prompt_log", prompt_log=self._told)
        yield _event("message_stop")

    # -- Responses

    def _response_events(self) -> Iterator[bytes]:
        response = self._row.response
        return replayed(apply(response, [read_object(response).put("prompt_log", orjson.dumps(self._told))]), None)


def _event(kind: str, **members: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode("ascii"), orjson.dumps({"type": kind, **members}))


def _text(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _thinking(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    signature, deltas = block.get("signature"), [{"type": "thinking_delta", "thinking": block["thinking"]}]
    if signature:
        deltas.append({"type": "signature_delta", "signature": signature})
    return {**block, "thinking": "", "signature": ""}, deltas


def _call(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    arguments = orjson.dumps(block.get("input") or {}).decode()
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


_Parts = Callable[[dict[str, Any]], tuple[dict[str, Any], list[dict[str, Any]]]]
_BLOCKS: Final[Mapping[str, _Parts]] = {"text": _text, "thinking": _thinking, "tool_use": _call}


def _parts_of(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The beginning of a block, and its deltas. Other blocks come whole."""
    parts = _BLOCKS.get(block.get("type", ""))
    return parts(block) if parts is not None else (block, [])
