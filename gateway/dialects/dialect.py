"""The interface of a dialect, and of the objects that it makes for one answer.

    body ── parse ──► ApiRequest ──► replica ──► a stream:       FirstEvent, then a StreamReader, chunk by chunk
                                            └──► a plain answer: usage_of, or an AnswerTail for a large one
    an error ──► error_body before the answer's first byte, error_event after it

A dialect reads and writes bytes and does nothing else: no I/O, no clock, no event loop. One object per dialect serves all
requests; a request's own state is in its ApiRequest and its StreamReader. A new dialect is a class and one line in `table.py`.

A dialect must have a `name`, `parse`, `reader` and `error_body`. Everything else has a default: no usage is read, no stream is
resumed, and a failed stream is cut. A StreamReader must have `feed` and `finish`; the other classes must have every method that
raises NotImplementedError, if the dialect returns one of them at all.

Errors outside of a request (an unknown path, a malformed or an unwanted connection: `server/errors.py`) have OpenAI's shape on
all paths.

These are base classes and not Protocols, because compiled code calls them directly; a dialect is compiled with the rest.
"""

from __future__ import annotations

from typing import ClassVar

from gateway.dialects.api_request import ApiRequest
from gateway.dialects.diagnosis import Fingerprint
from gateway.dialects.events.first_event import FirstEvent
from gateway.dialects.excerpt import replica_error
from gateway.dialects.finished_answer import AnswerAssembler, FinishedAnswer
from gateway.dialects.full_context import FullContext
from gateway.dialects.json_edits import Edit
from gateway.dialects.usage import Usage
from gateway.errors import GatewayError, ReplicaFailure
from router import Prompt


class StreamReader:
    """Reads one stream as it passes. Every division into chunks gives the same bytes and the same state.

    usage: as reported so far. opened: an event has passed that begins the answer without a token (a role, `message_start`,
    progress). started: an event with output has passed: a text, a call or reasoning. done: the stream is complete ([DONE], or
    the equivalent of its dialect). reported: the engine's failure, whose event the client has: nothing may follow it. Before
    `started`, such an event does not pass: it is `failure`. within_event: the beginning of an event was passed on without its
    end, so the next bytes would be read as a part of it. holds: the last event has arrived, but is held back. enough: the rest
    of the stream is not needed, and its replica need not write it.
    """

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.opened = self.started = False
        self.done = False
        self.reported: ReplicaFailure | None = None
        self.failure: ReplicaFailure | None = None
        self.within_event = False
        self.holds = False
        self.enough = False

    @property
    def last_number(self) -> int:
        """The number of the last numbered event that the client has; -1 if there is none."""
        return -1

    @property
    def passed(self) -> int:
        """Tokens of the answer passed so far, as far as events show them: for a stream that ends before its usage."""
        return 0

    @property
    def late(self) -> bool:
        """True if more than a token has passed after the usage, which then does not cover the whole answer."""
        return False

    @property
    def finished(self) -> bool:
        """True if the answer has its finish reason, so that a regular end of the stream completes it without `done`."""
        return False

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes of the stream. Returns the bytes for the client."""
        raise NotImplementedError

    def finish(self) -> bytes:
        """The regular end of the stream. Returns the bytes still held (an event without its end)."""
        raise NotImplementedError

    def raise_failure(self) -> None:
        """Raises ReplicaFailure if the engine has reported its failure by an event that was not passed on."""
        if failure := self.failure:
            # A new object: a raised exception refers to the frames that it passed, and they to this reader.
            raise ReplicaFailure(failure.reason, failure.message, reached=failure.reached)


class OuterReader(StreamReader):
    """Reads the output of another reader. `note` takes over its findings, except `within_event` and `holds`."""

    def __init__(self, inner: StreamReader) -> None:
        super().__init__()
        self.inner = inner

    @property
    def last_number(self) -> int:
        return self.inner.last_number

    @property
    def passed(self) -> int:
        return self.inner.passed

    @property
    def late(self) -> bool:
        return self.inner.late

    @property
    def finished(self) -> bool:
        return self.inner.finished

    def raise_failure(self) -> None:
        self.inner.raise_failure()

    def note(self) -> None:
        inner = self.inner
        self.usage, self.done, self.reported, self.enough = inner.usage, inner.done, inner.reported, inner.enough
        self.opened, self.started = inner.opened, inner.started


class AnswerEditor:
    """Edits one answer in the client's dialect, for features that the client asked for and the engine lacks.

    id: the answer's id, "" until it is known.
    """

    def __init__(self) -> None:
        self.id = ""

    def whole(self, body: bytes, usage: Usage | None) -> tuple[bytes, Usage | None]:
        """Returns a whole plain answer and its usage, for the client and the meter. Never raises."""
        raise NotImplementedError

    def reader(self, inner: StreamReader) -> StreamReader:
        """The reader of the edited stream. inner: the reader of the replica's stream."""
        raise NotImplementedError


