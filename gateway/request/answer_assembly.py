"""The answer of one request as a value: assembled once for all features that ask, from the bytes for the client.

    Exchange.assemble ──► AnswerAssembly ◄── events of a stream, a body        before a tap gets them
                                └── answer ──► FinishedAnswer

Other requests have no assembly. Held bytes are charged to the request's lease; without memory there is no value.
"""

from __future__ import annotations

from typing import Final

from gateway.admission.memory import MemoryLease
from gateway.dialects.dialect import AnswerTail, OuterReader, StreamReader
from gateway.dialects.finished_answer import MAX_ANSWER, AnswerAssembler, FinishedAnswer
from gateway.dialects.usage import Usage

STEP: Final = 1 << 16  # bytes that are charged at once


class AnswerAssembly:
    """Assembles one answer, and charges the held bytes."""

    __slots__ = ("_assembler", "_charged", "_lease")

    def __init__(self, assembler: AnswerAssembler, lease: MemoryLease) -> None:
        self._assembler = assembler
        self._lease = lease
        self._charged = 0

    @property
    def answer(self) -> FinishedAnswer | None:
        """The value so far; None without one."""
        return self._assembler.answer()

    def feed(self, data: bytes) -> None:
        """The next bytes of a stream."""
        self._assembler.feed(data)
        self.charge(self._assembler.size)

    def finish(self) -> None:
        self._assembler.finish()

    def read(self, body: bytes) -> None:
        """A whole plain answer."""
        if self.charge(len(body)):
            self._assembler.read(body)

    def charge(self, size: int) -> bool:
        """Charge this size in all. False: there is no memory for it, so there is no value."""
        if size <= self._charged:
            return True
        if size > MAX_ANSWER or not self._lease.grow(size - self._charged + STEP):
            self._assembler.drop()
            return False
        self._charged = size + STEP
        return True

    def __repr__(self) -> str:
        return f"<AnswerAssembly {self.answer!r}>"


class AssembledTail(AnswerTail):
    """Passes the pieces of a large plain answer on to an assembly, too."""

    def __init__(self, inner: AnswerTail, assembly: AnswerAssembly, begin: bytes) -> None:
        self._inner = inner
        self._assembly = assembly
        self._body = bytearray()
        self._refused = False
        self._add(begin)

    def feed(self, data: bytes) -> None:
        self._inner.feed(data)
        self._add(data)

    def usage(self) -> Usage | None:
        """The usage. The end of the answer; a part of an answer has no value."""
        body, self._body = bytes(self._body), bytearray()
        if body:
            self._assembly.read(body)
        return self._inner.usage()

    def _add(self, data: bytes) -> None:
        if self._refused:
            return
        if self._assembly.charge(len(self._body) + len(data)):
            self._body += data
        else:
            self._refused = True
            self._body.clear()


class AssembledReader(OuterReader):
    """Passes the bytes of a stream on to an assembly, too."""

    def __init__(self, inner: StreamReader, assembly: AnswerAssembly) -> None:
        super().__init__(inner)
        self._assembly = assembly

    def feed(self, chunk: bytes) -> bytes:
        return self._noted(self.inner.feed(chunk))

    def finish(self) -> bytes:
        out = self._noted(self.inner.finish())
        self._assembly.finish()
        return out

    def _noted(self, out: bytes) -> bytes:
        self._assembly.feed(out)
        self.note()
        self.within_event, self.holds = self.inner.within_event, self.inner.holds
        return out
