"""The parent's side of the parser process: starts it for the first job, runs one job at a time, replaces it after a failure.

    queued ── round robin over clients ──► written ──► result read ──► done
       │                                      └────────────┴─────► the process exited, or took too long: it is killed, the job
       └─ the client left: dropped                                 fails, and the next job starts another process

Jobs are FIFO within a client and round robin over clients: large bodies of one client do not block the other clients. A client
may have as many queued jobs as the queue has free slots.

A caller may be cancelled at any time: its running job goes on, so that both ends agree on the next result. The body is written
by a non-blocking socket, while the event loop runs. The process lives until `close`; if its parent dies, it exits.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import marshal
import socket
import subprocess
import sys
from collections import deque
from typing import Any, Final

from gateway.errors import OUT_OF_RESOURCES, GatewayError, internal_error, out_of_resources, shutting_down
from gateway.parser import wire

log = logging.getLogger("warmroute.parser")

JOB_S: Final = 20.0
WAIT_S: Final = 30.0
MEMORY_MB: Final = 1024  # of address space, plus a share of the body's size (helper.py)
MAX_WAITING: Final = 1024
_NO_RESULT: Final = "no result"  # a job's status, in addition to `wire`, with the GatewayError that caused it
_NOT_STARTED: Final = OUT_OF_RESOURCES | {errno.EAGAIN}  # EAGAIN: the limit of processes is reached

# The child uses the parent's module path, in any working directory.
BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from gateway.parser.helper import main; main(sys.argv[2:])"
)


class _Job:
    """One body, the operation on it, and the future of its result."""

    __slots__ = ("arguments", "body", "done")

    def __init__(self, arguments: tuple[Any, ...], body: bytes, done: asyncio.Future[tuple[Any, ...]]) -> None:
        self.arguments = arguments
        self.body = body
        self.done = done


class _FairQueue:
    """Queued jobs: FIFO per client, round robin over clients. All operations are O(1), except `drop`."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[_Job]] = {}  # by client, the next to be served first; no queue is empty
        self._size = 0

    def has_room(self, client: str) -> bool:
        """True if the client has fewer queued jobs than there are free slots."""
        return len(self._queues.get(client, ())) < MAX_WAITING - self._size

    def add(self, client: str, job: _Job) -> None:
        self._queues.setdefault(client, deque()).append(job)
        self._size += 1

    def take(self) -> _Job:
        """The next job. The queue must not be empty."""
        client, queue = next(iter(self._queues.items()))
        job = queue.popleft()
        self._size -= 1
        del self._queues[client]
        if queue:
            self._queues[client] = queue  # after all others
        return job

    def drop(self, client: str, job: _Job) -> None:
        """Remove a job whose caller is gone. O(the client's jobs)."""
        queue = self._queues.get(client)
        if queue and job in queue:
            queue.remove(job)
            self._size -= 1
            if not queue:
                del self._queues[client]

    def __len__(self) -> int:
        return self._size


