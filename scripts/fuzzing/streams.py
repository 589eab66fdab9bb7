"""Stream readers: any chunking of a stream gives the same bytes, and only the event that the gateway requested is removed."""

from __future__ import annotations

from random import Random

from gateway.dialects.openai.stream import EventReader
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
]


def invent(chance: Random) -> bytes:
    return b"".join(chance.choice(TOKENS) for _ in range(chance.choice([1, 2, 3, 5])))


def check(data: bytes, chance: Random) -> str:
    """Raises AssertionError, or whatever escapes. Returns the kind of outcome."""
    kinds = []
    for strip in (False, True):
        whole = _run(strip, [data])
        assert _run(strip, cut(data, chance)) == whole
        assert _run(strip, [bytes([byte]) for byte in data[:3000]] + [data[3000:]]) == whole
        out, usage, done = whole
        assert strip or out == data
        assert len(out) == len(data) or usage
        kinds.append(f"{'all' if out == data else 'less'}, usage {usage is not None}, done {done}")
    return "; ".join(kinds)


def _run(strip: bool, pieces: list[bytes]) -> tuple[bytes, object, bool]:
    reader = EventReader(strip_usage=strip)
    out = b"".join([reader.feed(piece) for piece in pieces])
    return out + reader.finish(), reader.usage, reader.done


def one(data: bytes, chance: Random) -> tuple[bytes, str]:
    """One input made of a known one (or of nothing), and its kind."""
    made = mutate(data or invent(chance), chance, TOKENS) if chance.random() < 0.8 else invent(chance)
    return made, check(made, chance)