class AnswerTail:
    """Searches a large plain answer for its usage while it streams: `feed` everything but its beginning."""

    def feed(self, data: bytes) -> None:
        raise NotImplementedError

    def usage(self) -> Usage | None:
        raise NotImplementedError


IMPOSSIBLE, COMPLETE, ASK = "impossible", "complete", "ask"
"""Results for a continuation: it cannot be requested; the answer is already complete; it is to be requested."""


class Continuation:
    """Continues a broken stream of a dialect at another replica."""

    def partial(self) -> AnswerAssembler:
        """An assembler for the events that the client has. More than one text, or an event without its end, has no value."""
        raise NotImplementedError

    def request(self, body: bytes, text: str, tokens: int) -> tuple[str, list[Edit]]:
        """The edits of the request that ask for the rest of the answer: (IMPOSSIBLE, COMPLETE or ASK, the edits).

        text, tokens: the answer so far. O(length of the body).
        """
        raise NotImplementedError

    def reader(self, so_far: FinishedAnswer, *, strip_usage: bool) -> StreamReader:
        """A reader that turns the continuation's events into events of the first answer."""
        raise NotImplementedError

    def ending(self, so_far: FinishedAnswer, usage: Usage | None) -> bytes:
        """The missing end of a stream whose answer is complete. usage: reported in it, if the client asked for usage."""
        raise NotImplementedError


def cannot_count(api: str, path: str) -> str:
    """The message (`Dialect.lacking`) of a path that counts tokens. path: the path that generates."""
    return (
        f"No replica that is up can count the tokens of a {api} request: none knows the path, which is not translated, unlike"
        f" {path}. The usage of an answer has the count."
    )


class Answers:
    """Reads answers: in a dialect's own form, or in the form of the replica that got one request (`request/forms.py`).

    translated: the replica speaks another dialect, so `whole` and `error` convert its answers to the client's. collects: the
    replica streams plain answers (`collecting`).
    """

    translated = False
    collects = False

    def reader(self, api: ApiRequest, *, watchful: bool) -> StreamReader:
        """A reader for one answer's stream. watchful: an event by which the engine reports its failure does not pass."""
        raise NotImplementedError

    def first_event(self, begin: bytes) -> FirstEvent | None:
        """A reader of the first event of a stream with this beginning. None: it is no failure of the engine."""
        return None

    def usage_of(self, body: bytes) -> Usage | None:
        """The usage in a whole plain answer. Raises ReplicaFailure for an answer that no engine gives."""
        return None

    def object_in(self, begin: bytes) -> str:
        """The id of the stored object that an answer is, "" if it is none. begin: of a plain answer, or of a stream's
        events.
        """
        return ""

    def answer_tail(self, begin: bytes) -> AnswerTail | None:
        """A reader of a large plain answer with this beginning. Raises ReplicaFailure for an answer that no engine gives."""
        return None

    def whole(self, body: bytes) -> bytes:
        """A whole plain answer, converted for the client. Raises ReplicaFailure for an answer that no engine gives."""
        return body

    def as_stream(self, api: ApiRequest, body: bytes) -> bytes:
        """A whole plain answer as the stream that the client has asked for. Raises as `whole` and readers do."""
        reader = self.reader(api, watchful=False)
        return reader.feed(b"data: " + body + b"\n\ndata: [DONE]\n\n") + reader.finish()

    def error(self, status: int, body: bytes) -> bytes:
        """The body of the replica's error, converted for the client."""
        return body

    def collecting(self) -> StreamReader:
        """A reader of a streamed plain answer, whose output is a stream of chat."""
        raise NotImplementedError


