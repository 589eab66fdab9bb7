"""A client's request, understood as far as routing and metering need it, and its prompt's block keys for the router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gateway.dialects.diagnosis import Diagnosis
from gateway.dialects.json_edits import Edit
from gateway.dialects.prompt.segments import Outline
from router import Prompt, seed, text_keys, token_keys

MAX_MODEL_CHARS: Final = 256  # of a model's name, in requests and in model lists
MAX_SESSION_CHARS: Final = 256
TEXT: Final = "text"


class NeedsHelper(Exception):
    """The body is more work than the event loop should do at once; the parser process can do it."""


class ApiRequest:
    """One request, parsed by its dialect.

    model: "" where the body names none. prompt: canonical text or token ids, None where the body has none that we know. made:
    instead of it, once they are made, the prompt's block keys. salt: of fixed length at most; what keeps this prompt apart from
    others that read the same. stream: the client wants a stream. metered: a generation, whose usage is counted. body: what goes
    to the replica, once `edits` are applied: (start, end, new bytes) each; () when that is done. strip_usage: the usage event
    of the stream is ours, not the client's. stores: whether the answer is to be kept by the server, where the body says so.
    harmless: it may be sent twice, although it generates nothing. billing: edits of `body` that cut out what a client writes
    for its provider's bill (`anthropic/billing.py`). countable: the engine's count of prompt tokens is about this one prompt,
    so that the router may learn from it. Not so for a batch of prompts, several answers, or a prompt that the engine cuts or
    replaces. breakpoints: where in the canonical prompt the client wants it cached, and how long (`prompt/marks.py`). images:
    in the prompt. prewarm: edits of `body` for engines that always generate a token, where the client wants none. diagnosis:
    the client asks where its prompt has left an earlier one, None: it does not. session: the conversation that the body names,
    "" if it names none. alias: the name that the client has used for the model, "" if that was the model's own. refers: the id
    of an object at the server that the request goes on with, "" without one. references: some of its items are ids of items at
    the server. keeps: the answer is such an object. size: of all that is to be computed, in bytes or token ids, where that is
    more than the prompt (a batch); 0 else. outline: of the prompt, where somebody wants it, else ().
    """

    __slots__ = (
        "alias",
        "billing",
        "body",
        "breakpoints",
        "countable",
        "diagnosis",
        "edits",
        "harmless",
        "images",
        "keeps",
        "made",
        "metered",
        "model",
        "outline",
        "prewarm",
        "prompt",
        "references",
        "refers",
        "salt",
        "session",
        "size",
        "stores",
        "stream",
        "strip_usage",
    )

    def __init__(
        self,
        model: str,
        prompt: bytes | list[int] | None,
        salt: str,
        *,
        stream: bool,
        metered: bool,
        body: bytes,
    ) -> None:
        self.model = model
        self.prompt = prompt
        self.salt = salt
        self.stream = stream
        self.metered = metered
        self.body = body
        self.edits: Sequence[Edit] = ()
        self.strip_usage = False
        self.made: Prompt | None = None
        self.stores: bool | None = None
        self.countable = True
        self.harmless = False
        self.session = ""
        self.breakpoints: tuple[tuple[int, int], ...] = ()
        self.billing: list[Edit] = []
        self.prewarm: list[Edit] = []
        self.diagnosis: Diagnosis | None = None
        self.alias = ""
        self.size = 0
        self.images = 0
        self.refers = ""
        self.references = False
        self.keeps = False
        self.outline: Outline = ()

    def drop(self) -> None:
        """The request is over: drop what is large, whatever still refers to it."""
        self.body, self.prompt, self.made, self.outline = b"", None, None, ()

    @property
    def demands(self) -> bool:
        """Whether the client wants something of the answer that not every engine does (`Dialect.editor`)."""
        return bool(self.prewarm) or self.diagnosis is not None

    @property
    def repeatable(self) -> bool:
        """Sending it twice does no harm: it computes something from a prompt (unlike a file upload, say)."""
        return self.metered or self.harmless or self.has_prompt

    @property
    def has_prompt(self) -> bool:
        """Whether the body has a prompt that we know."""
        return self.prompt is not None or self.made is not None

    def __repr__(self) -> str:
        return f"<ApiRequest {self.model!r}, {len(self.body)} bytes>"


def router_prompt(
    api: ApiRequest,
    blocks: tuple[int, int],
    scale: str = TEXT,
    session: tuple[str, int] = ("", 0),
    client: int = 0,
    scope: tuple[str, ...] = (),
) -> Prompt:
    """The prompt for the router: its block keys, in units of bytes of its canonical text, or of token ids.

    Seeded so that models and cache salts never match each other, nor do different scopes (names that the caller adds).
    blocks: the length of a block in bytes, and in token ids. scale: the name under which bytes per token are learned. session:
    its name and its number, as in `Prompt`.

    O(length of the prompt) the first time. From then on the request has the keys, and no longer the canonical prompt; one that
    was parsed by another process has them from the beginning, made with the blocks and the scope of then.
    """
    name, number = session
    if (made := api.made) is not None:
        again = Prompt(made.keys, made.units, made.block_units, scale if made.scale else "", name, client, number)
        again.breakpoints = made.breakpoints
        return again
    prompt = api.prompt
    if prompt is None:
        return Prompt(b"", 0, blocks[0], scale, name, client, number)
    first = seed(api.model, api.salt, *scope)
    if isinstance(prompt, bytes):
        made = Prompt(text_keys(prompt, blocks[0], first), max(len(prompt), api.size), blocks[0], scale, name, client, number)
        if api.breakpoints:
            made.breakpoints = _in_blocks(api.breakpoints, blocks[0])
    else:
        made = Prompt(token_keys(prompt, blocks[1], first), max(len(prompt), api.size), blocks[1], "", name, client, number)
    api.made, api.prompt = made, None
    return made


def _in_blocks(breakpoints: tuple[tuple[int, int], ...], block: int) -> tuple[tuple[int, int], ...]:
    """Their full blocks in the place of their offsets; of those in the same block the one that lasts longest."""
    longest = dict[int, int]()
    for offset, seconds in breakpoints:
        blocks = offset // block
        if blocks:
            longest[blocks] = max(seconds, longest.get(blocks, 0))
    return tuple(longest.items())
