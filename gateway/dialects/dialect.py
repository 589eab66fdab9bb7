"""What an API is to the gateway: the interface of a dialect, and of what it makes for one answer.

    body ── parse ──► ApiRequest ──► replica ──► a stream:       opening, then a StreamReader, chunk by chunk
                                            └──► a plain answer: usage_of, or an AnswerTail where it is large
    what goes wrong ──► error_body before the answer's first byte, error_event after it

A dialect reads and writes bytes and does nothing else: no I/O, no clock, no event loop. One object per dialect serves all
requests; a request's own state is in its ApiRequest and its StreamReader. A new dialect is a class and one line in `table.py`.

A dialect must have a `name`, `parse`, `reader` and `error_body`; all else has a default, which does without: no usage is read,
no stream resumed, and one that fails is cut. Of a StreamReader `feed` and `finish` are needed; of the other classes everything
that raises NotImplementedError, where the dialect returns one at all.

Errors outside of a request's life (an unknown path, a malformed or an unwanted connection: `server/errors.py`) have OpenAI's
shape, whatever the path's dialect.

These are base classes, and no Protocols, because compiled code calls them directly; a dialect is compiled with the rest.
"""

from __future__ import annotations

from typing import ClassVar

from gateway.dialects.api_request import ApiRequest
from gateway.dialects.diagnosis import Fingerprint
from gateway.dialects.json_edits import Edit
from gateway.dialects.usage import Usage
from gateway.errors import GatewayError, ReplicaFailure
from router import Prompt


class StreamReader:
    """Reads one stream as it passes; any cutting into chunks gives the same bytes and the same findings.

    usage: what the stream has reported so far. done: it has ended as complete ([DONE], or what its dialect has instead).
    reported: the engine's failure, whose event the client has: nothing may follow it. within_event: the head of an event was
    passed on and its end was not, so that what follows would be taken for a part of it. holds: what ends the stream is here,
    but is held back. enough: the rest of the stream is not wanted: its replica need not write it.
    """

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.done = False
        self.reported: ReplicaFailure | None = None
        self.within_event = False
        self.holds = False
        self.enough = False

    @property
    def last_number(self) -> int:
        """Of the last event that has gone to the client and has a number; -1: none had."""
        return -1

    @property
    def passed(self) -> int:
        """Tokens of the answer that have passed, as far as events show them: for a stream that ends before its usage."""
        return 0

    @property
    def late(self) -> bool:
        """Whether more than a token has passed after the usage: then it is not that of the whole answer."""
        return False

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes of the stream; returns what may go to the client now."""
        raise NotImplementedError

    def finish(self) -> bytes:
        """The stream is over, as it should be; returns what was still held (an event without its end)."""
        raise NotImplementedError

    def raise_failure(self) -> None:
        """Raises ReplicaFailure if the engine has reported within the stream that it failed, and this reader checks for
        that."""


class StreamOpening:
    """A stream's first bytes, until they show whether the engine is at work. silent: all of them so far carry no data.

    most: bytes of a silent beginning, beyond which no engine is believed to be at work.
    """

    most: ClassVar[int] = 16 << 10  # a keep-alive each second is 3 kB in five minutes

    def __init__(self) -> None:
        self.silent = True

    def feed(self, data: bytes) -> bool:
        """Take the next bytes. True: the stream has begun well; False: more of it has to be awaited.

        Raises ReplicaFailure if it begins with the engine's failure.
        """
        raise NotImplementedError


class AnswerEditor:
    """What a client has asked of its answer that engines do not do: edits of one answer on its way, in the client's dialect.

    id: the answer's, "" as long as it is not known.
    """

    def __init__(self) -> None:
        self.id = ""

    def whole(self, body: bytes, usage: Usage | None) -> tuple[bytes, Usage | None]:
        """A whole plain answer with its usage, as the client and the meter get them. Never raises."""
        raise NotImplementedError

    def reader(self, inner: StreamReader) -> StreamReader:
        """For its stream. inner: reads it as it comes from the replica."""
        raise NotImplementedError


class AnswerTail:
    """Looks for the usage in a large plain answer that is passed on as it comes: `feed` all but its beginning."""

    def feed(self, data: bytes) -> None:
        raise NotImplementedError

    def usage(self) -> Usage | None:
        raise NotImplementedError


class PartialAnswer:
    """What a client knows of a stream that broke off. finished: it knows why the text ends; done: it has the stream's end."""

    def __init__(self) -> None:
        self.text = ""
        self.usage: Usage | None = None
        self.finished = False
        self.done = False

    @property
    def tokens(self) -> int:
        """Generated so far."""
        raise NotImplementedError


class PartialReader:
    """Reads the events that went to a client, one at a time: `step` until it is `over`, then ask for the `result`."""

    @property
    def over(self) -> bool:
        raise NotImplementedError

    def step(self) -> bool:
        """Read one event. False: they are more than one text, and nothing more is to be requested."""
        raise NotImplementedError

    def result(self) -> PartialAnswer:
        raise NotImplementedError


class AnswerCollector:
    """Makes one whole answer of an engine's stream: `feed` until it is `over`, `finish`, then `answer`."""

    @property
    def over(self) -> bool:
        """Whether nothing more of the stream is wanted."""
        raise NotImplementedError

    def feed(self, chunk: bytes) -> None:
        """Raises ReplicaFailure."""
        raise NotImplementedError

    def finish(self) -> None:
        """The stream is over."""
        raise NotImplementedError

    def answer(self) -> bytes:
        """For the client. Raises ReplicaFailure if it is not whole."""
        raise NotImplementedError


IMPOSSIBLE, COMPLETE, ASK = "impossible", "complete", "ask"
"""Of a continuation: it cannot be requested; nothing is left to generate; it is to be requested."""


