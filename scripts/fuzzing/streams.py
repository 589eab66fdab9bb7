"""Stream readers: any chunking of a stream gives the same bytes and findings, and only the event that the gateway requested is
removed, and of Messages and Responses an event that is cut, an error without a name, and an end without its response.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from gateway.dialects.anthropic.stream import MessageReader
from gateway.dialects.dialect import StreamReader
from gateway.dialects.events.named import name_of
from gateway.dialects.events.sse import EVENT_END, events_of, object_of, skipped_at
from gateway.dialects.openai.stream import ChunkReader
from gateway.dialects.responses.stream import ResponseReader
from scripts.fuzzing.mutate import cut, mutate

_USAGE = b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}'
TOKENS = [
    b"data: " + _USAGE + b"\n\n",
    b"data: " + _USAGE + b"\r\n\r\n",
    b'data: {"choices":[{"delta":{"content":"x"}}],"usage":null}\n\n',
    b"data:" + _USAGE.replace(b",", b",\ndata:") + b"\n\n",
    b"data: [DONE]\n\n",
    b"data: [DONE]\r\r",
    b"data: [DONE]",
    b": ping\n\n",
    b"event: error\ndata: {}\n\n",
    b'"usage"',
    b"[DONE]",
    b"data: ",
    b"\n",
    b"\r",
    b"\r\n",
    b"\r\n\r\n",
    b"\xff\xfe",
    b'{"usage":{"prompt_tokens":1e999}}',
    b'{"usage":{"prompt_tokens":-1,"completion_tokens":true}}',
    b"[" * 300,
    b'event: message_start\ndata: {"message":{"usage":{"input_tokens":9,"output_tokens":0}}}\n\n',
    b'event: message_delta\ndata: {"usage":{"output_tokens":5,"cache_read_input_tokens":3}}\n\n',
    b'data: {"type":"message_stop"}\n\n',
    b'event:error\ndata: {"type":"error","error":{"type":"api_error","message":"x"}}\n\n',
    b'event: response.completed\ndata: {"response":{"usage":{"input_tokens":9,"output_tokens":1}},"sequence_number":4}\n\n',
    b'data: {"type":"response.failed","response":{"error":{"code":"server_error","message":"x"}}}\n\n',
    b"event: ",
    b'"type":"error"',
]


def invent(chance: Random) -> bytes:
    return b"".join(chance.choice(TOKENS) for _ in range(chance.choice([1, 2, 3, 5])))


def check(data: bytes, chance: Random) -> str:
    """Read a stream in all ways; returns the kind of outcome. Raises AssertionError, or the readers' errors."""
    kinds, bytewise = [], chance.choice(list(_READERS))  # one of them: this takes most of the time
    for name, reader in _READERS.items():
        whole = _run(reader(), [data])
        assert _run(reader(), cut(data, chance)) == whole
        if name == bytewise:
            assert _run(reader(), [bytes([byte]) for byte in data[:3000]] + [data[3000:]]) == whole
        out, usage, done, reported, failed = whole
        if failed:  # before the first token: no further event passes
            assert len(out) < len(data)
        elif name in ("messages", "responses"):
            assert out == data or _lacks_only_what_may_be(out, data)
        else:
            assert name == "stripped" or out == data
            assert len(out) == len(data) or usage
        kinds.append(f"{name}: {'all' if out == data else 'less'}, usage {usage is not None}, done {done}, {reported}")
    return "; ".join(kinds)


_READERS: dict[str, Callable[[], StreamReader]] = {
    "whole": lambda: ChunkReader(strip_usage=False),
    "stripped": lambda: ChunkReader(strip_usage=True),
    "messages": MessageReader,
    "responses": ResponseReader,
}


def _run(reader: StreamReader, pieces: list[bytes]) -> tuple[bytes, object, bool, bool, bool]:
    out = b"".join([reader.feed(piece) for piece in pieces])
    return out + reader.finish(), reader.usage, reader.done, reader.reported is not None, reader.failure is not None


def _lacks_only_what_may_be(out: bytes, data: bytes) -> bool:
    at = 0
    for each in events_of(data):
        lines = skipped_at(each, 0) if each.startswith((b":", b"\r", b"\n")) else 0  # they pass at once
        if not out.startswith(each[:lines], at):
            return False
        at, event = at + lines, each[lines:]
        if out.startswith(event, at):
            at += len(event)
        elif EVENT_END.search(event) and not _is_no_event(event):
            return False
    return at == len(out)


def _is_no_event(event: bytes) -> bool:
    """An error that has its name in its data only, or an end without the response that it should repeat."""
    kind, read = name_of(event), object_of(event)
    no_end = kind in ("response.completed", "response.incomplete") and not isinstance(read.get("response"), dict)
    return no_end or (read.get("type") == "error" and not _has_name(event))


def _has_name(event: bytes) -> bool:
    """Return whether the first bytes of an event, which are searched, have its name. Clients ignore a longer name."""
    lines = event[:300].splitlines(keepends=True)
    return any(line.startswith(b"event:") and line.endswith((b"\r", b"\n")) for line in lines)


def one(data: bytes, chance: Random) -> tuple[bytes, str]:
    """One input made of a known one (or of nothing), and its kind."""
    made = mutate(data or invent(chance), chance, TOKENS) if chance.random() < 0.8 else invent(chance)
    return made, check(made, chance)