class ParserProcess:
    """Runs jobs in a parser process (see the module). job_s: time limit of a job. wait_s: time limit including the queue.
    memory_mb: base address space. boot: the program. operations: of features, by name, as "module:function"; they get the body
    and the job's other arguments, and return a tuple of plain values. They must be complete before the first job.
    """

    def __init__(self, *, job_s: float = JOB_S, wait_s: float = WAIT_S, memory_mb: int = MEMORY_MB, boot: str = BOOT) -> None:
        self.started = 0
        self.operations: dict[str, str] = {}
        self._job_s = job_s
        self._wait_s = wait_s
        self._memory_mb = memory_mb
        self._boot = boot
        self._waiting = _FairQueue()
        self._task: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._killed: list[subprocess.Popen[bytes]] = []  # not yet reaped
        self._sock: socket.socket | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The id of the running process; None without one."""
        return self._process.pid if self._process else None

    async def run(self, arguments: tuple[Any, ...], body: bytes, client: str = "") -> tuple[Any, ...]:
        """Run a job of this client and return its result.

        Raises GatewayError: 400 or 413 for the body, 503 or 500 if it could not be parsed.
        """
        if self._closed:
            raise shutting_down()
        if not self._waiting.has_room(client):
            raise out_of_resources("too many large bodies wait to be parsed")
        job = _Job(arguments, body, asyncio.get_running_loop().create_future())
        self._waiting.add(client, job)
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="parser")
        try:
            async with asyncio.timeout(self._wait_s):
                status, *values = await job.done
        except TimeoutError as late:
            raise out_of_resources("a large body waited too long to be parsed") from late
        finally:
            self._waiting.drop(client, job)
            job.body = b""
        if status == _NO_RESULT:
            raise values[0].again()
        if status == wire.REFUSED:
            code, name, message, param = values
            raise GatewayError(code, name, message, param=param)
        if status != wire.DONE:
            log.error("parsing failed", extra={"traceback": values[0]})
            raise internal_error()
        return tuple(values)

    async def close(self) -> None:
        """End the process; queued jobs fail with 503."""
        self._closed = True
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        while self._waiting:
            _fail(self._waiting.take(), shutting_down())
        self._kill()
        for process in self._killed:
            await asyncio.to_thread(process.wait)
        self._killed.clear()

    async def _work(self) -> None:
        """Run jobs until the queue is empty."""
        try:
            while self._waiting:
                job = self._waiting.take()
                if not job.done.done():
                    await self._do(job)
        finally:
            self._task = None

    async def _do(self, job: _Job) -> None:
        """One job. Any failure before its result is read kills the process: no later job must read a part of it."""
        error: GatewayError | None = None
        try:
            async with asyncio.timeout(self._job_s):
                if self._process and self._process.poll() is not None:
                    self._kill()  # it was killed from outside
                sock = self._sock or self._start()
                result = await _exchange(sock, job.arguments, job.body)
        except TimeoutError:
            error = out_of_resources("parsing a large body took too long")
        except (OSError, ValueError, EOFError) as broken:  # it exited, could not be started, or wrote no result
            lacking = isinstance(broken, OSError) and broken.errno in _NOT_STARTED
            error = out_of_resources(f"no process to parse a large body: {broken}") if lacking else internal_error()
            log.error("the parser process failed", extra={"error": str(broken), "pid": self.pid})
            broken.__traceback__ = None  # asyncio keeps the error in a cycle, and its frames the job
        except BaseException:
            _fail(job, shutting_down())
            self._kill()
            raise
        if error:
            self._kill()
            _fail(job, error)
        elif not job.done.done():
            job.done.set_result(result)

    def _start(self) -> socket.socket:
        """Start a process (1 ms). Raises OSError."""
        self._killed = [process for process in self._killed if process.poll() is None]
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        limits = str(max(1, round(self._job_s))), str(self._memory_mb)
        arguments = [str(theirs.fileno()), *limits, json.dumps(self.operations)]
        try:
            # In a new session, so that signals of the terminal reach only the parent.
            self._process = subprocess.Popen(
                [sys.executable, "-c", self._boot, json.dumps(sys.path), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._sock = ours
        self.started += 1
        return ours

    def _kill(self) -> None:
        if self._sock:
            self._sock.close()
        if self._process:
            self._process.kill()
            self._killed.append(self._process)
        self._sock = self._process = None

    def __repr__(self) -> str:
        return f"<ParserProcess {self.pid}, {len(self._waiting)} waiting>"


async def _exchange(sock: socket.socket, arguments: tuple[Any, ...], body: bytes) -> tuple[Any, ...]:
    """Write a job, read its result. Raises ConnectionError if the process has exited."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, wire.job(arguments, len(body)))
    await loop.sock_sendall(sock, body)
    (length,) = wire.RESULT.unpack(await _read(sock, wire.RESULT.size))
    result: tuple[Any, ...] = marshal.loads(await _read(sock, length))
    return result


async def _read(sock: socket.socket, length: int) -> bytearray:
    loop, data, at = asyncio.get_running_loop(), bytearray(length), 0
    while at < length:
        size = await loop.sock_recv_into(sock, memoryview(data)[at:])
        if not size:
            raise ConnectionError("the process ended before its result was read")
        at += size
    return data


def _fail(job: _Job, error: GatewayError) -> None:
    if not job.done.done():
        job.done.set_result((_NO_RESULT, error))
