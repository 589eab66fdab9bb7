"""What a body costs before it is forwarded: in the event loop, where it is small, and beside it, where it is large.

    python -m bench.gateway.parsing          # hostile and honest bodies of 2 kB to 60 MiB

For each: how long it took at best, the longest time in any run for which the event loop did nothing else, how often the loop
turned meanwhile, and the parser process's peak memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from gateway.cluster.process import relax_garbage_collection, run
from gateway.dialects.api_request import router_prompt
from gateway.dialects.dialect import Dialect
from gateway.dialects.table import DIALECTS
from gateway.errors import GatewayError
from gateway.parser.parsing import INLINE_BYTES, UNCOUNTED_BYTES, Parsing
from gateway.parser.process import ParserProcess

CHAT, COMPLETION = DIALECTS["/v1/chat/completions"], DIALECTS["/v1/completions"]
SIZES: Final = (2_000, 32_000, 64_000, UNCOUNTED_BYTES, 1 << 20, INLINE_BYTES, 8 << 20, 60 << 20)
_CHAT: Final = b'{"model":"m","stream":true,"messages":[{"role":"user","content":'
_EXTRA: Final = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}],"x":['

# name -> head, item, what is between items, tail
SHAPES: Final[dict[str, tuple[bytes, bytes, bytes, bytes]]] = {
    "text": (_CHAT + b'"', b"The quick brown fox, and so on. ", b"", b'"}]}'),
    "code": (_CHAT + b'"', b'\\n    return [f(x, \\"y\\") for x in {a, b}]', b"", b'"}]}'),
    "escapes": (_CHAT + b'"', b"\\u00e9", b"", b'"}]}'),
    "emoji": (_CHAT + b'"', "a😀".encode(), b"", b'"}]}'),
    "images": (
        _CHAT + b"[",
        b'{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}' % (b"A" * 40_000),
        b",",
        b"]}]}",
    ),
    "spaces": (_CHAT + b'"x"}]', b" " * 100, b"", b"}"),
    "parts": (_CHAT + b"[", b"{}", b",", b"]}]}"),
    "messages": (b'{"model":"m","messages":[', b'{"role":"","a":1}', b",", b"]}"),
    "lists": (_EXTRA, b"[]", b",", b"]}"),
    "nested": (_EXTRA, b"[" * 1000 + b"]" * 1000, b",", b"]}"),
    "nested objects": (_EXTRA, b'{"a":' * 1000 + b"1" + b"}" * 1000, b",", b"]}"),
    "numbers": (_EXTRA, b"1.5e300", b",", b"]}"),
    "options": (_EXTRA.replace(b"true", b'true,"stream_options":{}'), b"[]", b",", b"]}"),
    "tokens": (b'{"model":"m","prompt":[', b"1234", b",", b"]}"),
}


def body_of(shape: str, size: int) -> bytes:
    """A body of about `size` bytes."""
    head, item, between, tail = SHAPES[shape]
    count = max(1, (size - len(head) - len(tail)) // (len(item) + len(between)))
    return head + (item + between) * (count - 1) + item + tail


class Gaps:
    """The longest time between two turns of the event loop, and how many there were."""

    def __init__(self) -> None:
        self.longest_s, self.turns = 0.0, 0

    async def watch(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            self.longest_s, self.turns, last = max(self.longest_s, now - last), self.turns + 1, now


@contextlib.contextmanager
def watched() -> Iterator[Gaps]:
    gaps = Gaps()
    task = asyncio.create_task(gaps.watch())
    try:
        yield gaps
    finally:
        task.cancel()


async def once(parsing: Parsing, dialect: Dialect, raw: bytes) -> str:
    """Parse it as the gateway does, keys included. Returns what came of it."""
    try:
        api = parsing.at_once(dialect, raw)
        where = "loop" if api else "process"
        api = api or await parsing.parse(dialect, raw)
    except GatewayError as error:
        return f"{error.status} {error.code}"
    return f"{where}, {router_prompt(api, (256, 64)).blocks} blocks"


async def measure(parsing: Parsing, shape: str, size: int) -> str:
    raw, dialect = body_of(shape, size), COMPLETION if shape == "tokens" else CHAT
    worst_s, seconds, turns, peak, result = 0.0, list[float](), 0, 0, ""
    for _ in range(20 if size <= INLINE_BYTES else 3):
        gc.collect()
        _clear_peak(parsing.process.pid)
        with watched() as gaps:
            await asyncio.sleep(0.002)
            gaps.longest_s, gaps.turns, begun = 0.0, 0, time.perf_counter()
            result = await once(parsing, dialect, raw)
            seconds.append(time.perf_counter() - begun)
            await asyncio.sleep(0)
            worst_s, turns = max(worst_s, gaps.longest_s), gaps.turns
        peak = _peak_mb(parsing.process.pid)
    least_ms = min(seconds) * 1e3
    return f"{shape:14} {len(raw):>9} B  {least_ms:8.2f} ms  {worst_s * 1e3:8.2f} ms  {turns:>7}  {peak:>5}  {result}"


def _clear_peak(pid: int | None) -> None:
    if pid:
        Path(f"/proc/{pid}/clear_refs").write_text("5", "ascii")


def _peak_mb(pid: int | None) -> int:
    if not pid:
        return 0
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM"))


async def measured(shapes: Collection[str], most: int) -> None:
    parsing = Parsing(ParserProcess(), 256, 64)
    await parsing.parse(CHAT, body_of("text", 1000))
    print(f"{'shape':14} {'body':>11}  {'least':>11}  {'longest gap':>11}  {'turns':>7}  peak MiB")
    try:
        for size in [size for size in SIZES if size <= most]:
            for shape in shapes:
                print(await measure(parsing, shape, size), flush=True)
    finally:
        await parsing.process.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gateway.parsing", description="What a body costs before it is forwarded."
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SHAPE", help=f"of: {', '.join(SHAPES)}"
    )
    parser.add_argument("--most", type=int, default=SIZES[-1], help="bytes of the largest bodies (default: %(default)s)")
    options = parser.parse_args(arguments)
    relax_garbage_collection()
    run(measured(options.shapes, options.most))
    return 0


if __name__ == "__main__":
    sys.exit(main())
