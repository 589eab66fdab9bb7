"""The parent's side of an examination: it runs in a process of its own (`program.py`), which ends with it.

    records of all workers ──► written in parts, as fast as they are read ──► the report, as JSON

A process, and not turns of the event loop nor a thread: examining one long prompt takes 20 ms and more in one step, all that a
watch remembers many seconds, and compiled modules do not give up the GIL. The memory that it takes goes back with it, too.

Bounds: EXAMINE_S, MAX_REPORT. Whoever is cancelled, or waits too long, leaves no process behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.config.schema import PriceConfig
from gateway.errors import internal_error, out_of_resources
from gateway.features.doctor.examination import Examination
from gateway.features.doctor.report import encoded
from gateway.features.doctor.watch import WatchedRequests

log = logging.getLogger("warmroute.doctor")

EXAMINE_S: Final = 120.0
MAX_REPORT: Final = 64 << 20  # bytes; a report has 1,000 findings at most
PART: Final = 256 << 10  # bytes that are joined at once
RECORD: Final = struct.Struct("<dI")  # when it came, bytes that follow; the first of all is the job's head

# The child uses the parent's module path, whatever its working directory is.
BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from gateway.features.doctor.program import main; main()"
)


class Examiner:
    """See the top of this file. within_s: of one examination; boot: the program."""

    def __init__(self, *, within_s: float = EXAMINE_S, boot: str = BOOT) -> None:
        self.started = 0
        self._within_s = within_s
        self._boot = boot

    async def examine(
        self,
        about: Mapping[str, Any],
        prices: Mapping[str, Sequence[PriceConfig]],
        watched: Sequence[WatchedRequests],
        now: float,
    ) -> bytes:
        """The report, as JSON that begins with `about`. now: Unix seconds. Raises GatewayError: 503, or 500 for a bug."""
        if not any(each.records for each in watched):
            return encoded(about, Examination())
        try:
            async with asyncio.timeout(self._within_s):
                return await self._run(msgspec.msgpack.encode((about, prices, now)), watched)
        except TimeoutError:
            raise out_of_resources("the examination took too long") from None
        except OSError as broken:  # it was killed, or could not be started
            log.error("the doctor's process failed", extra={"error": str(broken)})
            raise out_of_resources("no process for the examination") from None

    async def _run(self, head: bytes, watched: Sequence[WatchedRequests]) -> bytes:
        """Raises OSError; GatewayError if it failed by a bug, which is on its standard error."""
        command = [sys.executable, "-c", self._boot, json.dumps(sys.path)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True)
        self.started += 1
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            for part in _parts(head, watched):
                process.stdin.write(part)
                await process.stdin.drain()
            process.stdin.close()
            report = await _read(process.stdout)
            status = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if status < 0:
            raise ChildProcessError(f"ended by signal {-status}")
        if status:
            raise internal_error()
        return report

    def __repr__(self) -> str:
        return f"<Examiner, {self.started} started>"


async def _read(stream: asyncio.StreamReader) -> bytes:
    """Until its end. Raises OSError if it is longer than a report."""
    found = bytearray()
    while part := await stream.read(PART):
        found += part
        if len(found) > MAX_REPORT:
            raise OSError(f"a report of more than {MAX_REPORT} bytes")
    return bytes(found)


def _parts(head: bytes, watched: Sequence[WatchedRequests]) -> Iterator[bytes]:
    """What is written, about PART bytes at a time."""
    parts, size = [RECORD.pack(0.0, len(head)), head], 0
    for each in watched:
        for time, record in each.records:
            parts += RECORD.pack(time, len(record)), record
            size += len(record)
            if size >= PART:
                yield b"".join(parts)
                parts, size = [], 0
    yield b"".join(parts)
