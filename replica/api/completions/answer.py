"""The answers to a chat or a completion: `encoder` for each choice, in the order of a stream, with tool calls parsed from the
text of a chat with tools.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace

from replica.api.completions.encoder import DONE, Kind, ResponseEncoder, ToolCalls, error_event, tool_call
from replica.api.generation import AnswerContext, Counts, OutputOptions
from replica.api.validation import ApiError
from replica.output.generation import Delta, TokenUsage
from replica.output.tool_calls import Part, ToolCallReader, parts_of


class CompletionAnswer:
    """An `Encoder`. `n`: answers to each prompt. `scored`: scores were requested. `tools`: calls are parsed from the text."""

    def __init__(
        self, kind: Kind, n: int, output: OutputOptions, context: AnswerContext, *, scored: bool = False, tools: bool = False
    ) -> None:
        self._frames = ResponseEncoder(
            kind,
            f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{context.name}",
            context.model,
            context.created,
            spell=context.spell,
            scored=scored,
            dropped=context.dropped,
            prompt_ids=(lambda index: list(context.prompts[index // n])) if output.token_ids else None,
        )
        self._output, self._tools = output, tools
        self._begun: set[int] = set()
        self._readers: dict[int, ToolCallReader] = {}
        self._called: dict[int, int] = {}  # number of calls of each choice so far

    def whole(self, answers: Sequence[Delta], usage: TokenUsage) -> bytes:
        if not self._tools:
            return self._frames.whole(answers, usage)
        read = [self._split(index, parts_of(answer.text)) for index, answer in enumerate(answers)]
        texts = [replace(answer, text=text) for answer, (text, _) in zip(answers, read, strict=True)]
        calls = {index: [_without_index(call) for call in calls] for index, (_, calls) in enumerate(read) if calls}
        return self._frames.whole(texts, usage, calls)

    def delta(self, index: int, delta: Delta, counts: Counts) -> bytes:
        so_far = counts.usage_of(index) if self._output.usage == "each" else None
        first, out = index not in self._begun, b""
        if first:
            self._begun.add(index)
            out = self._frames.head(index, so_far and replace(so_far, completion_tokens=0))
        calls: ToolCalls = []
        if self._tools:
            delta, calls = self._read(index, delta)
        if calls or delta.text or delta.scores or delta.finish is not None or (delta.tokens and self._frames.prompt_ids):
            out += self._frames.chunk(index, delta, so_far, first, calls, index in self._called)
        return out

    def end(self, counts: Counts) -> bytes:
        return (self._frames.usage(counts.usage()) if self._output.usage != "none" else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        return error_event(error) + DONE

    def _read(self, index: int, delta: Delta) -> tuple[Delta, ToolCalls]:
        """The delta with the text outside of calls, and the calls."""
        reader = self._readers.setdefault(index, ToolCallReader())
        parts = reader.push(delta.text)
        if delta.finish is not None:
            parts += reader.finish()
        text, calls = self._split(index, parts)
        return replace(delta, text=text), calls

    def _split(self, index: int, parts: Sequence[Part]) -> tuple[str, ToolCalls]:
        text, calls = "", ToolCalls()
        for part in parts:
            if isinstance(part, str):
                text += part
            else:
                at = self._called.get(index, 0)
                calls.append(tool_call(at, f"call_{secrets.token_hex(12)}", part))
                self._called[index] = at + 1
        return text, calls


def _without_index(call: dict[str, object]) -> dict[str, object]:
    """Only the calls of a stream are numbered."""
    return {name: value for name, value in call.items() if name != "index"}
