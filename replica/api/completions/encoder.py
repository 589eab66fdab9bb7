"""Response bodies as bytes, in OpenAI's formats with vLLM's additions: whole bodies, stream chunks, usage, token scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson

from replica.api.validation import ApiError
from replica.engine import TokenScore
from replica.output.generation import Delta, TokenUsage
from replica.output.tool_calls import ToolCallText
from replica.output.transcript import PlacedScore

ToolCalls = list[dict[str, Any]]
Kind = Literal["chat", "completion"]
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ResponseEncoder:
    """Encodes one response; every chunk has the same id, model and time. `spell` gives a token's text. `scored`: scores were
    requested. `dropped`: number of messages left out to make the prompt fit. `prompt_ids`: a choice's prompt as token ids, None
    if these were not requested.
    """

    kind: Kind
    id: str
    model: str
    created: int
    spell: Callable[[int], str] = str
    scored: bool = False
    dropped: int = 0
    prompt_ids: Callable[[int], Sequence[int]] | None = None

    def _frame(self, name: str, choices: list[dict[str, Any]], usage: TokenUsage | None) -> dict[str, Any]:
        frame = {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}
        return frame | {"usage": usage_body(usage)} if usage else frame

    def whole(self, choices: Sequence[Delta], usage: TokenUsage, calls: Mapping[int, ToolCalls] | None = None) -> bytes:
        """The body of a plain response. `calls`: of each choice that has any."""
        bodies = [self._choice(index, delta, (calls or {}).get(index, [])) for index, delta in enumerate(choices)]
        frame = self._frame("chat.completion" if self.kind == "chat" else "text_completion", bodies, usage)
        return orjson.dumps(frame | self._truncation() | self._chat_prompt())

    def _choice(self, index: int, delta: Delta, calls: ToolCalls) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        if self.kind == "chat":
            called = {"content": delta.text or None, "tool_calls": calls} if calls else {"content": delta.text}
            choice["message"] = {"role": "assistant", **called}
        else:
            choice |= {"text": delta.text} | self._text_prompt(index)
        reasons = {"finish_reason": _finish(delta, bool(calls)), "stop_reason": delta.stop_reason}
        return choice | {"logprobs": self._logprobs(delta.scores), **reasons} | self._token_ids(delta)

    def _truncation(self) -> dict[str, Any]:
        return {"truncation": {"dropped_messages": self.dropped}} if self.dropped else {}

    def _chat_prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompt_ids(0)} if self.prompt_ids and self.kind == "chat" else {}

    def _text_prompt(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompt_ids(index)} if self.prompt_ids else {}

    def _token_ids(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": delta.tokens} if self.prompt_ids else {}

    def head(self, index: int, usage: TokenUsage | None = None) -> bytes:
        """The first chunk of a choice in a streamed chat: the role, as in vLLM. A completion has none."""
        if self.kind != "chat":
            return b""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return _event(self._frame(self._stream_name, [choice], usage) | self._truncation() | self._chat_prompt())

    def chunk(
        self,
        index: int,
        delta: Delta,
        usage: TokenUsage | None = None,
        first: bool = False,
        calls: ToolCalls | None = None,
        called: bool = False,
    ) -> bytes:
        """`first`: the first chunk of its choice. `calls`: of this chunk. `called`: the choice has had any call.

        The finish reason is never in a chunk with a call: OpenAI's client would not report the end of that call.
        """
        if calls and delta.finish is not None:
            end = Delta("", finish=delta.finish, stop_reason=delta.stop_reason)
            said = self.chunk(index, replace(delta, finish=None, stop_reason=None), usage, first, calls, called)
            return said + self.chunk(index, end, usage, called=called)
        choice: dict[str, Any] = {"index": index}
        choice |= {"delta": {"content": delta.text}} if self.kind == "chat" else {"text": delta.text}
        if calls:
            choice["delta"] = {"content": delta.text} if delta.text else {}
            choice["delta"]["tool_calls"] = calls
        finish = _finish(delta, called)
        choice |= {"logprobs": self._logprobs(delta.scores), "finish_reason": finish} | self._token_ids(delta)
        if delta.finish is not None:
            choice["stop_reason"] = delta.stop_reason
        if first and self.kind == "completion":
            choice |= self._text_prompt(index)
        return _event(self._frame(self._stream_name, [choice], usage))

    def usage(self, usage: TokenUsage) -> bytes:
        """The usage chunk of include_usage."""
        return _event(self._frame(self._stream_name, [], usage))

    @property
    def _stream_name(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _logprobs(self, placed: list[PlacedScore]) -> dict[str, Any] | None:
        if not self.scored:
            return None
        if self.kind == "chat":
            return {"content": [_written(self._chat_score(one.score)) for one in placed]}
        return {
            "text_offset": [one.offset for one in placed],
            "token_logprobs": [one.score.logprob for one in placed],
            "tokens": [self.spell(one.score.token) for one in placed],
            "top_logprobs": [_written(self._likeliest(one.score)) for one in placed],
        }

    def _chat_score(self, score: TokenScore) -> dict[str, Any]:
        return self._logprob(score.token, score.logprob) | {"top_logprobs": [self._logprob(*one) for one in score.top]}

    def _likeliest(self, score: TokenScore) -> dict[str, float]:
        """The likeliest tokens and the drawn one, as in vLLM."""
        return {self.spell(token): logprob for token, logprob in (*score.top, (score.token, score.logprob))}

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.spell(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _written(score: Mapping[str, Any]) -> orjson.Fragment:
    """A score as JSON, which takes a quarter of the memory of its values."""
    return orjson.Fragment(orjson.dumps(score))


def tool_call(index: int, name: str, call: ToolCallText) -> dict[str, Any]:
    """A chat's call; `name` is its id."""
    return {"index": index, "id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish(delta: Delta, called: bool) -> str | None:
    return "tool_calls" if called and delta.finish == "stop" else delta.finish


def usage_body(usage: TokenUsage) -> dict[str, Any]:
    """OpenAI's `usage`."""
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    return body if usage.cached_tokens is None else body | {"prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}


def error_event(error: ApiError) -> bytes:
    """The event by which a stream reports its failure."""
    return _event(error.body())


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
