"""Answers as bytes, in OpenAI's shapes with vLLM's additions: whole bodies, stream chunks, usage, scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from replica.calls import Kind
from replica.engine import Finish, TokenScore
from replica.fields import ApiError
from replica.transcript import Placed

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one choice, and the tokens drawn meanwhile. `stop_reason` is the stop string or stop token id that ended it,
    as in vLLM."""

    text: str
    tokens: list[int] = field(default_factory=list)
    scores: list[Placed] = field(default_factory=list)
    finish: Finish | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request, or one of its answers, cost; `cached_tokens` of the prompt were not computed again (None: not told)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        return body if self.cached_tokens is None else body | {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}}


@dataclass(frozen=True, slots=True)
class Answer:
    """The frame around one answer: the same id, model and time in every chunk. `spell` gives a token's text, `scored` says
    that scores were asked for, `dropped` is how many messages were left out to make the prompt fit, `prompt_ids` gives a
    choice's prompt as token ids, if those are asked for."""

    kind: Kind
    id: str
    model: str
    created: int
    spell: Callable[[int], str] = str
    scored: bool = False
    dropped: int = 0
    prompt_ids: Callable[[int], Sequence[int]] | None = None

    def _frame(self, name: str, choices: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        frame = {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}
        return frame | {"usage": usage.body()} if usage else frame

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        bodies = [self._choice(index, piece) for index, piece in enumerate(choices)]
        frame = self._frame("chat.completion" if self.kind == "chat" else "text_completion", bodies, usage)
        return orjson.dumps(frame | self._truncated() | self._chat_prompt())

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        if self.kind == "chat":
            choice["message"] = {"role": "assistant", "content": piece.text}
        else:
            choice |= {"text": piece.text} | self._text_prompt(index)
        ending = {"finish_reason": piece.finish, "stop_reason": piece.stop_reason}
        return choice | {"logprobs": self._logprobs(piece.scores), **ending} | self._tokens(piece)

    def _truncated(self) -> dict[str, Any]:
        return {"truncation": {"dropped_messages": self.dropped}} if self.dropped else {}

    def _chat_prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompt_ids(0)} if self.prompt_ids and self.kind == "chat" else {}

    def _text_prompt(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompt_ids(index)} if self.prompt_ids else {}

    def _tokens(self, piece: Piece) -> dict[str, Any]:
        return {"token_ids": piece.tokens} if self.prompt_ids else {}

    def head(self, index: int, usage: Usage | None = None) -> bytes:
        """The first chunk of a choice in a streamed chat: the role, as in vLLM. A completion has none."""
        if self.kind != "chat":
            return b""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return _event(self._frame(self._stream_name, [choice], usage) | self._truncated() | self._chat_prompt())

    def piece(self, index: int, piece: Piece, usage: Usage | None = None, first: bool = False) -> bytes:
        """A chunk with what is new; `first`: of its choice."""
        choice: dict[str, Any] = {"index": index}
        choice |= {"delta": {"content": piece.text}} if self.kind == "chat" else {"text": piece.text}
        choice |= {"logprobs": self._logprobs(piece.scores), "finish_reason": piece.finish} | self._tokens(piece)
        if piece.finish is not None:
            choice["stop_reason"] = piece.stop_reason
        if first and self.kind == "completion":
            choice |= self._text_prompt(index)
        return _event(self._frame(self._stream_name, [choice], usage))

    def usage(self, usage: Usage) -> bytes:
        """The chunk that include_usage asks for."""
        return _event(self._frame(self._stream_name, [], usage))

    @property
    def _stream_name(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _logprobs(self, placed: list[Placed]) -> dict[str, Any] | None:
        if not self.scored:
            return None
        if self.kind == "chat":
            return {"content": [self._chat_score(one.score) for one in placed]}
        return {
            "text_offset": [one.offset for one in placed],
            "token_logprobs": [one.score.logprob for one in placed],
            "tokens": [self.spell(one.score.token) for one in placed],
            "top_logprobs": [self._likeliest(one.score) for one in placed],
        }

    def _chat_score(self, score: TokenScore) -> dict[str, Any]:
        return self._named(score.token, score.logprob) | {"top_logprobs": [self._named(*one) for one in score.top]}

    def _likeliest(self, score: TokenScore) -> dict[str, float]:
        """The likeliest tokens and the one that was drawn, as in vLLM."""
        return {self.spell(token): logprob for token, logprob in (*score.top, (score.token, score.logprob))}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.spell(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def error_event(error: ApiError) -> bytes:
    """How a stream that has begun says that it failed."""
    return _event(error.body())


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
