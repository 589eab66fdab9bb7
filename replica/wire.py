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
    """New text of one choice. `stop_reason` is the stop string or stop token id that ended it, as in vLLM."""

    text: str
    scores: list[Placed] = field(default_factory=list)
    finish: Finish | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request cost; `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """The frame around one answer: the same id, model and time in every chunk. `spell` gives a token's text, `scored` says
    that scores were asked for, `dropped` is how many messages were left out to make the prompt fit."""

    kind: Kind
    id: str
    model: str
    created: int
    spell: Callable[[int], str] = str
    scored: bool = False
    dropped: int = 0

    def _frame(self, name: str, choices: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        frame = {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}
        return frame | {"usage": usage.body()} if usage else frame

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        bodies = [self._choice(index, piece) for index, piece in enumerate(choices)]
        frame = self._frame("chat.completion" if self.kind == "chat" else "text_completion", bodies, usage)
        return orjson.dumps(frame | self._truncated())

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        chat = {"message": {"role": "assistant", "content": piece.text}}
        ending = {"finish_reason": piece.finish, "stop_reason": piece.stop_reason}
        return {"index": index, "logprobs": self._logprobs(piece.scores), **ending} | (
            chat if self.kind == "chat" else {"text": piece.text}
        )

    def _truncated(self) -> dict[str, Any]:
        return {"truncation": {"dropped_messages": self.dropped}} if self.dropped else {}

    def head(self, index: int) -> bytes:
        """The first chunk of a choice in a streamed chat: the role, as in vLLM. A completion has none."""
        if self.kind != "chat":
            return b""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return _event(self._frame(self._stream_name, [choice], None) | self._truncated())

    def piece(self, index: int, piece: Piece) -> bytes:
        """A chunk with new text."""
        choice: dict[str, Any] = {"index": index}
        choice |= {"delta": {"content": piece.text}} if self.kind == "chat" else {"text": piece.text}
        choice |= {"logprobs": self._logprobs(piece.scores), "finish_reason": piece.finish}
        if piece.finish is not None:
            choice["stop_reason"] = piece.stop_reason
        return _event(self._frame(self._stream_name, [choice], None))

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
