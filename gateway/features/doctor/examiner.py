"""Runs an examination in its own process (`program.py`), which ends with it.

    records of all workers ──► written in parts, as fast as they are read ──► the report, as JSON

A process is needed instead of the event loop or a thread: one long prompt takes 20 ms and more in one step, all remembered
prompts many seconds, and compiled modules do not release the GIL. The process's memory is freed at its end, too.

Bounds: EXAMINE_S, MAX_REPORT. After a cancellation or a time-out the process is killed.
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
MAX_REPORT: Final = 64 << 20  # bytes; a report has at most 1,000 findings
PART: Final = 256 << 10  # bytes per write
RECORD: Final = struct.Struct("<dI")  # arrival, length; the first record is the head of the job

# The child imports modules from the parent's paths, independent of its working directory.
BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from gateway.features.doctor.program import main; main()"
)


class Examiner:
    """Starts examinations. within_s: time limit of one. boot: the program."""

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
        """The report, as JSON that begins with `about`. now: Unix seconds. Raises GatewayError: 503, or 500 because of a
        bug.
        """
        if not any(each.records for each in watched):
            return encoded(about, Examination())
        try:
            async with asyncio.timeout(self._within_s):
                return await self._run(msgspec.msgpack.encode((about, prices, now)), watched)
        except TimeoutError:
            raise out_of_resources("the examination took too long") from None
        except OSError as broken:  # the process was killed, or could not be started
            log.error("the doctor's process failed", extra={"error": str(broken)})
            raise out_of_resources("no process for the examination") from None

    async def _run(self, head: bytes, watched: Sequence[WatchedRequests]) -> bytes:
        """Raises OSError; GatewayError after a bug in the process, which writes it to its standard error."""
        command = [sys.executable, "-c", self._boot, json.dumps(sys.path)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True)
        self.started += 1
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for part in _parts(head, watched):
                process.stdin.write(part)
                await process.stdin.drain()
            process.stdin.close()
            report = await _read(process.stdout)
            status = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            while await process.stdout.read(PART):  # else its pipe stays open
                pass
            await process.wait()
        if status < 0:
            raise ChildProcessError(f"ended by signal {-status}")
        if status:
            raise internal_error()
        return report

    def __repr__(self) -> str:
        return f"<Examiner, {self.started} started>"


async def _read(stream: asyncio.StreamReader) -> bytes:
    """Reads to the end. Raises OSError beyond MAX_REPORT."""
    found = bytearray()
    while part := await stream.read(PART):
        found += part
        if len(found) > MAX_REPORT:
            raise OSError(f"a report of more than {MAX_REPORT} bytes")
    return bytes(found)


def _parts(head: bytes, watched: Sequence[WatchedRequests]) -> Iterator[bytes]:
    """The input of the process, in pieces of about PART bytes."""
    parts, size = [RECORD.pack(0.0, len(head)), head], 0
    for each in watched:
        for time, record in each.records:
            parts += RECORD.pack(time, len(record)), record
            size += len(record)
            if size >= PART:
                yield b"".join(parts)
                parts, size = [], 0
    yield b"".join(parts)