class Dialect(Answers):
    """One API. name: unique. strict: its paths accept POST only, with a valid body of the dialect; other dialects pass on any
    method and any body.
    """

    name: ClassVar[str] = ""
    strict: ClassVar[bool] = True
    continuation: ClassVar[Continuation | None] = None  # None: broken streams of this dialect are not resumed
    translatable: ClassVar[bool] = False  # replicas without it may be asked in another dialect
    makes_objects: ClassVar[bool] = True  # the answer is the object that `store` in the body is about
    lacking: ClassVar[str] = ""  # the client's message if no replica knows the path (404); "": the replica's own answer
    adds_cached: ClassVar[bool] = False  # its usage counts cached tokens beside the other ones
    kept_here: ClassVar[bool] = False  # its paths name objects that the gateway may store itself
    pulsed: ClassVar[bool] = False  # clients that wait for a stream get signs of life
    in_background: ClassVar[bool] = False  # a stored request may run in the background
    id_header: ClassVar[bytes] = b""  # name of the header for the request's id that its clients expect beside X-Request-Id

    # -- requests

    def parse(self, raw: bytes, most: int = 0) -> ApiRequest:
        """Parse a body. Raises GatewayError 400 that names the field and its valid values.

        most: maximum number of parts of its prompt; beyond it NeedsHelper is raised. 0: no maximum.
        """
        raise NotImplementedError

    def is_opaque(self, raw: bytes) -> bool:
        """True if a large body is passed on unread, because its beginning shows that the dialect does not read it."""
        return False

    def parse_opaque(self, raw: bytes) -> ApiRequest:
        return ApiRequest("", None, "", stream=False, metered=False, body=raw)

    def parse_complex(self, raw: bytes) -> ApiRequest | None:
        """Parse a body with too many values to be parsed as a whole. None: the request is refused."""
        return None

    def may_store(self, api: ApiRequest, path: str) -> bool:
        """True if the server may store an object for this request, so that sending it twice does harm."""
        return False

    def refers(self, path: str) -> str:
        """The id of the stored object that a path names, "" if it names none."""
        return ""

    # -- answers, beside `Answers`

    def editor(self, api: ApiRequest, prompt: Prompt, *, caches: bool, diagnoses: bool) -> AnswerEditor | None:
        """The editor of a good answer to a request that has breakpoints or `demands`; None: the answer passes unchanged.
        caches: the engine has a prefix cache, as far as known. diagnoses: the gateway answers `api.diagnosis`.
        """
        return None

    def is_opening(self, event: bytes) -> bool:
        """True if an event only begins an answer: it confirms the request, or gives the role. If a stream is begun again at
        another replica, its client has such events already.
        """
        return False

    def assembler(self) -> AnswerAssembler | None:
        """An assembler for one answer, as the client gets it. None: no model answers on this path."""
        return None

    def compared(self, before: Fingerprint | None, now: Fingerprint) -> bytes:
        """The value of `api.diagnosis.told`, for a dialect that sets `diagnosis`. before: None if no such prompt is known.
        O(keys).
        """
        raise NotImplementedError

    def pulse(self, words: str, *, event: bool = False) -> bytes:
        """A sign of life within a stream, between two events, which the dialect's official clients ignore; if it is `pulsed`.

        words: the cause of the wait, one line. Not every dialect has a place for them. event: for a client that counts events
        only; a comment, if the dialect has no such client.
        """
        raise NotImplementedError

    def streamed(self, api: ApiRequest, body: bytes) -> bytes:
        """A whole plain answer of this dialect as a stream. Raises ValueError if it has no such form."""
        raise ValueError("no stream form")

    # -- errors

    def replica_error(self, status: int, body: bytes) -> GatewayError:
        """A replica's error, for an event. body: in the shape of this dialect, or its beginning."""
        return replica_error(status, body)

    def error_body(self, error: GatewayError, request_id: str = "") -> bytes:
        """The body of an error. request_id: for dialects whose errors name it."""
        raise NotImplementedError

    def full_context_error(self, full: FullContext, body: bytes, request_id: str) -> bytes:
        """An engine's error about a full context, in the words of this API. body: the error in its shape, from the engine or
        translated.
        """
        return body

    def error_event(self, error: GatewayError, reader: StreamReader | None) -> bytes | None:
        """An event in mid-stream at which the dialect's official clients raise. None: there is none, and the connection is to
        be cut.

        reader: of the stream so far.
        """
        return None


def ended_without_done() -> ReplicaFailure:
    return ReplicaFailure("reset", "the stream ended without its last event")