class Continuation:
    """How a broken stream of a dialect goes on at another replica."""

    def partial(self, data: bytes | bytearray) -> PartialReader:
        """Reads what went to the client. data: whole events."""
        raise NotImplementedError

    def request(self, body: bytes, text: str, tokens: int) -> tuple[str, list[Edit]]:
        """What to change in the request so that it asks for the rest: (IMPOSSIBLE, COMPLETE or ASK, the edits).

        text, tokens: the answer so far. O(length of the body).
        """
        raise NotImplementedError

    def reader(self, so_far: PartialAnswer, *, strip_usage: bool) -> StreamReader:
        """Turns the continuation's events into those of the answer that they continue."""
        raise NotImplementedError

    def ending(self, so_far: PartialAnswer, usage: Usage | None) -> bytes:
        """The end of a stream of which nothing but the end is missing. usage: to be reported there, if the client wants it."""
        raise NotImplementedError


def cannot_count(api: str, path: str) -> str:
    """`lacking` of a path that counts tokens. path: the one that generates."""
    return (
        f"No replica that is up can count the tokens of a {api} request: none knows the path, which is not translated, unlike"
        f" {path}. The usage of an answer has the count."
    )


class Answers:
    """The reading of answers: a dialect's own, or for one request that a replica got in another form (`request/forms.py`).

    translated: the replica is asked in another dialect; `whole` and `error` turn what it answers into the client's. collects:
    its plain answers are streams, for the `collector`.
    """

    translated = False
    collects = False

    def reader(self, api: ApiRequest, *, watchful: bool) -> StreamReader:
        """For one answer's stream. watchful: an event by which the engine reports its failure does not pass."""
        raise NotImplementedError

    def opening(self, data: bytes) -> StreamOpening | None:
        """For the beginning of a stream, none of which was fed yet. None: these first bytes show that it has begun well."""
        return None

    def usage_of(self, body: bytes) -> Usage | None:
        """The usage in a whole plain answer. Raises ReplicaFailure if no engine answers so."""
        return None

    def object_in(self, begin: bytes) -> str:
        """The id of the object that an answer is. begin: of a plain answer, or of a stream's events. "": there is none."""
        return ""

    def answer_tail(self, begin: bytes) -> AnswerTail | None:
        """For a large plain answer that begins so. Raises ReplicaFailure if no engine answers so."""
        return None

    def whole(self, body: bytes) -> bytes:
        """A whole plain answer, as the client reads it. Raises ReplicaFailure if no engine answers so."""
        return body

    def error(self, status: int, body: bytes) -> bytes:
        """The body of the replica's error, as the client reads it."""
        return body

    def collector(self) -> AnswerCollector:
        raise NotImplementedError


class Dialect(Answers):
    """One API. name: unique. strict: its paths take POST only, with a body that it understands; else any method goes on, and
    any body.
    """

    name: ClassVar[str] = ""
    strict: ClassVar[bool] = True
    continuation: ClassVar[Continuation | None] = None  # None: broken streams of this dialect are not resumed
    translatable: ClassVar[bool] = False  # replicas that do not speak it may be asked in another form
    makes_objects: ClassVar[bool] = True  # what the body says of storing is about its answer
    lacking: ClassVar[str] = ""  # what clients read where no replica knows the path (404); "": the replica's own answer
    kept_here: ClassVar[bool] = False  # its paths name objects that the gateway may keep itself
    in_background: ClassVar[bool] = False  # what it asks to be stored runs in the background
    id_header: ClassVar[bytes] = b""  # in which its clients look for the request's id, beside X-Request-Id

    # -- requests

    def parse(self, raw: bytes, most: int = 0) -> ApiRequest:
        """Parse a body. Raises GatewayError 400 that names the field and says what it should be.

        most: how many parts its prompt may have, or NeedsHelper is raised; 0: any number.
        """
        raise NotImplementedError

    def is_opaque(self, raw: bytes) -> bool:
        """Whether a large body is passed on unread, because its beginning shows that the dialect does not read it."""
        return False

    def parse_opaque(self, raw: bytes) -> ApiRequest:
        return ApiRequest("", None, "", stream=False, metered=False, body=raw)

    def parse_complex(self, raw: bytes) -> ApiRequest | None:
        """A body with more values than may be parsed. None: it is refused."""
        return None

    def may_store(self, api: ApiRequest, path: str) -> bool:
        """Whether the server may keep something for this request, so that sending it twice does harm."""
        return False

    def refers(self, path: str) -> str:
        """The id of the object at the server that a path names, "" if it names none."""
        return ""

    # -- answers, beside how they are read

    def editor(self, api: ApiRequest, prompt: Prompt, *, caches: bool, diagnoses: bool) -> AnswerEditor | None:
        """For a good answer to a request that has breakpoints or `demands`. caches: the engine has a prefix cache, as far as is
        known. diagnoses: the gateway answers `api.diagnosis`. None: it goes to the client as it is.
        """
        return None

    def compared(self, before: Fingerprint | None, now: Fingerprint) -> bytes:
        """`api.diagnosis.told`, of a dialect that sets `diagnosis`. before: None: no such prompt is known. O(keys)."""
        raise NotImplementedError

    # -- errors

    def error_body(self, error: GatewayError, request_id: str = "") -> bytes:
        """request_id: of the request, for dialects whose errors name it."""
        raise NotImplementedError

    def error_event(self, error: GatewayError, reader: StreamReader | None) -> bytes | None:
        """What makes the dialect's official clients raise in mid-stream. None: nothing does, the connection is to be cut.

        reader: has read the stream so far.
        """
        return None


def ended_without_done() -> ReplicaFailure:
    return ReplicaFailure("reset", "the stream ended without its last event")
